"""Checks of lesson 18's exercises. Each exists because it rejects a named wrong answer
(wrong/l18.py).
"""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from solutions.l18_weight_quantization import E2M1, NF4
from tests.exercises.checking import (
    assert_close,
    assert_equal,
    assert_same_work,
    call,
    check,
    in_wider_memory,
    note,
)
from tests.exercises.kernel_film import assert_loads_once, assert_solves
from tests.exercises.kernel_work import kernel_does_it

CLEAR_OF_A_TIE = 1e-6


def is_clear(ratio: Tensor, grid: Tensor) -> bool:
    """Whether no element of ratio: [...] is so near the middle of two neighbours of grid: [M],
    sorted, that its rounding could depend on the last bits of a right answer.
    """
    middles = (grid[1:] + grid[:-1]) / 2
    distance = (ratio.flatten()[:, None] - middles).abs()
    return bool((distance > CLEAR_OF_A_TIE * middles.abs().clamp(min=1e-3)).all())


def nearest(ratio: Tensor, grid: Tensor) -> Tensor:
    """The nearest number of grid: [M] to each element of ratio: [...]."""
    return grid[(ratio[..., None] - grid).abs().argmin(-1)]


# ---------------------------------------------------------------- 18.1 four grids

WHOLE = torch.arange(-40, 41, dtype=torch.float64)
TABLE = torch.tensor(NF4, dtype=torch.float64)
FLOATS = torch.tensor(E2M1, dtype=torch.float64)


def e4m3_grid() -> Tensor:
    """The 253 finite numbers of E4M3, from sign, exponent and mantissa."""
    found = {0.0}
    for exponent in range(16):
        for mantissa in range(8):
            size = (
                mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
            )
            if (exponent, mantissa) != (15, 7):  # this one is NaN
                found |= {size, -size}
    return torch.tensor(sorted(found), dtype=torch.float64)


E4M3 = e4m3_grid()


def by_definition(weight, group_size, e4m3_scale):
    """Group by group; with it, whether every rounding was clear of a tie."""
    int4, nf4, nvfp4 = (torch.zeros_like(weight) for _ in range(3))
    whole, clear = float(weight.abs().max()) / 2688, True
    for n in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group_size):
            part = slice(start, start + group_size)
            group = weight[n, part]
            if not group.any():
                continue
            low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
            scale = (high - low) / 15
            zero = round(-low / scale)
            codes = (torch.round(group / scale) + zero).clamp(0, 15)
            int4[n, part] = (codes - zero) * scale
            largest = float(group.abs().max())
            nf4[n, part] = nearest(group / largest, TABLE) * largest
            clear &= is_clear(group / scale, WHOLE) and is_clear(group / largest, TABLE)
            clear &= is_clear(torch.tensor([-low / scale]), WHOLE)
            wanted = torch.tensor([largest / 6 / whole], dtype=torch.float64)
            step = max(float(nearest(wanted, E4M3)), 2.0**-9) * whole
            nvfp4[n, part] = nearest(group / step, FLOATS) * step
            clear &= is_clear(wanted, E4M3) and is_clear(group / step, FLOATS)
    ratio = (weight / e4m3_scale).clamp(-448, 448)
    e4m3 = nearest(ratio, E4M3) * e4m3_scale
    bits = {"int4": 4 + 20 / group_size, "e4m3": 8.0, "nf4": 4 + 32 / group_size}
    bits["nvfp4"] = 4 + 8 / group_size
    values = {"int4": int4, "e4m3": e4m3, "nf4": nf4, "nvfp4": nvfp4}
    return {name: (values[name], bits[name]) for name in bits}, clear and is_clear(ratio, E4M3)


GRID_CASES = {  # name: (N, K, group_size, e4m3_scale, what is done to the matrix, why)
    "one_group": (1, 16, 16, 0.01, "nothing", "a row is a group"),
    "groups": (4, 32, 8, 0.01, "rows differ", "each group of each row has a scale of its own"),
    "all_positive": (2, 16, 8, 0.01, "positive", "the range holds 0 though no weight is near it"),
    "all_negative": (2, 16, 8, 0.01, "negative", "the largest |w| may be a negative one"),
    "beyond_448": (2, 16, 8, 1e-4, "nothing", "what overflows in E4M3 saturates"),
    "large": (2, 16, 8, 16.0, "large", "448 is the largest code, not the largest weight"),
    "tiny": (2, 16, 8, 16.0, "nothing", "small ratios are on E4M3's even steps near 0"),
    "a_group_of_zeros": (2, 16, 8, 0.01, "zeros", "0 / 0 is no weight"),
}


def matrix_for(case: str, seed: int) -> tuple[dict, dict]:
    """Arguments of round_to_formats, clear of ties, and the answer."""
    N, K, group_size, e4m3_scale, change, _ = GRID_CASES[case]
    generator = torch.Generator().manual_seed(seed)
    while True:
        weight = torch.randn(N, K, generator=generator, dtype=torch.float64)
        if change == "rows differ":
            weight *= torch.tensor([0.1, 1.0, 3.0, 0.5])[:, None] + torch.arange(K) // group_size
        if change in ("positive", "negative"):
            weight = (weight.abs() + 2) * (1 if change == "positive" else -1)
        if change == "large":
            weight *= 1000
        if change == "zeros":
            weight[1, :group_size] = 0
        inputs = dict(weight=weight, group_size=group_size, e4m3_scale=e4m3_scale)
        want, clear = by_definition(**inputs)
        if clear:
            return inputs, want


def assert_grids(impl, inputs: dict, want: dict, atol: float = 1e-9) -> None:
    got = call(impl, inputs)
    assert isinstance(got, dict) and set(got) == set(want), (
        f"your result is {type(got).__name__}, expected a dict with the keys {sorted(want)}"
    )
    for name, (values, bits) in want.items():
        pair = got[name]
        assert isinstance(pair, tuple) and len(pair) == 2, f"{name}: expected (values, bits)"
        assert_close(pair[0], values, atol=atol, label=f"the values of {name}")
        assert_equal(pair[1], bits, atol=1e-9, label=f"the bits per weight of {name}")


@check("18.1", seconds=5)
def test_grids_example(impl, seed):
    weight = torch.tensor([[-1, 0, 0.5, 2]], dtype=torch.float64)
    nf4 = torch.tensor([[NF4[2] * 2, 0, NF4[10] * 2, 2]], dtype=torch.float64)
    want = {
        "int4": (torch.tensor([[-1, 0, 0.4, 2]], dtype=torch.float64), 9.0),
        "e4m3": (weight, 8.0),
        "nf4": (nf4, 12.0),
        "nvfp4": (weight, 6.0),
    }
    assert_grids(impl, dict(weight=weight, group_size=4, e4m3_scale=0.25), want)


@check("18.1", {case: why for case, (*_, why) in GRID_CASES.items()}, seconds=5)
def test_grids(impl, case, seed):
    assert_grids(impl, *matrix_for(case, seed))


@check("18.1", seconds=5)
def test_faint_groups(impl, seed):
    """Nearly 0 is not 0: a scale has no lower bound. What is right for the matrix is right for a
    multiple of it.
    """
    inputs, want = matrix_for("groups", seed)
    least = 2.0**-50
    inputs = dict(
        weight=inputs["weight"] * least,
        group_size=inputs["group_size"],
        e4m3_scale=inputs["e4m3_scale"] * least,
    )
    want = {name: (values * least, bits) for name, (values, bits) in want.items()}
    assert_grids(impl, inputs, want, atol=1e-9 * least)


@check("18.1", {"above": "just above", "below": "just below"}, seconds=5)
def test_beside_the_middle(impl, case, seed):
    """Numbers beside the middle of two codes. A step in 16 bits on the way rounds them to the
    middle, and then half of them go to the wrong side.
    """
    middles = ((TABLE[1:] + TABLE[:-1]) / 2).tolist()
    rows = [  # six of each are middles
        [1.0625, 1.1875, 2.125, 2.375, -4.25, -4.75, 16.0, 18.0],  # of E4M3: the scale is 1
        [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, -5.0, 10.0],  # of int4: the scale is 1, and the zero 5
        [*middles[:6], 0.0, 1.0],  # of NF4: the scale is 1
        [*middles[9:], 0.0, 1.0],
    ]
    weight = torch.tensor(rows, dtype=torch.float64)
    weight[:, :6] *= 1 + (1e-4 if case == "above" else -1e-4)
    inputs = dict(weight=weight, group_size=8, e4m3_scale=1.0)
    want, clear = by_definition(**inputs)
    assert clear, "a middle itself is among the numbers"
    assert_grids(impl, inputs, want)


@check("18.1", seconds=5)
def test_a_range_as_wide_on_both_sides(impl, seed):
    """Both ends are 7.5 steps away from 0. Both round to 8, which is one code too many."""
    weight = torch.tensor([[-7.5, 7.5, 3.0, -4.0]], dtype=torch.float64)
    inputs = dict(weight=weight, group_size=4, e4m3_scale=0.125)
    want, _ = by_definition(**inputs)
    assert_grids(impl, inputs, want)


# ---------------------------------------------------------------- 18.2 two codes in a byte


def layer_for(seed: int, N=3, K=16, group_size=8, order=False, awq=False) -> dict:
    """Arguments of PackedLinear."""
    g = torch.Generator().manual_seed(seed)
    groups = (N, K // group_size)
    return dict(
        codes=torch.randint(16, (N, K), generator=g, dtype=torch.uint8),
        scales=0.01 + torch.rand(groups, generator=g) / 10,
        zeros=torch.randint(16, groups, generator=g, dtype=torch.uint8),
        group_size=group_size,
        order=_mixed(K, g) if order else None,
        input_scales=0.25 + 2 * torch.rand(K, generator=g) if awq else None,
    )


def _mixed(K: int, generator: torch.Generator) -> Tensor:
    """A permutation that is not its own inverse and mixes the groups."""
    while True:
        order = torch.randperm(K, generator=generator)
        if not torch.equal(order.argsort(), order):
            return order


def matrix_of(codes, scales, zeros, group_size, order, input_scales) -> Tensor:
    """The matrix that was meant, [N, K] float64, element by element."""
    matrix = torch.zeros(codes.shape, dtype=torch.float64)
    N, K = codes.shape
    for n in range(N):
        for place in range(K):
            column = place if order is None else int(order[place])
            group = place // group_size
            step = int(codes[n, column]) - int(zeros[n, group])
            meant = step * float(scales[n, group])
            matrix[n, column] = meant / (1 if input_scales is None else float(input_scales[column]))
    return matrix


def bytes_of(codes, group_size, order, **_) -> Tensor:
    """What has to be in memory, byte by byte."""
    stored = codes if order is None else codes[:, order]
    packed = torch.zeros(len(codes), codes.shape[1] // 2, dtype=torch.uint8)
    half = group_size // 2
    for at in range(packed.shape[1]):
        first = at // half * group_size + at % half
        packed[:, at] = stored[:, first] + 16 * stored[:, first + half]
    return packed


LAYER_CASES = {  # name: (options of layer_for, why)
    "one_group": (dict(K=8), "the first half of a group is in the low bits"),
    "groups": (dict(), "the halves are those of a group, not those of a row"),
    "pairs": (dict(group_size=2), "the smallest group"),
    "act_order": (dict(order=True), "scales belong to stored columns"),
    "awq": (dict(awq=True), "what was multiplied has to be divided"),
    "both": (
        dict(order=True, awq=True, N=2, K=24),
        "input_scales are in the order of the matrix's columns",
    ),
}


@check("18.2", seconds=5)
def test_packed_example(impl, seed):
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    plain = dict(
        codes=codes, scales=torch.tensor([[0.5]]), zeros=torch.tensor([[1]], dtype=torch.uint8)
    )
    ones = torch.ones(1, 4)
    for options, stored, product in (
        (dict(), [[49, 66]], 3.0),
        (dict(order=torch.tensor([3, 2, 1, 0])), [[36, 19]], 3.0),
        (dict(input_scales=torch.tensor([1.0, 2, 1, 1])), [[49, 66]], 2.75),
    ):
        layer = impl(**plain, group_size=4, **options)
        want = torch.tensor(stored, dtype=torch.uint8)
        assert_equal(layer.packed, want, label="packed")
        assert_close(layer(ones), torch.tensor([[product]]), atol=1e-5, label="the product")


@check("18.2", {case: why for case, (_, why) in LAYER_CASES.items()}, seconds=5)
def test_packed_layer(impl, case, seed):
    inputs = layer_for(seed, **LAYER_CASES[case][0])
    layer = call(impl, inputs)
    assert_equal(layer.packed, bytes_of(**inputs), label="packed")
    x = torch.randn(4, inputs["codes"].shape[1])
    want = x.double() @ matrix_of(**inputs).T
    got = call(layer, dict(x=x))
    assert_close(got, want, atol=1e-4, rtol=1e-5, dtype=torch.float32, label="the product")


def tensors_in(value) -> list[Tensor]:
    """Those in lists, tuples and dictionaries as well."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


KEEPING_CASES = {"plain": "no order and no scales of AWQ", "both": "with the two that were given"}


@check("18.2", KEEPING_CASES, seconds=5)
def test_the_bytes_are_read(impl, case, seed):
    """Other bytes in `packed` are another matrix, and nothing else is kept."""
    has_both = case == "both"
    inputs = layer_for(seed, K=32, order=has_both, awq=has_both)
    other = inputs | dict(codes=layer_for(seed + 1, K=32)["codes"])
    layer = impl(**inputs)
    layer(torch.eye(32))  # which may not keep anything, either
    kept = {name: value for name, value in vars(layer).items() if tensors_in(value)}
    given = ("scales", "zeros", "order", "input_scales")
    most = 3 * 16 + sum(inputs[name].nbytes for name in given if inputs[name] is not None)
    kept_bytes = sum(tensor.nbytes for tensor in tensors_in(list(kept.values())))
    assert kept_bytes <= most, (
        f"the layer keeps {kept_bytes} bytes in {sorted(kept)}; the packed codes and what else "
        f"was given are {most}"
    )
    layer.packed = bytes_of(**other)
    want = torch.eye(32).double() @ matrix_of(**other).T
    got = note(layer(torch.eye(32)))
    assert_close(got, want, atol=1e-4, dtype=torch.float32, label="the product of other bytes")


@check("18.2", seconds=10)
def test_packed_without_a_loop(impl, seed):
    few, many = (layer_for(seed, N=n, K=k, group_size=4) for n, k in ((2, 8), (6, 40)))
    assert_same_work(
        "for three times the rows and five times the groups",
        lambda: impl(**few)(torch.ones(2, 8)),
        lambda: impl(**many)(torch.ones(2, 40)),
    )


# ---------------------------------------------------------------- 18.3 GPTQ


def by_least_squares(weight, hessian, group_size):
    """Each column is rounded, and then all later columns are solved for again: the exact least
    squares problem under H. With the codes and scales: whether every rounding was clear of a tie.
    """
    N, K = weight.shape
    now, clear = weight.clone(), True
    codes, scales = torch.zeros(N, K, dtype=torch.int64), weight.new_zeros(N, K // group_size)
    fixed = torch.zeros_like(weight)  # what the rounded columns mean
    for j in range(K):
        group = j // group_size
        if j % group_size == 0:
            scales[:, group] = now[:, j : j + group_size].abs().amax(1) / 7
        scale = scales[:, group]
        ratio = torch.where(scale > 0, now[:, j] / scale, 0.0)
        clear &= is_clear(ratio, WHOLE)
        codes[:, j] = torch.round(ratio).clamp(-8, 7).long()
        fixed[:, j] = codes[:, j] * scale
        done, rest = slice(j + 1), slice(j + 1, K)
        missed = weight[:, done] - fixed[:, done]
        if j + 1 < K:
            shift = torch.linalg.solve(hessian[rest, rest], hessian[rest, done] @ missed.T).T
            now[:, rest] = weight[:, rest] + shift
    return (codes, scales), clear


def problem(seed: int, N=3, K=12, group_size=4, outlier=False, zeros=False) -> tuple[dict, tuple]:
    """Arguments of gptq, clear of ties, and the answer. Inputs are correlated, as activations
    are.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        mix = torch.randn(K, K, generator=generator, dtype=torch.float64)
        inputs = torch.randn(4 * K, K, generator=generator, dtype=torch.float64) @ mix
        weight = torch.randn(N, K, generator=generator, dtype=torch.float64)
        if outlier:
            weight[0, K // 2] = 20
        if zeros:  # an input that is never used, in every group of the row
            weight[1] = 0
        hessian = inputs.T @ inputs / len(inputs)
        hessian += 0.01 * hessian.diagonal().mean() * torch.eye(K, dtype=torch.float64)
        # U is the transposed lower factor of H⁻¹: another way than that of `factor_of`
        factor = torch.linalg.cholesky(torch.linalg.inv(hessian)).T.contiguous()
        want, clear = by_least_squares(weight, hessian, group_size)
        if clear:
            return dict(weight=weight, factor=factor, group_size=group_size), want


GPTQ_CASES = {  # name: (options of problem, why)
    "one_group": (dict(group_size=12), "one scale for a row"),
    "groups": (dict(), "a group's scale waits for the feedback of those in front"),
    "single_columns": (dict(group_size=1, K=5), "every column is a group"),
    "outlier": (dict(outlier=True), "one large weight spoils its own group alone"),
    "a_row_of_zeros": (dict(zeros=True), "0 / 0 is no code"),
}


def assert_gptq(impl, inputs: dict, want: tuple) -> None:
    got = call(impl, inputs)
    assert isinstance(got, tuple) and len(got) == 2, "expected (codes, scales)"
    assert_close(got[1], want[1], atol=1e-8, label="the scales")
    assert_equal(got[0], want[0], label="the codes")


@check("18.3", seconds=5)
def test_gptq_example(impl, seed):
    weight = torch.tensor([[7, 2.4, 1.6]], dtype=torch.float64)
    factor = torch.tensor([[1, 0, 0], [0, 2, 1], [0, 0, 1]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    inputs = dict(weight=weight, factor=factor, group_size=3)
    assert_gptq(impl, inputs, (torch.tensor([[7, 2, 1]]), one))


@check("18.3", {case: why for case, (_, why) in GPTQ_CASES.items()}, seconds=10)
def test_gptq(impl, case, seed):
    assert_gptq(impl, *problem(seed, **GPTQ_CASES[case][0]))


@check("18.3", seconds=5)
def test_faint_weights(impl, seed):
    """Nearly 0 is not 0: a scale has no lower bound."""
    inputs, (codes, scales) = problem(seed)
    least = 2.0**-50
    got = call(impl, inputs | dict(weight=inputs["weight"] * least))
    assert isinstance(got, tuple) and len(got) == 2, "expected (codes, scales)"
    assert_close(got[1], scales * least, atol=1e-8 * least, label="the scales")
    assert_equal(got[0], codes, label="the codes")


CLAMPED = {  # name: (sign of the weights, codes, why)
    "above_7": (1, [-7, 0, 7, 1], "feedback makes a weight larger than its scale was chosen for"),
    "below_-8": (-1, [7, 0, -8, -2], "the codes reach to -8, and the error is that of the code"),
}


@check("18.3", {case: why for case, (*_, why) in CLAMPED.items()}, seconds=5)
def test_codes_stay_in_four_bits(impl, case, seed):
    """Column 2 becomes ±10.82. What its code does not reach goes on to column 3."""
    sign, codes, _ = CLAMPED[case]
    weight = sign * torch.tensor([[-7, 0.49, 6.9, 3.2]], dtype=torch.float64)
    factor = torch.eye(4, dtype=torch.float64)
    factor[1, 1], factor[1, 2], factor[2, 3] = 0.1, -0.8, 0.5
    want = torch.tensor([codes]), torch.ones(1, 1, dtype=torch.float64)
    assert_gptq(impl, dict(weight=weight, factor=factor, group_size=4), want)


@check("18.3", seconds=5)
def test_ties_go_to_the_even_code(impl, seed):
    weight = torch.tensor([[7, 2.5, -3.5, 0.5], [-1.5, 5.5, 4.5, -7]], dtype=torch.float64)
    inputs = dict(weight=weight, factor=torch.eye(4, dtype=torch.float64), group_size=4)
    codes = torch.tensor([[7, 2, -4, 0], [-2, 6, 4, -7]])
    assert_gptq(impl, inputs, (codes, torch.ones(2, 1, dtype=torch.float64)))


@check("18.3", seconds=5)
def test_gptq_without_a_loop_over_rows(impl, seed):
    few, many = (problem(seed, N=n, K=4)[0] for n in (2, 8))
    assert_same_work("for four times the rows", lambda: impl(**few), lambda: impl(**many))


# ---------------------------------------------------------------- 18.4 the kernel


def gemv_for(seed: int, N=8, K=16, group_size=8, gaps=False) -> dict:
    """Arguments of w4a16_gemv."""
    inputs = layer_for(seed, N, K, group_size)
    packed, scales, zeros = bytes_of(**inputs), inputs["scales"].half(), inputs["zeros"]
    if gaps:
        packed, scales, zeros = map(in_wider_memory, (packed, scales, zeros))
    x = torch.randn(K, generator=torch.Generator().manual_seed(seed)).half()
    return dict(x=x, packed=packed, scales=scales, zeros=zeros, group_size=group_size)


def multiplied(x, packed, scales, zeros, group_size) -> Tensor:
    """The definition, in float64, byte by byte."""
    out, half = torch.zeros(len(packed), dtype=torch.float64), group_size // 2
    for at in range(packed.shape[1]):
        group, first = at // half, at // half * group_size + at % half
        for column, code in ((first, packed[:, at] % 16), (first + half, packed[:, at] // 16)):
            step = code.double() - zeros[:, group].double()
            out += step * scales[:, group].double() * float(x[column])
    return out


GEMV_CASES = {  # name: (options of gemv_for, why)
    "one_group": (dict(K=8), "the low halves meet the first half of the inputs"),
    "groups": (dict(K=32), "each group has its own scale and zero"),
    "group_of_4": (dict(group_size=4), "two bytes a group"),
    "group_of_32": (dict(K=64, group_size=32), "16 bytes a group"),
    "two_programs": (dict(N=11), "each has rows of its own, and the last one's end early"),
    "gaps": (dict(N=3, gaps=True), "rows are stride_packed and stride_group apart"),
}


@check("18.4", seconds=20)
def test_gemv_example(impl, seed):
    inputs = dict(
        x=torch.tensor([1, 1, 1, 2.0]).half(),
        packed=torch.tensor([[49, 66]], dtype=torch.uint8),
        scales=torch.tensor([[0.5]]).half(),
        zeros=torch.tensor([[1]], dtype=torch.uint8),
        group_size=4,
    )
    assert_solves(impl, inputs, torch.tensor([4.5]), atol=1e-5)


@check("18.4", {case: why for case, (_, why) in GEMV_CASES.items()}, seconds=20)
def test_gemv(impl, case, seed):
    inputs = gemv_for(seed, **GEMV_CASES[case][0])
    want = multiplied(**inputs).float()
    film = assert_solves(impl, inputs, want, atol=2e-4)
    assert_loads_once(film, inputs["packed"], "packed")


test_the_kernel_does_it = kernel_does_it("18.4", lambda seed: gemv_for(seed, N=11))
