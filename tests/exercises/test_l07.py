"""Checks of lesson 07's exercises. Each exists because it rejects a named wrong answer
(wrong/l07.py).
"""

from types import SimpleNamespace

import torch

from lessons.l07_kernel_fusion import naive
from lessons.l07_kernel_fusion.lab import launches
from lessons.l07_kernel_fusion.lab.traffic import chains
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.measure.device import default_device, interpreting
from lessons.toolbox.measure.passes import total_bytes
from lessons.toolbox.model.config import ModelConfig
from tests.exercises.checking import assert_equal, call, check, compare
from tests.exercises.kernel_work import kernel_does_it

DEVICE = default_device()

# ---------------------------------------------------------------- 7.1 the kernel


def norm_inputs(seed, rows=3, size=64, dtype=torch.float32, scale=1.0, eps=1e-5):
    """Random x, residual: [rows, size] and weight: [size] around 1, on the device where kernels
    run.
    """
    g = torch.Generator().manual_seed(seed)
    x, residual = (scale * torch.randn(rows, size, generator=g) for _ in range(2))
    weight = 1 + 0.3 * torch.randn(size, generator=g)
    return [tensor.to(DEVICE, dtype) for tensor in (x, residual, weight)] + [eps]


def add_and_norm(impl, x, residual, weight, eps):
    """(what it returns, the residual as it leaves it); x and weight must stay as they were."""
    kept, before = residual.clone(), (x.clone(), weight.clone())
    out = impl(x=x, residual=kept, weight=weight, eps=eps)
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1]), (
        "your kernel changed x or weight; only residual changes"
    )
    return out, kept


NORM_CASES = {
    "full_block": (dict(), "64 values fill their block"),
    "padded": (
        dict(size=100),
        "100 values in a block of 128: the padding is masked, and counts for nothing",
    ),
    "one_value": (dict(size=1), "a row of one value becomes ± its weight"),
    "many_rows": (dict(rows=17, size=20), "each program has its own row"),
    "tiny_rows": (
        dict(scale=1e-3, eps=1e-5),
        "rows as small as the root of eps: eps counts, and is inside the root",
    ),
    "large_float16": (
        dict(dtype=torch.float16, scale=300.0),
        "the square of 300 does not fit float16: sum in float32",
    ),
    "float16": (dict(dtype=torch.float16, size=100), "float16 in, float16 out"),
}


@check("7.1", {case: why for case, (_, why) in NORM_CASES.items()})
def test_values(impl, case, seed):
    x, residual, weight, eps = norm_inputs(seed, **NORM_CASES[case][0])
    out, kept = add_and_norm(impl, x, residual, weight, eps)
    exact = (residual + x).double()
    want = naive.rms_norm(exact, weight.double(), eps)
    rough = x.dtype == torch.float16
    assert_equal(kept, residual + x, label="the residual afterwards")
    assert_equal(
        out, want, atol=4e-3 if rough else 4e-6, rtol=4e-3 if rough else 4e-6, dtype=x.dtype
    )


@check(
    "7.1",
    {"bfloat16": "8 bits show where a value is rounded", "float16": "11 bits, the same places"},
)
def test_rounds_before_the_weight(impl, case, seed):
    """Nearly every bit is that of Llama's norm; one rounding alone, after the weight, misses a
    fifth of them.
    """
    x, residual, weight, eps = norm_inputs(seed, rows=8, size=256, dtype=getattr(torch, case))
    out, _ = add_and_norm(impl, x, residual, weight, eps)
    share = float((out == naive.rms_norm(residual + x, weight, eps)).float().mean())
    assert share > 0.99, (
        f"{1 - share:.1%} of your values are rounded to a neighbour: round the norm before the "
        "weight, and norm the sum as it is kept"
    )


@check(
    "7.1",
    {
        "x": "its values stay in registers",
        "residual": "its values stay in registers",
        "weight": "once a program",
    },
)
def test_loads_and_stores_once(impl, case, seed):
    x, residual, weight, eps = norm_inputs(seed, rows=3, size=40)
    if not interpreting():  # the interpreter alone can count
        add_and_norm(impl, x, residual, weight, eps)
        return
    with Accesses() as accesses:
        out = impl(x=x, residual=residual, weight=weight, eps=eps)
    name, tensor, times = {
        "x": ("x", x, 1),
        "residual": ("residual", residual, 1),
        "weight": ("weight", weight, 3),
    }[case]
    counts = accesses.loads(tensor)
    assert (counts == times).all(), (
        f"your kernels load values of {name} {int(counts.max())} times, expected {times}"
    )
    assert (accesses.stores(out) == 1).all() and (accesses.stores(residual) == 1).all(), (
        "store each result once"
    )
    outside = accesses.outside(x, residual, weight, out)
    assert not outside, f"{outside} loads or stores touch memory beside the tensors"


@check("7.1")
def test_example(impl, seed):
    x, residual = (
        torch.tensor([[1.0, 1.0]], device=DEVICE),
        torch.tensor([[2.0, 3.0]], device=DEVICE),
    )
    out, kept = add_and_norm(impl, x, residual, torch.tensor([1.0, 10.0], device=DEVICE), 0.0)
    assert_equal(kept, torch.tensor([[3.0, 4.0]], device=DEVICE), label="the residual afterwards")
    assert_equal(out, torch.tensor([[0.848528, 11.313708]], device=DEVICE), atol=1e-5)


test_the_kernel_does_it = kernel_does_it(
    "7.1",
    lambda seed: dict(zip(("x", "residual", "weight", "eps"), norm_inputs(seed, size=20))),
    results=lambda got, inputs: {"your result": got, "residual": inputs["residual"]},
)


# ---------------------------------------------------------------- 7.2 the loop


class ToyNorm:
    """A norm that remembers how it was called. Its values tell it from every other norm."""

    def __init__(self, weight, log):
        self.weight, self.log = weight, log

    def __call__(self, x):
        self.log.append("norm")
        return naive.rms_norm(x, self.weight, 1e-5)

    def after_adding(self, branch, residual):
        self.log.append("after_adding")
        return naive.add_rms_norm(branch, residual, self.weight, 1e-5)


def toy_model(seed, num_layers, size=6):
    """Layers whose attention depends on the layer's number, and a log of the norms' calls."""
    g, log = torch.Generator().manual_seed(seed), []

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def layer():
        q, up = draw(size, size), draw(size, size)
        return SimpleNamespace(
            input_layernorm=ToyNorm(draw(size), log),
            post_attention_layernorm=ToyNorm(draw(size), log),
            self_attn=lambda x, attend: attend(x @ q, x, x @ q),
            mlp=lambda x: torch.tanh(x @ up),
        )

    return [layer() for _ in range(num_layers)], ToyNorm(draw(size), log), log, draw(4, size)


def toy_attend(layer, q, k, v):
    return q.cumsum(0) * (layer + 2) + torch.sin(k) * v


def plain_loop(layers, last_norm, x):
    for index, layer in enumerate(layers):

        def attend(q, k, v, index=index):
            return toy_attend(index, q, k, v)

        x = x + layer.self_attn(layer.input_layernorm(x), attend)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return last_norm(x)


@check(
    "7.2",
    {
        "one_layer": "two junctions",
        "two_layers": "the next layer's norm follows this one's MLP",
        "five_layers": "every layer its number",
    },
)
def test_is_the_plain_decoder(impl, case, seed):
    layers, last_norm, _, x = toy_model(
        seed, {"one_layer": 1, "two_layers": 2, "five_layers": 5}[case]
    )
    want = plain_loop(layers, last_norm, x)
    got = impl(layers, last_norm, x.clone(), toy_attend)
    assert_equal(got, want, atol=1e-10, rtol=1e-10)


@check("7.2", {"one_layer": "1 norm, 2 junctions", "four_layers": "1 norm, 8 junctions"})
def test_every_addition_is_inside_a_norm(impl, case, seed):
    num_layers = 1 if case == "one_layer" else 4
    layers, last_norm, log, x = toy_model(seed, num_layers)
    impl(layers, last_norm, x.clone(), toy_attend)
    calls = log.count("norm"), log.count("after_adding")
    want = (1, 2 * num_layers)
    assert calls == want, (
        f"your loop calls {calls[0]} norms and {calls[1]} after_adding, expected {want[0]} and "
        f"{want[1]}"
    )


# ---------------------------------------------------------------- 7.3 three small operations

SWIGLU = {
    "example": (
        torch.tensor([[0.0, 2.0, 3.0, 4.0]]),
        torch.tensor([[0.0, 7.046377]]),
        "the docstring's",
    ),
    "large_gate": (
        torch.tensor([[-1.0, 100.0, 5.0, 2.0]]),
        torch.tensor([[-1.3447071, 200.0]]),
        "exp(100) does not fit float32",
    ),
}


@check("7.3", {case: why for case, (*_, why) in SWIGLU.items()})
def test_swiglu(impl, case, seed):
    gate_up, want, _ = SWIGLU[case]
    compare(lambda gate_up: impl().swiglu(gate_up), dict(gate_up=gate_up), want, atol=1e-4)


@check("7.3")
def test_swiglu_on_random_rows(impl, seed):
    gate_up = torch.randn(5, 14, generator=torch.Generator().manual_seed(seed))
    gate, up = gate_up[:, :7].double(), gate_up[:, 7:].double()
    compare(
        lambda gate_up: impl().swiglu(gate_up),
        dict(gate_up=gate_up),
        gate / (1 + torch.exp(-gate)) * up,
        atol=1e-5,
        dtype=torch.float32,
    )


@check(
    "7.3",
    {
        "example": "a head ten times as long gives the same",
        "random": "other head counts for q and k, other weights",
        "small_heads": "eps counts in each head by itself",
    },
)
def test_qk_norm(impl, case, seed):
    g = torch.Generator().manual_seed(seed)
    if case == "example":
        q, weights, eps = torch.tensor([[[3.0, 4.0], [30.0, 40.0]]]), [torch.ones(2)] * 2, 0.0
        k = q[:, :1].clone()
    else:
        scale = torch.tensor([1.0, 100, 0.01, 1]) * (0.003 if case == "small_heads" else 1)
        q, k = (
            torch.randn(3, 4, 8, generator=g) * scale[:, None],
            torch.randn(3, 2, 8, generator=g) * scale[:2, None],
        )
        weights, eps = [1 + torch.randn(8, generator=g) for _ in range(2)], 1e-5
    inputs = dict(q=q, k=k, q_weight=weights[0], k_weight=weights[1], eps=eps)
    wide = [x.double() for x in (q, k, *weights)]
    want = tuple(
        w * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) for x, w in zip(wide[:2], wide[2:])
    )
    got = call(lambda **arguments: impl().qk_norm(**arguments), inputs)
    assert isinstance(got, tuple) and len(got) == 2, (
        f"your qk_norm returns {type(got).__name__}, expected a tuple of two tensors"
    )
    for mine, right, label in zip(got, want, "qk"):
        assert_equal(mine, right, atol=1e-4, rtol=1e-4, dtype=torch.float32, label=label)


SOFTMAX = {
    "example": (
        torch.tensor([1000.0, 1000.0, -1000.0]),
        "exp(1000) is infinite, and infinite over infinite is NaN",
    ),
    "rows_apart": (torch.tensor([[0.0, 1.0], [500.0, 501.0]]), "each row has its own maximum"),
    "all_small": (
        torch.tensor([[-30000.0, -30001.0, -30002.0]]),
        "without a shift, or with a maximum of -10000, every exp is 0, and 0 over 0 is NaN",
    ),
    "ascending": (torch.tensor([[0.0, 100.0, 200.0]]), "the largest value comes last"),
    "wide": (torch.linspace(-4, 4, 12).view(2, 2, 3), "the last dimension of three"),
}


@check("7.3", {case: why for case, (_, why) in SOFTMAX.items()})
def test_softmax(impl, case, seed):
    x = SOFTMAX[case][0]
    compare(
        lambda x: impl().softmax(x),
        dict(x=x),
        torch.softmax(x.double(), -1),
        atol=1e-6,
        dtype=torch.float32,
    )


@check(
    "7.3",
    {
        "softmax": "computed in float32, rounded once",
        "swiglu": "float16 in, float16 out",
        "qk_norm": "the square of 300 does not fit float16; rounded before the weight",
    },
)
def test_keeps_float16(impl, case, seed):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(9, 4, 32, generator=g).half(), torch.randn(32, generator=g).half()
    ops = impl()
    if case == "softmax":
        got, want = ops.softmax(x), torch.softmax(x.double(), -1)
        assert_equal(got, want, atol=1e-6, rtol=2**-10, dtype=torch.float16)
    elif case == "swiglu":
        got, (gate, up) = ops.swiglu(x[0]), x[0].double().chunk(2, -1)
        want = gate / (1 + torch.exp(-gate)) * up
        assert_equal(got, want, atol=1e-4, rtol=4e-3, dtype=torch.float16)
    else:
        got, _ = ops.qk_norm(300 * x, x[:, :2], weight, weight, 1e-5)
        want = naive.rms_norm(300 * x, weight, 1e-5)
        assert_equal(got, want.double(), atol=1e-3, rtol=4e-3, dtype=torch.float16, label="q")
        share = float((got == want).double().mean())
        assert share > 0.99, (
            f"q: {1 - share:.1%} of your values are rounded to a neighbour: round the norm before "
            "the weight"
        )


# ---------------------------------------------------------------- 7.4 predict

PREDICT = {  # name: (arguments, answers, why)
    "example": ((1, 1000, 2, 1, 0.0, 5.0, 1000.0), (0.042, 0.008, 0.29, 0.17), "the docstring's"),
    "llama_1b": (
        (4096, 2048, 2, 16, 2.6, 5.0, 4800.0),
        (352.321536, 67.108864, 3.215, 1.82),
        "bound by launches, both times",
    ),
    "bound_by_bytes": (
        (1, 1, 2, 16, 26.0, 5.0, 4800.0),
        (42e-6, 8e-6, 26 / 4.8, 26 / 4.8),
        "reading the weights takes longer",
    ),
    "in_between": (
        (1, 1, 2, 16, 2.6, 5.0, 1000.0),
        (42e-6, 8e-6, 3.215, 2.6),
        "fusing ends where the bytes begin",
    ),
    "float32": ((10, 100, 4, 2, 0.0, 10.0, 1.0), (0.04, 0.016, 0.97, 0.56), "no casts"),
}


@check("7.4", {case: why for case, (*_, why) in PREDICT.items()})
def test_predict(impl, case, seed):
    numbers, want, _ = PREDICT[case]
    names = ("rows", "size", "itemsize", "num_layers", "step_gb", "launch_us", "bandwidth_gb_per_s")
    got = call(impl, dict(zip(names, numbers)))
    assert isinstance(got, tuple) and len(got) == 4, (
        f"your result is {got!r}, expected a tuple of four numbers"
    )
    for what, mine, right in zip(
        ("MB, eager,", "MB, one kernel,", "ms, eager,", "ms, fused,"), got, want
    ):
        assert_equal(mine, float(right), atol=1e-12, rtol=1e-9, label=f"your {what}")


@check("7.4")
def test_against_the_lessons_counters(impl, seed):
    """PyTorch's own operations, counted on tensors without memory."""
    layers, dtype = 1 + seed % 3, (torch.bfloat16, torch.float32)[seed % 2]
    config = ModelConfig("llama", 97, 64, layers, 4, 2, 16, 96, 64)
    eager, fused = (
        len(launches_of(config, 16))
        for launches_of in (launches.eager_launches, launches.fused_launches)
    )
    passes, kernel = chains(64, 4096, dtype)["add + RMSNorm"]
    got = call(
        impl,
        dict(
            rows=64,
            size=4096,
            itemsize=dtype.itemsize,
            num_layers=layers,
            step_gb=0.0,
            launch_us=1000.0,
            bandwidth_gb_per_s=1.0,
        ),
    )
    want = (total_bytes(passes) / 1e6, total_bytes([kernel]) / 1e6, eager, fused)
    for what, mine, right in zip(
        ("MB, eager,", "MB, one kernel,", "launches, eager,", "launches, fused,"), got, want
    ):
        assert_equal(
            float(mine),
            float(right),
            atol=1e-9,
            rtol=0.02 if "MB" in what else 0.0,
            label=f"your {what}",
        )
