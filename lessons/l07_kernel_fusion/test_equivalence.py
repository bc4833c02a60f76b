"""Proves each kernel equal to its eager chain, that it rounds where the models do, and that it
touches every byte once.
"""

import contextlib
import copy
import dataclasses

import pytest
import torch
from torch import nn

from lessons.l02_naive_attention import naive as lesson2
from lessons.l02_naive_attention.decoder import MLP, Decoder, RMSNorm
from lessons.l07_kernel_fusion import naive, optimized, qk_norm, stand_ins
from lessons.l07_kernel_fusion.fused_decoder import (
    FusedDecoder,
    FusedMLP,
    FusedRMSNorm,
    Ops,
    fused,
    ops_of,
)
from lessons.l07_kernel_fusion.lab.specs import ROW_KERNELS
from lessons.l07_kernel_fusion.optimized import (
    add_rms_norm_kernel,
    rms_norm_kernel,
    rms_norm_long_kernel,
    silu_mul_kernel,
)
from lessons.l07_kernel_fusion.qk_norm import qk_norm_kernel
from lessons.l07_kernel_fusion.rows import MAX_ROW, SHORTEST_TILE, tile_of
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device, interpreting
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.numerics import NotEquivalent, draw, prove, with_canaries
from lessons.toolbox.proof.refusals import assert_refused

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
EPS = 1e-5
SIZES = (1, 7, 128, 131, 1023, 1025)  # one value, a prime, powers of two and their neighbours
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
only_interpreted = pytest.mark.skipif(
    not interpreting(), reason="NOT RUN: accesses are counted in the interpreter"
)


def rows(shape, seed, dtype=torch.float32, name="normal"):
    return draw(name, shape, dtype=dtype, seed=seed, device=DEVICE)


def weight_of(size, seed, dtype=torch.float32):
    return (1 + 0.3 * draw("normal", (size,), seed=seed + 99, device=DEVICE)).to(dtype)


def with_eps(function, eps=EPS):
    return lambda *tensors: function(*tensors, eps)


# ---------------------------------------------------------------- one kernel for each chain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size, dtype, seed, proof):
    """Several rows a program and one, a padded tail, rows that do not fill the last program; both
    roundings.
    """
    x, weight = (
        rows((2 * tile_of(size)[0] % 37 + 3, size), seed, dtype),
        weight_of(size, seed, dtype),
    )
    for name in ("rms_norm", "rms_norm_gemma"):
        proof.record(
            rms_norm_kernel,
            prove(with_eps(getattr(optimized, name)), with_eps(getattr(naive, name)), (x, weight)),
        )


@pytest.mark.parametrize("name", ["large", "tiny", "non_contiguous"])
def test_rms_norm_on_hard_inputs(name, seed, proof):
    """Squares beyond float16, rows below eps, rows with gaps of poison between them."""
    dtype = torch.float16 if name == "large" else torch.float32
    x = rows((5, 300), seed, dtype, name) * (
        1 if name == "non_contiguous" else 20 if name == "large" else 1
    )
    assert name != "large" or x.square().isinf().any()
    proof.record(
        rms_norm_kernel,
        prove(
            with_eps(optimized.rms_norm), with_eps(naive.rms_norm), (x, weight_of(300, seed, dtype))
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_a_row_that_no_program_holds(dtype, seed, proof):
    size = MAX_ROW + 1 + seed % 50
    x, weight = rows((2, size), seed, dtype), weight_of(size, seed, dtype)
    for name in ("rms_norm", "rms_norm_gemma"):
        proof.record(
            rms_norm_long_kernel,
            prove(with_eps(getattr(optimized, name)), with_eps(getattr(naive, name)), (x, weight)),
        )
    prove(
        with_eps(optimized.add_rms_norm),
        with_eps(naive.add_rms_norm),
        (x, -2 * x, weight),
        mutates=(1,),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(size, dtype, seed, proof):
    """The norm, and the residual stream updated in place."""
    inputs = (
        rows((4, size), seed, dtype),
        rows((4, size), seed + 1, dtype),
        weight_of(size, seed, dtype),
    )
    proof.record(
        add_rms_norm_kernel,
        prove(with_eps(optimized.add_rms_norm), with_eps(naive.add_rms_norm), inputs, mutates=(1,)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, SHORTEST_TILE - 1, SHORTEST_TILE + 1, 2 * SHORTEST_TILE])
def test_silu_mul(size, dtype, seed, proof):
    """Beyond 88 exp(-gate) overflows float32; and gate and up as the halves of one merged
    projection.
    """
    gate, up = rows((3, size), seed, dtype, "large"), rows((3, size), seed + 1, dtype)
    proof.record(silu_mul_kernel, prove(optimized.silu_mul, naive.silu_mul, (gate, up)))
    half, other_half = torch.cat([gate, up], dim=-1).chunk(2, dim=-1)
    for pair in ((half, other_half), (gate, other_half)):
        assert torch.equal(optimized.silu_mul(*pair), optimized.silu_mul(gate, up))


@pytest.mark.parametrize(
    "heads, kv_heads, size, dtype",
    [
        (6, 2, 64, torch.float32),
        (5, 1, 80, torch.bfloat16),
        (32, 8, 128, torch.bfloat16),
        (3, 3, 17, torch.float16),
    ],
)
def test_qk_norm(heads, kv_heads, size, dtype, seed, proof):
    """Separate projections, one merged one of which q and k are strided views, and k that lies head
    by head.
    """
    weights = weight_of(size, seed, dtype), weight_of(size, seed + 1, dtype)
    q, k = rows((3, heads, size), seed, dtype), rows((3, kv_heads, size), seed + 1, dtype, "large")
    merged = torch.cat([q, k], dim=1)
    head_by_head = k.transpose(0, 1).contiguous().transpose(0, 1)
    for pair in ((q, k), (merged[:, :heads], merged[:, heads:]), (q, head_by_head)):
        proof.record(
            qk_norm_kernel,
            prove(with_eps(qk_norm.qk_norm), with_eps(naive.qk_norm), (*pair, *weights)),
        )


@pytest.mark.parametrize("name", ["normal", "large", "all_negative", "ascending"])
def test_softmax_is_lesson_2s_kernel(name, seed):
    for shape in ((4, 33), (2, 3, 1025)):
        prove(optimized.softmax, naive.softmax, (rows(shape, seed, name=name),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_stand_ins(dtype, seed):
    """What a CPU generates with is the same operations, rounded at the same places."""
    x, other, weight = (
        rows((4, 96), seed, dtype),
        rows((4, 96), seed + 1, dtype),
        weight_of(96, seed, dtype),
    )
    prove(with_eps(stand_ins.rms_norm), with_eps(naive.rms_norm), (x, weight))
    prove(
        with_eps(stand_ins.add_rms_norm),
        with_eps(naive.add_rms_norm),
        (x, other, weight),
        mutates=(1,),
    )
    prove(stand_ins.silu_mul, naive.silu_mul, (x, other))
    q, k = x.view(4, 6, 16), other.view(4, 6, 16)[:, :2]
    prove(with_eps(stand_ins.qk_norm), with_eps(naive.qk_norm), (q, k, weight[:16], weight[16:32]))


# ---------------------------------------------------------------- rounding


def share_of_equal_bits(a, b):
    return float((a == b).float().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_that_of_transformers(dtype, seed):
    """Llama rounds before the weight, Gemma after it: nearly every bit equals its own module's, and
    not the other's.
    """
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = rows((64, 512), seed, dtype), weight_of(512, seed, dtype)
    llama, gemma = (norm(512, EPS).to(DEVICE, dtype) for norm in (LlamaRMSNorm, Gemma3RMSNorm))
    llama.weight.data, gemma.weight.data = weight, weight - 1
    llama, gemma = llama(x), gemma(x)
    for module in (naive, optimized, stand_ins):
        mine = module.rms_norm(x, weight, EPS)
        assert share_of_equal_bits(mine, llama) > 0.995 and share_of_equal_bits(mine, gemma) < 0.9
    for module in (naive, optimized):
        mine = module.rms_norm_gemma(x, weight - 1, EPS)
        assert share_of_equal_bits(mine, gemma) > 0.995 and share_of_equal_bits(mine, llama) < 0.9
    # rounds once, so it cannot stand in for Llama's
    library = torch.nn.functional.rms_norm(x, (512,), weight, EPS)
    assert share_of_equal_bits(library, llama) < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_lesson_2s_module(dtype, seed):
    module = RMSNorm(96, EPS).to(DEVICE, dtype)
    module.weight.data = weight_of(96, seed, dtype)
    x = rows((5, 96), seed, dtype)
    assert torch.equal(naive.rms_norm(x, module.weight, EPS), module(x))
    out = optimized.rms_norm(x, module.weight.detach(), EPS)
    torch.testing.assert_close(
        out, module(x).detach(), atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 1e-2
    )
    # float32 shows the order of its additions
    assert dtype == torch.float32 or share_of_equal_bits(out, module(x)) > 0.99


def test_the_sum_is_rounded_before_it_is_normed(seed):
    """What is normed is what the next junction adds to: the residual as stored."""
    (x, residual), weight = (
        (rows((8, 512), seed + i, torch.bfloat16) for i in range(2)),
        weight_of(512, seed, torch.bfloat16),
    )
    kept = residual.clone()
    out = optimized.add_rms_norm(x, kept, weight, EPS)
    assert torch.equal(kept, residual + x)
    assert torch.equal(out, optimized.rms_norm(kept, weight, EPS))


# ---------------------------------------------------------------- bytes


def calls(seed, size=300, num_rows=5):
    """{name: (call, tensors read once, tensors written once)}"""
    x, other, weight = (
        rows((num_rows, size), seed),
        rows((num_rows, size), seed + 1),
        weight_of(size, seed),
    )
    q, k, head = rows((3, 4, 64), seed), rows((3, 2, 64), seed + 1), weight_of(64, seed)
    # three tiles a row
    gate, up = rows((2, 2 * SHORTEST_TILE + 9), seed), rows((2, 2 * SHORTEST_TILE + 9), seed + 1)
    return {
        "rms_norm": (lambda: [optimized.rms_norm(x, weight, EPS)], [x], []),
        "add_rms_norm": (
            lambda: [optimized.add_rms_norm(x, other, weight, EPS)],
            [x, other],
            [other],
        ),
        "silu_mul": (lambda: [optimized.silu_mul(gate, up)], [gate, up], []),
        "qk_norm": (lambda: qk_norm.qk_norm(q, k, head, head, EPS), [q, k], []),
        "softmax": (lambda: [optimized.softmax(x)], [x], []),
    }, [weight, head]


@only_interpreted
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_mul", "qk_norm", "softmax"])
def test_every_input_is_read_once_and_every_output_written_once(name, seed):
    """Each element, by its address: the weight by every program, nothing outside the tensors."""
    found, weights = calls(seed)
    call, read, written = found[name]
    with Accesses() as accesses:
        outputs = call()
    assert all((accesses.loads(x) == 1).all() for x in read)
    assert all((accesses.stores(x) == 1).all() for x in (*written, *outputs))
    assert not any(accesses.loads(out).any() for out in outputs) and not any(
        accesses.stores(w).any() for w in weights
    )
    assert accesses.outside(*read, *written[len(read) :], *outputs, *weights) == 0


@only_interpreted
def test_a_row_that_does_not_fit_is_read_twice(seed):
    x, weight = rows((1, MAX_ROW + 5), seed), weight_of(MAX_ROW + 5, seed)
    with Accesses() as accesses:
        out = optimized.rms_norm(x, weight, EPS)
    assert (accesses.loads(x) == 2).all() and (accesses.stores(out) == 1).all()


def test_nothing_beside_the_output_is_written(seed):
    for size in (100, 131):
        (residual, check), x = (
            with_canaries((3, size), torch.float32, DEVICE, row_padding=7),
            rows((3, size), seed),
        )
        residual.copy_(x)
        optimized.add_rms_norm(x, residual, weight_of(size, seed), EPS)
        check()
        assert torch.equal(residual, x + x)


def test_a_row_does_not_depend_on_the_others(seed):
    x, weight = rows((9, 64), seed), weight_of(64, seed)
    together = optimized.rms_norm(x, weight, EPS)
    assert all(
        torch.equal(together[i : i + 1], optimized.rms_norm(x[i : i + 1], weight, EPS))
        for i in range(9)
    )
    x[3, 5] = float("nan")
    assert optimized.rms_norm(x, weight, EPS).isnan().any(-1).nonzero().flatten().tolist() == [3]


@pytest.mark.compiler
def test_the_compiler_gives_wide_loads_without_spills():
    for report in check_all(ROW_KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        assert report.loads_128bit > 0, f"{report.name} on sm_{report.chip}: no load of 16 bytes"
        assert report.registers <= 64, (
            f"{report.name} on sm_{report.chip}: {report.registers} registers leave half a chip "
            f"idle"
        )


# ---------------------------------------------------------------- the decoder's twin

CONFIG = ModelConfig(
    "llama",
    vocab_size=61,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=80,
    max_position_embeddings=64,
)


class OtherAttention(nn.Module):
    """An attention that fused_decoder.py has never seen, with a norm inside, as DeepSeek's has."""

    def __init__(self):
        super().__init__()
        self.down, self.inner_norm, self.up = nn.Linear(48, 16), RMSNorm(16, EPS), nn.Linear(16, 48)

    def forward(self, x, attend):
        latent = self.inner_norm(self.down(x)).unflatten(-1, (2, 8))
        return self.up(attend(latent, latent, latent).flatten(-2))


class Experts(nn.Module):
    """Half of lesson 2's MLP and half of another one."""

    def __init__(self, config):
        super().__init__()
        self.experts = nn.ModuleList(MLP(config) for _ in range(2))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts) / 2


class OtherDecoder(Decoder):
    """Another family: its own attention and MLP in lesson 2's layers."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn, layer.mlp = OtherAttention(), Experts(config)


def new_decoder(kind=Decoder, qk_norm=False, dtype=torch.float32):
    """A decoder with random weights, norms included."""
    model = kind(dataclasses.replace(CONFIG, qk_norm=qk_norm))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.3)
    return model.to(DEVICE, dtype).eval().requires_grad_(False)


def logits_of(model, count=7):
    tokens = torch.arange(3, 3 + count, device=DEVICE)
    with torch.inference_mode():
        return model.logits(model(tokens, lesson2.whole_sequence(model, count)))


KINDS = {
    "llama": (Decoder, False),
    "qwen3": (Decoder, True),
    "another family": (OtherDecoder, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_kernels", [True, False])
def test_the_fused_twin_gives_the_same_logits(kind, with_kernels, seed):
    """With the kernels in float32; with PyTorch in float64, where nothing hides behind rounding."""
    model = new_decoder(*KINDS[kind], torch.float32 if with_kernels else torch.float64)
    twin = fused(model, ops_of(optimized if with_kernels else stand_ins))
    tolerance = 2e-5 if with_kernels else 1e-13
    assert isinstance(twin, FusedDecoder) and twin.config is model.config
    assert (twin.device, twin.dtype) == (model.device, model.dtype)
    torch.testing.assert_close(logits_of(twin), logits_of(model), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_with_eager_operations_the_twin_is_the_decoder_bit_for_bit(kind, seed):
    """So whatever differs comes from the operations, not from where the additions moved."""
    for dtype in (torch.float32, torch.bfloat16):
        model = new_decoder(*KINDS[kind], dtype)
        assert torch.equal(logits_of(fused(model, ops_of(naive))), logits_of(model))


def test_the_twin_shares_every_weight_and_leaves_the_model_alone(seed):
    model = new_decoder(OtherDecoder)
    before, kinds = logits_of(model), [type(module) for module in model.modules()]
    twin = fused(model)
    mine, theirs = dict(twin.named_parameters()), dict(model.named_parameters())
    assert mine.keys() == theirs.keys() and all(mine[name] is theirs[name] for name in mine)
    assert [type(module) for module in model.modules()] == kinds and torch.equal(
        logits_of(model), before
    )
    inside = twin.layers[0]
    assert (
        type(inside.self_attn) is OtherAttention
        and type(inside.self_attn.inner_norm) is FusedRMSNorm
    )
    assert type(inside.mlp) is Experts and type(inside.mlp.experts[1]) is FusedMLP
    assert isinstance(twin, FusedDecoder) and fused(twin) is twin
    assert twin.embed_tokens is model.embed_tokens and twin.lm_head is model.lm_head
    assert torch.equal(logits_of(copy.deepcopy(twin)), logits_of(twin))


@pytest.mark.parametrize("kind", KINDS)
def test_every_addition_happens_inside_a_norm(kind, seed):
    """n layers: 2n junctions, one norm before the first, and no other addition to the residual
    stream.
    """
    called = []
    ops = ops_of(naive)
    counting = Ops(
        *(
            lambda *args, name=name, op=op: called.append(name) or op(*args)
            for name, op in zip(Ops._fields, ops)
        )
    )
    logits_of(fused(new_decoder(*KINDS[kind]), counting))
    layers, inner = (
        CONFIG.num_hidden_layers,
        CONFIG.num_hidden_layers if kind == "another family" else 0,
    )
    assert called.count("add_rms_norm") == 2 * layers and called.count("rms_norm") == 1 + inner
    assert called.count("silu_mul") == layers * (2 if inner else 1) and called.count(
        "qk_norm"
    ) == layers * (kind == "qwen3")


def test_a_decoder_with_other_norms_is_refused():
    class Gemma(RMSNorm):
        pass

    model = Decoder(CONFIG)
    model.layers[1].input_layernorm = Gemma(48, EPS)
    with pytest.raises(ValueError, match="model: got Decoder with Gemma; accepted"):
        fused(model)


# ---------------------------------------------------------------- wrong versions


def slipped_norm(slip, x, residual, weight, eps):
    """add_rms_norm with one slip, otherwise as naive.py has it."""
    total = residual + x
    residual.copy_({"residual not updated": residual, "residual keeps x alone": x}.get(slip, total))
    wide = (x if slip == "norms the branch alone" else total).float()
    squares = (
        (total if slip == "squares in float16" else wide).square().sum(-1, keepdim=True).float()
    )
    if slip == "mean subtracted":
        wide = wide - wide.mean(-1, keepdim=True)
        squares = wide.square().sum(-1, keepdim=True)
    size = tile_of(x.shape[-1])[1] if slip == "divided by the block" else x.shape[-1]
    rstd = {
        "eps outside the root": 1 / ((squares / size).sqrt() + eps),
        "eps forgotten": torch.rsqrt(squares / size),
        "no division": torch.rsqrt(squares + eps),
    }.get(slip, torch.rsqrt(squares / size + eps))
    out = weight * (wide * rstd).to(x.dtype)
    if slip == "residual normed":
        residual.copy_(out)
    return out


NORM_SLIPS = [
    "eps outside the root",
    "eps forgotten",
    "squares in float16",
    "mean subtracted",
    "divided by the block",
    "no division",
    "norms the branch alone",
    "residual not updated",
    "residual keeps x alone",
    "residual normed",
]


@pytest.mark.parametrize("slip", ["", *NORM_SLIPS])
def test_a_wrong_norm_is_rejected(slip, seed):
    """On rows of common size, rows as small as eps, and rows whose squares float16 cannot hold."""
    x, residual, weight = (
        rows(shape, seed + i, torch.float16) for i, shape in enumerate([(4, 300), (4, 300), (300,)])
    )
    with pytest.raises(NotEquivalent) if slip else contextlib.nullcontext():
        for scale in (1, 1e-3, 400):
            prove(
                lambda *t: slipped_norm(slip, *t, EPS),
                with_eps(naive.add_rms_norm),
                (scale * x, scale * residual, weight),
                mutates=(1,),
            )


@pytest.mark.parametrize(
    "slip", ["silu on up", "sigmoid alone", "halves swapped", "norm over all heads", "no maximum"]
)
def test_another_wrong_operation_is_rejected(slip, seed):
    gate, up = rows((3, 64), seed), rows((3, 64), seed + 1)
    q, k, weight = rows((3, 4, 16), seed), rows((3, 2, 16), seed + 1), weight_of(16, seed)

    def over_all_heads(q, k, q_weight, k_weight):
        return tuple(
            w * naive.normed(x.flatten(1), EPS).view(x.shape)
            for x, w in ((q, q_weight), (k, k_weight))
        )

    wrong, right, inputs = {
        "silu on up": (
            lambda gate, up: gate * torch.nn.functional.silu(up),
            naive.silu_mul,
            (gate, up),
        ),
        "sigmoid alone": (lambda gate, up: gate.sigmoid() * up, naive.silu_mul, (gate, up)),
        "halves swapped": (
            lambda *t: optimized.silu_mul(*torch.cat(t[::-1], -1).chunk(2, -1)),
            naive.silu_mul,
            (gate, up),
        ),
        "norm over all heads": (over_all_heads, with_eps(naive.qk_norm), (q, k, weight, weight)),
        "no maximum": (
            lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
            naive.softmax,
            (100 * gate,),
        ),
    }[slip]
    with pytest.raises(NotEquivalent):
        prove(wrong, right, inputs)


# ---------------------------------------------------------------- bad input


def arguments_of(name):
    x, weight = torch.zeros(3, 8), torch.ones(8)
    return {
        "rms_norm": dict(x=x, weight=weight, eps=EPS),
        "rms_norm_gemma": dict(x=x, weight=weight, eps=EPS),
        "add_rms_norm": dict(x=x, residual=x.clone(), weight=weight, eps=EPS),
        "silu_mul": dict(gate=x, up=x.clone()),
        "qk_norm": dict(
            q=torch.zeros(3, 4, 8),
            k=torch.zeros(3, 2, 8),
            q_weight=weight,
            k_weight=weight.clone(),
            eps=EPS,
        ),
        "softmax": dict(x=x),
    }[name]


@pytest.mark.parametrize(
    "function, name",
    [
        (function, name)
        for function in (
            "rms_norm",
            "rms_norm_gemma",
            "add_rms_norm",
            "silu_mul",
            "qk_norm",
            "softmax",
        )
        for name in arguments_of(function)
        if name != "eps"
    ],
)
def test_every_kind_of_wrong_tensor_is_refused(function, name):
    """One function takes rows of any length, so a lone tensor has no wrong shape; a lone tensor has
    no wrong device.
    """
    kinds = {"softmax": ("dtype", "stride")}.get(
        function,
        ("dtype", "device", "stride") if name == "x" else ("dtype", "device", "shape", "stride"),
    )
    assert_refused(getattr(optimized, function), arguments_of(function), name, kinds)


@pytest.mark.parametrize(
    "function, change, message",
    [
        (
            "rms_norm",
            dict(x=torch.zeros(3, 9)),
            r"weight: got torch.float32 \(8,\), strides \(1,\); accepted: torch.float32 \(9,\)",
        ),
        (
            "rms_norm",
            dict(x=torch.zeros(3, 0), weight=torch.zeros(0)),
            r"x: got \(3, 0\); accepted: \[..., N\] with N at least 1",
        ),
        ("rms_norm", dict(x=torch.tensor(1.0)), r"x: got \(\); accepted"),
        (
            "rms_norm",
            dict(x=torch.zeros(3, 8).double()),
            "x: got torch.float64; accepted: float32, float16 or bfloat16",
        ),
        (
            "rms_norm",
            dict(x=torch.zeros(2, 4, 16).transpose(0, 1)[..., :8]),
            "x: got .* accepted: rows one stride apart",
        ),
        (
            "add_rms_norm",
            dict(residual=torch.zeros(4, 8)),
            r"x, residual: got \(3, 8\), \(4, 8\); accepted: .* the same for all",
        ),
        (
            "silu_mul",
            dict(up=torch.zeros(3, 8).half()),
            "gate, up: got torch.float32, torch.float16; accepted: .* one for all",
        ),
        (
            "qk_norm",
            dict(k=torch.zeros(4, 2, 8)),
            r"q, k: got \(3, 4, 8\), \(4, 2, 8\); accepted: \[T, Hq, D\], \[T, Hkv, D\]",
        ),
        ("softmax", dict(x=torch.zeros(1, MAX_ROW + 1)), "Tk at most 16384"),
    ],
)
def test_bad_input_is_one_line(function, change, message):
    with pytest.raises(ValueError, match=message) as error:
        getattr(optimized, function)(**arguments_of(function) | change)
    assert "\n" not in str(error.value)


def test_no_rows_give_no_rows():
    empty, weight = torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    heads = torch.zeros(0, 4, 8, device=DEVICE)
    for out in (
        optimized.rms_norm(empty, weight, EPS),
        optimized.add_rms_norm(empty, empty.clone(), weight, EPS),
        optimized.silu_mul(empty, empty),
        optimized.softmax(empty),
    ):
        assert out.shape == (0, 8)
    assert [x.shape for x in optimized.qk_norm(heads, heads, weight, weight, EPS)] == [
        (0, 4, 8)
    ] * 2
