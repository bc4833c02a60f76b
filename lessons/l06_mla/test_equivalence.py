"""Proves that absorbed attention equals decompressing, in every form and cache, and that the kernel
is attention over latents.
"""

from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import naive as recompute
from lessons.l02_naive_attention import optimized as fused
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, causal_mask, masked_softmax
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache import naive as concatenated
from lessons.l03_kv_cache import optimized as preallocated
from lessons.l03_kv_cache.cache import KVCache
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.l06_mla import naive, optimized
from lessons.l06_mla.deepseek import DeepseekDecoder
from lessons.l06_mla.lab.specs import KERNELS
from lessons.l06_mla.naive import LatentCache, latent_loop
from lessons.l06_mla.optimized import (
    AbsorbedCache,
    KernelAbsorbedCache,
    Tiles,
    mla_decode,
    mla_decode_kernel,
    tiles_for,
)
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import MLAConfig, ModelConfig, MoEConfig, RopeScaling
from lessons.toolbox.proof.numerics import (
    NotEquivalent,
    assert_close_to_oracle,
    draw,
    edge_lengths,
    poison_,
    poisoned,
    prove,
)
from lessons.toolbox.proof.refusals import KINDS, assert_refused

# NumPy, the interpreter's engine, warns of what is meant: an empty sequence divides 0 by 0 and
# takes the logarithm of 0.
pytestmark = [pytest.mark.usefixtures("seed"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
RANK, ROPE = 32, 16
CONFIG = ModelConfig(
    "deepseek_v3",
    vocab_size=61,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=24,
    intermediate_size=40,
    max_position_embeddings=256,
    v_head_dim=12,
    mla=MLAConfig(20, RANK, 8, ROPE, 12),
    rope_scaling=RopeScaling(
        "yarn", 8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0
    ),
    moe=MoEConfig(
        8,
        2,
        24,
        1,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
)
EVERY_TOKEN = SamplingParams(temperature=0, ignore_eos=True)


@torch.no_grad()
def new_model(dtype=torch.float64, **changes) -> DeepseekDecoder:
    """Random weights, norms and biases included, with attention sharp enough that a slip changes
    the tokens.
    """
    model = DeepseekDecoder(replace(CONFIG, **changes)).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.4 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
        if name.endswith("norm.weight"):
            parameter.add_(1)
        if "q_b_proj" in name or "q_proj" in name:
            parameter.mul_(2)
    return model.eval().requires_grad_(False)


def random_prompts(*lengths) -> list[list[int]]:
    return [torch.randint(0, 61, (n,)).tolist() for n in lengths]


def attend_without_cache(config):
    return lambda layer, q, k, v: attention(q, k, v, config.softmax_scale)


def hidden_of(model, tokens) -> torch.Tensor:
    return model(tokens, torch.arange(len(tokens)), attend_without_cache(model.config))


# ---------------------------------------------------------------- one algebra, two forms


@pytest.mark.parametrize(
    "mla",
    [MLAConfig(20, RANK, 8, ROPE, 12), MLAConfig(None, RANK, 8, ROPE, 12, rope_interleave=False)],
)
def test_absorbed_equals_expanded_in_float64(mla):
    model, tokens = new_model(mla=mla), torch.randint(0, 61, (50,))
    expanded, absorbed = hidden_of(model, tokens), hidden_of(model.absorbed(), tokens)
    assert (absorbed - expanded).abs().max() < 1e-12 * expanded.abs().max()


def test_each_form_in_bfloat16_against_float64(seed):
    """Against the oracle, not against each other: both round, at different places."""
    mla, x = (
        new_model(torch.bfloat16).layers[0].self_attn,
        draw("normal", (40, 48), dtype=torch.bfloat16, seed=seed),
    )

    def form(name, layer, x):
        q, (c_kv, k_pe) = layer.queries(x, lambda pe: pe), layer.latents(x, lambda pe: pe)
        if name == "expanded":
            return attention(q, *layer.expand(c_kv, k_pe), CONFIG.softmax_scale)
        return layer.project_values(
            attention(layer.absorb(q), torch.cat([c_kv, k_pe], -1), c_kv, CONFIG.softmax_scale)
        )

    expanded, absorbed = (form(name, mla, x) for name in ("expanded", "absorbed"))
    ref64 = form("expanded", mla.double(), x.double())  # the rounded weights and input, widened
    assert_close_to_oracle(absorbed, expanded, ref64, floor=2e-3)
    assert_close_to_oracle(expanded, absorbed, ref64, floor=2e-3)


def test_forms_share_their_weights_and_leave_the_model_alone():
    model = new_model()
    twin = model.absorbed()
    assert (
        twin.layers is model.layers
        and model.config is not twin.config
        and model.latent().config is model.config
    )
    assert (twin.config.num_key_value_heads, twin.config.head_dim, twin.config.v_head_dim) == (
        1,
        RANK + ROPE,
        RANK,
    )
    assert twin.config.softmax_scale == model.config.softmax_scale  # never from the latent's width
    assert model.adapter is DeepseekDecoder.adapter


# ---------------------------------------------------------------- every cache, every rung

RUNGS = {
    "recompute": recompute.generate,
    "fused softmax": fused.generate,
    "concatenated": concatenated.generate,
    "preallocated": preallocated.generate,
    "decompress": naive.generate,
    "absorbed": optimized.generate,
}


@pytest.mark.parametrize("mla", [CONFIG.mla, MLAConfig(None, RANK, 8, ROPE, 40)])
def test_all_rungs_agree_in_float64(mla):
    """Lessons 2 and 3 see expanded heads (or, of the absorbed twin, one), this lesson's caches
    latents.
    """
    model, prompts, limits = (
        new_model(mla=mla, v_head_dim=mla.v_head_dim),
        random_prompts(1, 3, 40),
        [30, 1, 20],
    )
    expected = recompute.generate(model, prompts, limits, EVERY_TOKEN)
    assert [len(row) for row in expected] == limits and len(
        {token for row in expected for token in row}
    ) > 5
    for name, generate in RUNGS.items():
        assert generate(model, prompts, limits, EVERY_TOKEN) == expected, name
        if name not in ("decompress", "absorbed"):
            assert generate(model.absorbed(), prompts, limits, EVERY_TOKEN) == expected, (
                f"{name} of the absorbed twin"
            )


def test_the_rung_with_the_kernel():
    """What a GPU runs; in the interpreter where there is none."""
    model, prompts = new_model(torch.float32).to(DEVICE), random_prompts(1, 4)
    assert latent_loop(KernelAbsorbedCache, model, prompts, 3) == recompute.generate(
        model, prompts, 3
    )


@pytest.mark.parametrize("steps", [[1] * 6, [7, 1, 1], [5, 3, 1, 4, 1], [1, 70, 1]])
@pytest.mark.parametrize("kind", [LatentCache, AbsorbedCache])
def test_cached_steps_equal_recomputing(kind, steps):
    """One by one, prefill then decode, chunks, growth; rows not in use are NaN, and stay unread."""
    model, tokens = new_model(), torch.randint(0, 61, (sum(steps),))
    whole, cache, start = hidden_of(model, tokens), kind(model.latent(), 3), 0
    poison_(cache.keys)
    for step in steps:
        rows = torch.arange(start, start + step)
        assert cache.length == start
        torch.testing.assert_close(
            model.latent()(tokens[rows], rows, cache.attend), whole[rows], atol=1e-10, rtol=1e-10
        )
        start += step


def test_bytes_that_each_cache_holds():
    """A latent and a rotary key for each layer and token; lesson 3's cache holds k and v of every
    head.
    """
    model = new_model(torch.float32)
    caches = [LatentCache(model.latent(), 64), KVCache(model.config, 64), ConcatCache(model.config)]
    for cache in caches:
        twin = model.latent() if isinstance(cache, LatentCache) else model
        for tokens in torch.randint(0, 61, (10,)).split([7, 1, 1, 1]):
            twin(tokens, torch.arange(cache.length, cache.length + len(tokens)), cache.attend)
    latents, heads = 2 * (RANK + ROPE) * 4, 2 * 4 * (24 + 12) * 4
    assert model.config.kv_bytes_per_token(4) == latents
    assert [cache.written_bytes for cache in caches] == [10 * latents, 10 * heads, 10 * heads]
    assert (caches[0].used_bytes, caches[0].allocated_bytes) == (10 * latents, 64 * latents)
    assert (caches[1].used_bytes, caches[1].growth_copy_bytes) == (10 * heads, 0)


def test_an_absorbed_step_expands_nothing():
    """No tensor of a decode step is as large as one head's keys: the latents are read as they lie."""
    from lessons.toolbox.proof.traps import Allocations

    model, cache = new_model(), None
    for kind in (LatentCache, AbsorbedCache):
        cache = kind(model.latent(), 256)
        tokens = torch.randint(0, 61, (201,))
        model.latent()(tokens[:200], torch.arange(200), cache.attend)
        with Allocations() as allocations:
            model.latent()(tokens[200:], torch.tensor([200]), cache.attend)
        assert (allocations.largest_elements < 200 * 8) == (kind is AbsorbedCache)


# ---------------------------------------------------------------- would these tests notice?


def k_first_then_v(self):
    """kv_b_proj as [all W_UK | all W_UV] in place of head by head."""
    return (
        self.kv_b_proj.weight[: 4 * 8].unflatten(0, (4, 8)),
        self.kv_b_proj.weight[4 * 8 :].unflatten(0, (4, 12)),
    )


SLIPS = {
    "kv_b_proj read as W_UK, then W_UV": ("up_projections", k_first_then_v),
    "W_UK of another head": (
        "up_projections",
        lambda self: tuple(
            w.roll(1, 0) if i == 0 else w
            for i, w in enumerate(self.kv_b_proj.weight.unflatten(0, (4, 20)).split([8, 12], 1))
        ),
    ),
    "W_UK transposed": (
        "absorb",
        lambda self, q: torch.cat(
            [
                torch.einsum(
                    "thn,hnr->thr", q[..., :8], self.up_projections()[0].mT.reshape(4, 8, RANK)
                ),
                q[..., 8:],
            ],
            -1,
        ),
    ),
    "q_pe before the latent": (
        "absorb",
        lambda self, q: torch.cat(
            [q[..., 8:], torch.einsum("thn,hnr->thr", q[..., :8], self.up_projections()[0])], -1
        ),
    ),
    "W_UK in place of W_UV": (
        "project_values",
        lambda self, out: torch.einsum(
            "thr,hvr->thv", out, self.kv_b_proj.weight.unflatten(0, (4, 20))[:, :12]
        ),
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_absorption_is_noticed(slip, monkeypatch):
    model, tokens = new_model(), torch.randint(0, 61, (20,))
    right = hidden_of(model, tokens)
    name, wrong = SLIPS[slip]
    monkeypatch.setattr(type(model.layers[0].self_attn), name, wrong)
    assert (hidden_of(model.absorbed(), tokens) - right).abs().max() > 1e-3


@pytest.mark.parametrize(
    "slip",
    [
        "k_pe kept before its rotation",
        "latent kept before its norm",
        "rotary key first",
        "scale from the latent",
        "forgets on growth",
    ],
)
def test_a_wrong_cache_is_rejected(slip, monkeypatch):
    model, tokens = new_model(), torch.randint(0, 61, (12,))
    mla = type(model.layers[0].self_attn)

    class Wrong(AbsorbedCache):
        def write(self, layer, k_pe, c_kv):
            width = (k_pe, c_kv) if slip == "rotary key first" else (c_kv, k_pe)
            self.keys[layer, self.length : self.length + len(c_kv)] = torch.cat(width, -1)

        def reserve(self, tokens):
            grown = tokens > self.capacity
            super().reserve(tokens)
            if slip == "forgets on growth" and grown:
                self.keys.zero_()

        def attend_to_rows(self, q, rows):
            scale = (
                (RANK + ROPE) ** -0.5
                if slip == "scale from the latent"
                else self.config.softmax_scale
            )
            return attention(q, rows, rows[..., :RANK], scale)

    right, start = hidden_of(model, tokens), 0
    if slip == "k_pe kept before its rotation":
        latents = mla.latents
        monkeypatch.setattr(mla, "latents", lambda self, x, rotate: latents(self, x, lambda pe: pe))
    if slip == "latent kept before its norm":
        monkeypatch.setattr(
            mla,
            "latents",
            lambda self, x, rotate: (
                self.kv_a_proj_with_mqa(x)[:, None, :RANK],
                rotate(self.kv_a_proj_with_mqa(x)[:, None, RANK:]),
            ),
        )
    cache, worst = Wrong(model.latent(), 8), 0.0
    for step in (5, 1, 1, 4, 1):
        rows = torch.arange(start, start + step)
        out = model.latent()(tokens[rows], rows, cache.attend)
        worst, start = max(worst, float((out - right[rows]).abs().max())), start + step
    assert worst > 1e-3


# ---------------------------------------------------------------- the kernel


def by_definition(q, kv_cache, context_lens, softmax_scale, rank=RANK):
    """The definition of mla_decode, one sequence at a time: ([B, H, rank], [B, H])."""
    outs, lses = [], []
    for one, rows, n in zip(q, kv_cache, context_lens.tolist()):
        scores = one @ rows[:n].T * softmax_scale  # [H, n]
        sees = causal_mask(1, n).to(q.device)
        outs.append(masked_softmax(scores, sees) @ rows[:n, :rank])
        lses.append(torch.logsumexp(scores if q.dtype == torch.float64 else scores.float(), dim=-1))
    return torch.stack(outs), torch.stack(lses)


def decode_inputs(
    name, lengths, capacity, num_heads, seed, dtype=torch.float32, rank=RANK, rope=ROPE
):
    """q: [B, H, rank + rope], kv_cache: [B, capacity, rank + rope] whose unused rows are NaN,
    context_lens: [B] int32.
    """
    dim = rank + rope
    q = draw("normal", (len(lengths), num_heads, dim), dtype=dtype, seed=seed, device=DEVICE)
    kv_cache = poisoned((len(lengths), capacity, dim), dtype, DEVICE)
    for b, n in enumerate(lengths):
        rows = draw("normal", (n, dim), seed=seed + b + 1)
        # every key scores higher than the one before, so the running max moves in every tile
        if name == "ascending":
            rows, q[b] = rows.abs() * torch.linspace(0, 2, n)[:, None], q[b].abs()
        elif name == "all_negative":  # padding that scores 0 would take nearly all of the weight
            rows, q[b] = -rows.abs(), q[b].abs()
        elif name == "large_logits":
            rows = 30 * rows
        kv_cache[b, :n] = rows.to(kv_cache)
    return q, kv_cache, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def proved(inputs, proof, scale=24**-0.5, rank=RANK, tiles=None, **how):
    errors = prove(
        lambda *x: mla_decode(*x, scale, rank, tiles),
        lambda *x: by_definition(*x, scale, rank),
        inputs,
        **how,
    )
    for error in errors:
        proof.record(mla_decode_kernel, error)


@pytest.mark.parametrize(
    "num_heads, dtype",
    [(16, torch.float32), (4, torch.float32), (20, torch.bfloat16), (16, torch.float16)],
)
def test_decode_kernel(num_heads, dtype, seed, proof):
    """A ragged batch with an empty sequence; lengths around the tile size; heads that do not fill a
    block.
    """
    proved(decode_inputs("normal", [0, 1, 15, 16, 17, 33, 50], 50, num_heads, seed, dtype), proof)


@pytest.mark.parametrize("name", ["large_logits", "ascending", "all_negative"])
def test_decode_kernel_on_hard_inputs(name, seed, proof):
    proved(decode_inputs(name, [2, 40, 65], 70, 4, seed), proof)


@pytest.mark.parametrize("tiles", [Tiles(16, 16, 4, 1), Tiles(16, 64, 4, 2), Tiles(32, 32, 8, 2)])
def test_decode_kernel_at_every_tile_size(tiles, seed, proof):
    lengths = edge_lengths(tiles.block_n, at_most=130)
    proved(decode_inputs("ascending", lengths, max(lengths), 18, seed), proof, tiles=tiles)


@pytest.mark.parametrize("num_heads, dtype", [(16, torch.bfloat16), (128, torch.bfloat16)])
def test_decode_kernel_at_the_published_width(num_heads, dtype, seed, proof):
    """512 + 64, with the tiles that a GPU gets: V2-Lite's 16 heads, V3's 128."""
    proved(
        decode_inputs("normal", [45, 3], 45, num_heads, seed, dtype, 512, 64),
        proof,
        scale=192**-0.5,
        rank=512,
    )


def test_decode_probes_with_known_answers(seed):
    q, kv_cache, lens = decode_inputs("normal", [7, 33], 40, 4, seed)
    # no query prefers any key
    out, lse = mla_decode(torch.zeros_like(q), kv_cache, lens, 1.0, RANK)
    mean = torch.stack([kv_cache[b, :n, :RANK].mean(0) for b, n in enumerate(lens.tolist())])
    torch.testing.assert_close(out, mean[:, None].expand_as(out), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, lens.log()[:, None].expand(-1, 4), atol=1e-6, rtol=1e-6)
    constant = torch.ones_like(kv_cache)
    torch.testing.assert_close(
        mla_decode(q, constant, lens, 1.0, RANK)[0], torch.ones_like(out), atol=1e-6, rtol=0
    )
    q[1, 2] = float("nan")
    assert mla_decode(q, kv_cache, lens, 1.0, RANK)[0].isnan().any(-1).nonzero().tolist() == [
        [1, 2]
    ]


def test_halves_merge_by_their_log_sum_exp(seed):
    """What lesson 10 needs: attention over two slices of the cache, weighted by exp(lse), is
    attention over both.
    """
    q, kv_cache, lens = decode_inputs("normal", [40, 40], 40, 4, seed)
    whole, lse = mla_decode(q, kv_cache, lens, 0.2, RANK)
    parts = [
        mla_decode(q, rows, torch.full_like(lens, rows.shape[1]), 0.2, RANK)
        for rows in kv_cache.split([23, 17], dim=1)
    ]
    weights = torch.stack([part[1] - lse for part in parts]).exp()
    torch.testing.assert_close(weights.sum(0), torch.ones_like(lse), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        sum(w[..., None] * part[0] for w, part in zip(weights, parts)), whole, atol=1e-5, rtol=1e-5
    )


def test_a_sequence_does_not_depend_on_the_batch(seed):
    q, kv_cache, lens = decode_inputs("normal", [7, 33, 20], 40, 4, seed)
    together = mla_decode(q, kv_cache, lens, 0.2, RANK)
    for b in range(3):
        alone = mla_decode(q[b : b + 1], kv_cache[b : b + 1], lens[b : b + 1], 0.2, RANK)
        assert all(torch.equal(x[b], y[0]) for x, y in zip(together, alone))


@pytest.mark.parametrize(
    "slip",
    [
        "scale of the latent",
        "values from the rotary columns too",
        "one key short",
        "rotary part dropped",
    ],
)
def test_a_wrong_decode_is_rejected(slip, seed):
    scale = 24**-0.5

    def slipped(q, kv_cache, lens):
        if slip == "scale of the latent":
            return mla_decode(q, kv_cache, lens, (RANK + ROPE) ** -0.5, RANK)
        if slip == "one key short":
            return mla_decode(q, kv_cache, lens - 1, scale, RANK)
        if slip == "rotary part dropped":
            q = torch.cat([q[..., :RANK], torch.zeros_like(q[..., RANK:])], -1)
            return mla_decode(q, kv_cache, lens, scale, RANK)
        # the value tile starts ROPE columns too far
        shifted = torch.cat([kv_cache[..., ROPE:], kv_cache[..., :ROPE]], -1)
        return mla_decode(torch.cat([q[..., ROPE:], q[..., :ROPE]], -1), shifted, lens, scale, RANK)

    with pytest.raises(NotEquivalent):
        prove(
            slipped,
            lambda *x: by_definition(*x, scale),
            decode_inputs("normal", [7, 33], 40, 4, seed),
        )


@pytest.mark.compiler
def test_the_compiler_gives_matrix_instructions_without_spills():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits and report.loads_128bit, f"{report.name} on sm_{report.chip}: {report}"
        # 64 rows are what Hopper's and Blackwell's widest instructions take
        many = "bf16_128" in report.name
        wanted = {90: "HGMMA", 100: "UTCHMMA"}.get(report.chip, "HMMA") if many else "HMMA"
        assert report.matrix_instruction == (None if "fp32" in report.name else wanted), report.name


def test_tiles_fit_the_chip():
    assert tiles_for(16, 2).block_h == 16 and tiles_for(128, 2).block_h == 64
    assert tiles_for(128, 2, 99 * 1024).block_h == 32 and tiles_for(128, 4) == Tiles(16, 16, 8, 1)


# ---------------------------------------------------------------- bad input


def small_inputs() -> dict:
    return dict(
        q=torch.zeros(2, 4, 48),
        kv_cache=torch.zeros(2, 9, 48),
        context_lens=torch.ones(2, dtype=torch.int32),
        softmax_scale=0.2,
        kv_lora_rank=RANK,
    )


@pytest.mark.parametrize("name", ["q", "kv_cache", "context_lens"])
def test_decode_refuses_every_kind_of_wrong_tensor(name):
    assert_refused(
        mla_decode,
        small_inputs(),
        name,
        KINDS if name != "context_lens" else ("dtype", "device", "shape"),
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(kv_lora_rank=24),
            "kv_lora_rank: got 24, which leaves q and kv_cache 24 rotary values; accepted: powers "
            "of two",
        ),
        (dict(kv_lora_rank=40), "got 40, .* 8 rotary values"),
        (dict(kv_lora_rank=64), "got 64, .* -16 rotary values"),
        (
            dict(q=torch.zeros(1, 4, 48)),
            r"q, kv_cache, context_lens: got .*; accepted: \[B, H, D\]",
        ),
        (dict(q=torch.zeros(2, 4, 48).half()), "accepted: both float32, float16 or bfloat16"),
    ],
)
def test_decode_refuses(change, message):
    with pytest.raises(ValueError, match=message) as error:
        mla_decode(**small_inputs() | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("generate", [naive.generate, optimized.generate])
def test_generate_needs_latents(generate):
    llama = Decoder(ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16))
    with pytest.raises(ValueError, match="model: got a Decoder; accepted: a DeepseekDecoder"):
        generate(llama, [[1]], 2)
