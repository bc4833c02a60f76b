"""Proves that the grouped kernel equals attention with repeated heads, that it loads K and V once,
and what merging does.
"""

from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import naive as recompute
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache import optimized as lesson3
from lessons.l03_kv_cache.lab.testing import CONFIG, decode_inputs
from lessons.l03_kv_cache.stand_ins import decode_attention_torch
from lessons.l05_gqa import naive, optimized
from lessons.l05_gqa.convert import first_head, mean_head, merge_heads, merged, repeated
from lessons.l05_gqa.lab import traffic
from lessons.l05_gqa.lab.specs import KERNELS
from lessons.l05_gqa.optimized import (
    decode_attention,
    decode_attention_grouped,
    gqa_decode_kernel,
)
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device, interpreting
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    NotEquivalent,
    assert_same_bits,
    draw,
    edge_lengths,
    floor_for,
    prove,
    with_canaries,
)
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.refusals import KINDS, assert_refused

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter


# ---------------------------------------------------------------- the kernel


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, dtype",
    [
        (4, 4, 64, torch.float32),
        (6, 2, 64, torch.float32),
        (8, 2, 96, torch.float32),
        (4, 1, 128, torch.float32),
        (4, 2, 256, torch.float32),
        (4, 2, 8, torch.float32),
        (8, 1, 80, torch.bfloat16),
        (8, 2, 128, torch.bfloat16),
        (32, 1, 64, torch.bfloat16),
        (17, 1, 128, torch.float16),
        (6, 2, 64, torch.float16),
    ],
)
@pytest.mark.sample(4)
def test_gqa_decode_kernel(num_heads, num_kv_heads, head_dim, dtype, seed, proof):
    """MHA, GQA and MQA in a ragged batch with an empty sequence, its unused rows NaN; lengths
    around the tile; a window.
    """
    block_n = optimized.tiles_for(num_heads // num_kv_heads, head_dim, dtype.itemsize == 2)[
        "BLOCK_N"
    ]
    lengths = [0, 1, block_n - 1, block_n, block_n + 1, 2 * block_n + 3]
    inputs = decode_inputs(
        "normal", lengths, max(lengths) + 2, num_heads, num_kv_heads, head_dim, seed, dtype
    )
    for window in (None, block_n // 2 + 1):
        proof.record(
            gqa_decode_kernel,
            prove(
                lambda *x, w=window: decode_attention(*x, window=w),
                lambda *x, w=window: naive.decode_attention(*x, window=w),
                inputs,
            ),
        )


@pytest.mark.parametrize("name", ATTENTION_INPUTS)
@pytest.mark.sample(3)
def test_gqa_decode_kernel_on_hard_inputs(name, seed, proof):
    inputs = decode_inputs(name, [2, 40, 65], 70, 6, 2, 64, seed)
    for scale in (None, 0.4):
        # 0.4 · √64: logits three times as large
        floor = floor_for(torch.float32, "large_logits" if scale else name)
        proof.record(
            gqa_decode_kernel,
            prove(
                lambda *x, s=scale: decode_attention(*x, s),
                lambda *x, s=scale: naive.decode_attention(*x, s),
                inputs,
                floor=floor,
            ),
        )


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_gqa_decode_kernel_at_every_tile_size(block_n, seed, proof, monkeypatch):
    monkeypatch.setattr(
        optimized,
        "tiles_for",
        lambda *shape, own=optimized.tiles_for: {**own(*shape), "BLOCK_N": block_n},
    )
    lengths = edge_lengths(block_n, at_most=140)
    inputs = decode_inputs("ascending", lengths, max(lengths), 3, 1, 64, seed)
    proof.record(gqa_decode_kernel, prove(decode_attention, naive.decode_attention, inputs))


def test_grouped_attention_in_torch(seed):
    for num_heads, num_kv_heads in ((4, 4), (6, 2), (5, 1)):
        inputs = decode_inputs("large_logits", [0, 1, 7, 33], 40, num_heads, num_kv_heads, 16, seed)
        for window in (None, 5):
            prove(
                lambda *x, w=window: decode_attention_grouped(*x, window=w),
                lambda *x, w=window: naive.decode_attention(*x, window=w),
                inputs,
                floor=floor_for(torch.float32, "large_logits"),
            )


def test_repeating_is_multi_head_attention(seed):
    """The definition, head by head: query head h reads KV head h // group."""
    q, k, v = (
        draw("normal", (n, heads, 8), dtype=torch.float64, seed=seed + n * i)
        for i, (n, heads) in enumerate([(1, 6), (9, 2), (9, 2)])
    )
    out = naive.decode_repeated(q, k, v, 0.3)
    for h in range(6):
        alone = naive.decode_mha(
            q[:, h : h + 1], k[:, h // 3 : h // 3 + 1], v[:, h // 3 : h // 3 + 1], 0.3
        )
        torch.testing.assert_close(out[:, h : h + 1], alone)
    torch.testing.assert_close(out, recompute.attention(q, k, v, 0.3))


def test_a_sequence_does_not_depend_on_the_batch(seed):
    for dtype in (torch.float32, torch.bfloat16):
        q, k_cache, v_cache, lens = decode_inputs(
            "normal", [7, 33, 0, 70], 70, 6, 2, 64, seed, dtype
        )
        together = decode_attention(q, k_cache, v_cache, lens)
        for b in range(4):
            assert_same_bits(
                together[b],
                decode_attention(
                    q[b : b + 1], k_cache[b : b + 1], v_cache[b : b + 1], lens[b : b + 1]
                )[0],
            )


def test_probes_with_known_answers(seed):
    q, k_cache, v_cache, lens = decode_inputs("normal", [7, 33], 40, 6, 2, 16, seed)
    ones = torch.ones_like(v_cache)
    torch.testing.assert_close(
        decode_attention(q, k_cache, ones, lens), torch.ones_like(q), atol=1e-6, rtol=0
    )
    mean = torch.stack(
        [v_cache[b, :n].mean(0) for b, n in enumerate(lens.tolist())]
    ).repeat_interleave(3, dim=1)
    torch.testing.assert_close(
        decode_attention(q, torch.zeros_like(k_cache), v_cache, lens), mean, atol=1e-6, rtol=1e-5
    )
    q[1, 4] = float("nan")  # the rows of a tile are strangers to each other
    assert decode_attention(q, k_cache, v_cache, lens).isnan().any(-1).nonzero().tolist() == [
        [1, 4]
    ]


def assert_writes_only_its_rows(module) -> None:
    """Launch a module's kernel into a guarded output of 3 heads of 12: of the tile, 16 rows of 16,
    the rest goes nowhere.
    """
    q, k_cache, v_cache, lens = decode_inputs("normal", [5, 9], 10, 3, 1, 12, 0)
    out, check = with_canaries(q.shape, device=DEVICE)
    module.launch(q, k_cache, v_cache, lens, out)
    check()
    assert out.isfinite().all()


def test_the_rows_behind_the_group_are_never_written():
    assert_writes_only_its_rows(optimized)


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: needs a sparse file as memory, which no GPU reads"
)
def test_rows_beyond_two_to_the_31_elements(seed, tmp_path):
    """K and V interleaved in one sparse file whose rows are 2^24 elements apart: 4.6 GB of
    addresses, 1 MB in use.
    """
    apart, length = 2**24, 140
    file = torch.from_file(
        str(tmp_path / "rows"), shared=True, size=length * apart, dtype=torch.float16
    )
    k_cache, v_cache = (
        file.as_strided((1, length, 1, 128), (0, apart, 128, 1), offset) for offset in (0, 256)
    )
    k, v, q = (
        draw("normal", (length, 1, 128), dtype=torch.float16, seed=seed + i) for i in range(3)
    )
    k_cache[0], v_cache[0] = k, v
    lens = torch.tensor([length])
    assert_same_bits(
        decode_attention(q[:1], k_cache, v_cache, lens),
        decode_attention(q[:1], k[None], v[None], lens),
    )


# --------------------------------------------------------------- bugs that the tests above must see

BUGS = {  # name: (the line as it is, the line with the bug)
    "scale applied twice": (
        'input_precision="ieee") * scale_log2e',
        'input_precision="ieee") * scale_log2e * scale_log2e',
    ),
    "exp2 without log2 e": ("softmax_scale * LOG2_E,", "softmax_scale,"),
    "unused keys not masked": ('tl.where(in_use[None, :], scores, float("-inf"))', "scores + 0.0"),
    "unused keys read": (
        "held = in_use[:, None] & in_head",
        "held = (step >= 0)[:, None] & in_head",
    ),
    "one key short": ("in_use = start + step < length", "in_use = start + step < length - 1"),
    "KV head by modulo": (
        "head = kv_head * GROUP + row",
        "head = kv_head + row * tl.num_programs(0)",
    ),
    "every group reads KV head 0": (
        "k_ptr += sequence * stride_kb + kv_head.to(tl.int64) * stride_kh",
        "k_ptr += sequence * stride_kb",
    ),
    "an empty sequence is NaN": (
        "tl.where(length > 0, acc / l_i[:, None], 0.0)",
        "acc / l_i[:, None]",
    ),
    "sum not rescaled": ("l_i = l_i * alpha + tl.sum", "l_i = l_i + tl.sum"),
    "values not rescaled": ("acc * alpha[:, None]", "acc"),
    "window one key long": ("length - window, 0)", "length - window - 1, 0)"),
    "NaN hidden": ("tl.where(length > 0,", "tl.where((l_i > 0)[:, None],"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name, seed, tmp_path):
    buggy = with_bug(optimized, tmp_path, *BUGS[name])
    # 35 rows to spare: a bug reads NaN, not beyond
    inputs = decode_inputs("ascending", [0, 1, 40, 65], 100, 6, 2, 48, seed)
    inputs[0][3, 2, 5] = float("nan") if name == "NaN hidden" else 1.0
    with pytest.raises(NotEquivalent):
        for window in (None, 33):
            prove(
                lambda *x, w=window: buggy.decode_attention(*x, window=w),
                lambda *x, w=window: naive.decode_attention(*x, window=w),
                inputs,
            )


@pytest.mark.parametrize(
    "old, new",
    [
        (
            "out.to(out_ptr.dtype.element_ty), mask=in_group)",
            "out.to(out_ptr.dtype.element_ty), mask=in_head & (row < BLOCK_M)[:, None])",
        ),
        ("in_head = column[None, :] < HEAD_DIM", "in_head = column[None, :] < BLOCK_D"),
    ],
)
def test_what_is_written_behind_the_group_or_the_head_is_seen(old, new, tmp_path):
    with pytest.raises(NotEquivalent, match=r"canary|fault"):
        assert_writes_only_its_rows(with_bug(optimized, tmp_path, old, new))


def test_a_wrong_tile_of_repeated_heads_is_rejected(seed):
    """`repeat` in the place of repeat_interleave: heads 0 1 0 1 0 1 for 0 0 0 1 1 1."""

    def tiled(q, k, v, lens):
        return naive.decode_attention(q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1), lens)

    with pytest.raises(NotEquivalent):
        prove(tiled, naive.decode_attention, decode_inputs("normal", [7, 33], 40, 6, 2, 16, seed))


# ---------------------------------------------------------------- bytes


@pytest.mark.skipif(
    not interpreting(),
    reason="NOT RUN: counts the loads of the interpreter, and this machine compiles kernels",
)
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 20])
def test_each_tile_is_loaded_once_per_kv_head(num_heads, num_kv_heads, window, seed):
    """Every value that the kernels load, counted: K and V Hkv times a sequence here, Hq times in
    lesson 3's kernel.
    """
    lengths = [0, 1, 37, 70]
    inputs = decode_inputs("normal", lengths, 72, num_heads, num_kv_heads, 64, seed)
    counts = {}
    for name, decode in (("once", decode_attention), ("again", lesson3.decode_attention)):
        with Accesses() as accesses:
            decode(*inputs, window=window)
        counts[name] = accesses.loaded
    assert counts["once"] == traffic.kernel_loads(lengths, num_heads, num_kv_heads, 64, window)
    assert counts["again"] == traffic.kernel_loads(lengths, num_heads, num_heads, 64, window)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (8, 2), (12, 3), (6, 1)])
def test_repeating_moves_more_than_mha(num_heads, num_kv_heads):
    """On the meta device: shapes without numbers."""
    q, kv = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((1, num_heads, 64), (50, num_kv_heads, 64))
    )
    moved = {}
    for decode in (naive.decode_repeated, decode_attention_torch):
        with traffic.KVTraffic(kv.numel()) as seen:
            decode(q, kv, kv, 0.1)
        moved[decode] = seen.read_bytes + seen.written_bytes
    mha = traffic.cached_bytes(50, num_heads, 64, 2)
    assert moved[decode_attention_torch] == traffic.cached_bytes(50, num_kv_heads, 64, 2)
    assert (
        moved[naive.decode_repeated]
        == traffic.repeated_bytes(50, num_heads, num_kv_heads, 64, 2)
        > 2 * mha
    )


# ---------------------------------------------------------------- conversion


def new_model(**changes) -> Decoder:
    """A decoder with random weights under which attention is sharp, so that a wrong head changes
    the tokens.
    """
    model = Decoder(replace(CONFIG, vocab_size=97, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
            if name.endswith("norm.weight"):
                parameter.add_(1)
    return model.eval().requires_grad_(False)


# ---------------------------------------------------------------- merging KV heads


def logits_of(model, tokens):
    return model.logits(model(tokens, recompute.whole_sequence(model, len(tokens))))


@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": True}, {"qk_norm": True}, {"tie_word_embeddings": True}]
)
def test_repeating_weights_changes_nothing_and_merging_takes_it_back(options, seed):
    """GQA is MHA whose heads agree: 2 -> 6 is exact, and 6 -> 2 averages heads that are equal."""
    model = new_model(**options)
    tokens = torch.randint(97, (12,))
    expanded = repeated(model, 6)
    assert expanded.config.num_key_value_heads == 6
    assert expanded.config.kv_bytes_per_token(2) == 3 * model.config.kv_bytes_per_token(2)
    torch.testing.assert_close(
        logits_of(expanded, tokens), logits_of(model, tokens), atol=1e-4, rtol=1e-4
    )
    for name, parameter in merged(expanded, 2, mean_head).named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), atol=1e-6, rtol=1e-6)


def test_merging_averages_the_heads_keys_and_values(seed):
    """The projections are linear (and so is RoPE), so the merged model's k and v are the means of
    the heads' own.
    """
    model, tokens = new_model(num_key_value_heads=6, qkv_bias=True), torch.randint(97, (5,))
    seen = {}

    def attend(name):
        def keep(layer, q, k, v):
            # of the first layer: after it the two models go different ways
            seen.setdefault(name, (q, k, v))
            return recompute.attention(q, k, v)

        return keep

    for name, m in (("mha", model), ("gqa", merged(model, 2, mean_head))):
        m(tokens, attend(name))
    torch.testing.assert_close(seen["gqa"][0], seen["mha"][0])
    for merged_rows, rows in zip(seen["gqa"][1:], seen["mha"][1:]):
        torch.testing.assert_close(
            merged_rows, rows.unflatten(1, (2, 3)).mean(2), atol=1e-5, rtol=1e-4
        )


def test_the_mean_is_the_nearest_head(seed):
    """Σ |W_h - W|² over a group's heads is least at their mean; the first head is never nearer."""
    weight = draw("normal", (6 * 8, 20), dtype=torch.float64, seed=seed)
    spread = {
        merge: merge_heads(weight, 6, 2, merge)
        .unflatten(0, (2, 1, 8))
        .expand(2, 3, 8, 20)
        .reshape(48, 20)
        for merge in (mean_head, first_head)
    }
    far = {merge: float((weight - rows).square().sum()) for merge, rows in spread.items()}
    assert far[mean_head] < far[first_head]
    nudged = spread[mean_head] + 1e-3 * torch.randn(2, 1, 8, 20, dtype=torch.float64).expand(
        2, 3, 8, 20
    ).reshape(48, 20)
    assert far[mean_head] < float((weight - nudged).square().sum())


def test_merged_shares_what_it_does_not_change(seed):
    model = new_model(tie_word_embeddings=True)
    small = merged(model, 1, mean_head)
    assert small.lm_head.weight is small.embed_tokens.weight
    assert small.embed_tokens.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert model.config.num_key_value_heads == 2 and model.layers[
        0
    ].self_attn.k_proj.weight.shape == (16, 48)
    assert (
        small.layers[0].self_attn.k_proj.weight.shape
        == (8, 48)
        == small.layers[1].self_attn.v_proj.weight.shape
    )


# ---------------------------------------------------------------- the compiler


@pytest.mark.compiler
def test_the_compiler_multiplies_on_tensor_cores_without_spills():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        # on sm_75 Triton multiplies without them
        has_units = "bf16" in report.name and report.chip >= 80
        assert (report.matrix_instruction == "HMMA") == has_units, (
            f"{report.name} on sm_{report.chip}: {report.census}"
        )
        assert report.loads_128bit >= 5, (
            f"{report.name} on sm_{report.chip}: {report.loads_128bit} loads of 16 bytes"
        )
        if has_units and "4x128" in report.name:  # unrolled products once made 4000 of them
            assert sum(report.census.values()) < 1100, (
                f"{report.name} on sm_{report.chip}: {report.census}"
            )


# ---------------------------------------------------------------- bad input

ARGUMENTS = dict(
    q=torch.zeros(2, 4, 8),
    k_cache=torch.zeros(2, 9, 2, 8),
    v_cache=torch.zeros(2, 9, 2, 8),
    context_lens=torch.ones(2, dtype=torch.int32),
)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(q=torch.zeros(2, 3, 8)),
            "q, k_cache: got 3 query heads and 2 KV heads; accepted: a multiple of these",
        ),
        (
            dict(q=torch.zeros(1, 4, 8)),
            r"q, k_cache, v_cache, context_lens: got .*accepted: \[B, Hq, D\]",
        ),
        (
            dict(k_cache=torch.zeros(2, 9, 0, 8), v_cache=torch.zeros(2, 9, 0, 8)),
            "4 query heads and 0 KV heads",
        ),
        (
            dict(
                q=torch.zeros(2, 4, 257),
                k_cache=torch.zeros(2, 9, 2, 257),
                v_cache=torch.zeros(2, 9, 2, 257),
            ),
            "q: got head_dim 257; accepted: 1 to 256",
        ),
        (
            dict(q=torch.zeros(2, 130, 8)),
            "got 65 query heads a KV head; accepted: at most 64 at head_dim 8",
        ),
        (
            dict(
                q=torch.zeros(2, 66, 256),
                k_cache=torch.zeros(2, 9, 2, 256),
                v_cache=torch.zeros(2, 9, 2, 256),
            ),
            "got 33 query heads a KV head; accepted: at most 32 at head_dim 256",
        ),
        (
            dict(v_cache=torch.zeros(2, 9, 2, 8).half()),
            "q, k_cache, v_cache: got .*accepted: one dtype of",
        ),
        (
            dict(
                q=torch.zeros(2, 4, 8).double(),
                k_cache=torch.zeros(2, 9, 2, 8).double(),
                v_cache=torch.zeros(2, 9, 2, 8).double(),
            ),
            "got torch.float64",
        ),
        (
            dict(context_lens=torch.ones(3, dtype=torch.int32)),
            "q, k_cache, v_cache, context_lens: got",
        ),
        (dict(window=0), "window: got 0; accepted: None, or 1 or more"),
    ],
)
def test_decode_refuses(change, message):
    with pytest.raises(ValueError, match=message) as error:
        decode_attention(**ARGUMENTS | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "context_lens"])
def test_decode_refuses_every_kind_of_wrong_tensor(name):
    assert_refused(
        decode_attention,
        ARGUMENTS,
        name,
        KINDS if name != "context_lens" else ("dtype", "device", "shape"),
    )


@pytest.mark.parametrize("num_kv_heads", [4, 0, 12])
def test_merging_refuses_what_does_not_divide(num_kv_heads):
    model = new_model(num_key_value_heads=6)
    with pytest.raises(
        ValueError, match=f"num_kv_heads: got {num_kv_heads}; accepted: 1, 2, 3, 6"
    ) as error:
        merged(model, num_kv_heads, mean_head)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_kv_heads", [1, 4, 12])
def test_repeating_refuses_what_does_not_divide(num_kv_heads):
    with pytest.raises(ValueError, match=f"num_kv_heads: got {num_kv_heads}; accepted: 2, 6"):
        repeated(new_model(), num_kv_heads)
