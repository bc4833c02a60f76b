"""What "equal" means for an optimized function, and the traps that catch one that only looks equal.

Three computations of the same thing:
    ref64   the naive version in float64 on the upcast inputs: the oracle
    eager   the naive version in the test's own dtype: the error that a plain implementation has
    out     the optimized version under test

    E0  NaN and infinities stand at the same places                    (NaN never passes)
    E1  rms(out) <= 1.5 rms(eager) + floor                             catches a scale 1 % off
    E2  max|out - ref64| <= 2 max|eager - ref64| + rounding            catches a wrong mask
    E3  E1 for every tile of 64 rows, with factor 3                    catches one wrong tail row
    E4  bias(out) <= 1.5 bias(eager) + 4 rms(eager) / sqrt(rows)       catches truncation in place
                     + floor / 2                                       of rounding

with rms(x) = |x - ref64| / |ref64| (Frobenius norms) and bias(x) = |<x, ref64> / <ref64, ref64> -
1|, by how much x is too large or too small as a whole: rounding errors cancel there, and the middle
term is what chance leaves of them. E2 is the rule of FlashAttention's tests (Dao et al.,
tests/test_flash_attn.py) plus floor * max|ref64|, which float32 needs. No rule alone is enough,
because each of them passes what another one catches.

Use `prove(optimized, naive, inputs)`; the pieces below it serve tests that need only one of them.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lessons.toolbox.kernels.order import program_order
from lessons.toolbox.proof.inputs import (
    ATTENTION_INPUTS,
    DISTRIBUTIONS,
    attention_inputs,
    draw,
    edge_lengths,
)
from lessons.toolbox.proof.traps import (
    Allocations,
    Canaries,
    NotEquivalent,
    poison_,
    poisoned,
    poisoned_empty,
    with_canaries,
)

__all__ = [  # one import for a test of equivalence: the rules here, the traps, the inputs
    "ATTENTION_INPUTS",
    "DISTRIBUTIONS",
    "FLOORS",
    "LARGE_LOGITS_FLOOR",
    "TILE_ROWS",
    "Allocations",
    "Canaries",
    "Errors",
    "NotEquivalent",
    "assert_close_to_oracle",
    "assert_same_bits",
    "attention_inputs",
    "clone_with_strides",
    "draw",
    "edge_lengths",
    "floor_for",
    "poison_",
    "poisoned",
    "poisoned_empty",
    "prove",
    "with_canaries",
]

# Relative error that is always granted, because two honest orders of summation differ by about this
# much.
FLOORS = {"float64": 1e-12, "float32": 2e-6, "tf32": 5e-4, "float16": 2e-4, "bfloat16": 1e-3}
# Rounding a logit of 150 in float32 moves its exp by 150 * 2^-24 = 9e-6, and one order of
# operations rounds it twice.
LARGE_LOGITS_FLOOR = 2e-5
TILE_ROWS = 64


@dataclass(frozen=True)
class Errors:
    """What was measured, for the record. rms and bias are relative and have no unit; max_abs are in
    the output's unit.
    """

    rms: float
    rms_eager: float
    max_abs: float
    max_abs_eager: float
    worst_tile_rms: float
    bias: float
    bias_eager: float
    floor: float


def floor_for(arithmetic: str | torch.dtype, inputs: str = "normal") -> float:
    """The floor of a dtype or of "tf32" for named inputs. Raises ValueError, naming the known
    ones.
    """
    name = str(arithmetic).removeprefix("torch.")
    if name not in FLOORS:
        raise ValueError(f"arithmetic is {name!r}, known are {', '.join(FLOORS)}")
    return max(FLOORS[name], LARGE_LOGITS_FLOOR) if inputs == "large_logits" else FLOORS[name]


# ---------------------------------------------------------------- the rules


def assert_close_to_oracle(
    out: Tensor,
    eager: Tensor,
    ref64: Tensor,
    *,
    floor: float | None = None,
    tile_rows: int = TILE_ROWS,
    label: str = "out",
) -> Errors:
    """Hold `out` against rules E0 to E4; returns the measured errors, raises NotEquivalent.

    out, eager: [..., D], the same shape and dtype; ref64: the same shape, float64. Rows are all
    dimensions but the last. floor: relative, default by dtype. Tensors of integers and booleans
    must be exactly equal.
    """
    if out.shape != ref64.shape:
        raise NotEquivalent(
            "shape",
            f"{label} has shape {list(out.shape)}, the naive version gives {list(ref64.shape)}",
        )
    if out.dtype != eager.dtype:
        raise NotEquivalent(
            "dtype", f"{label} is {out.dtype}, the naive version gives {eager.dtype}"
        )
    if not out.dtype.is_floating_point:
        return _assert_exact(out, eager, label)
    floor = floor_for(out.dtype) if floor is None else floor
    rounded = ref64.to(out.dtype)  # what a perfect kernel would return
    _assert_same_specials(out, rounded, ref64, label)

    finite = rounded.isfinite()
    exact = ref64.masked_fill(~finite, 0)
    error = (out.double() - exact).masked_fill(~finite, 0)
    error_eager = (eager.double() - exact).masked_fill(~(finite & eager.isfinite()), 0)
    errors = _measure(error, error_eager, exact, tile_rows, floor)

    limit = 1.5 * errors.rms_eager + floor
    if errors.rms > limit:
        raise NotEquivalent(
            "E1",
            f"relative error {errors.rms:.3g} of {label}, limit {limit:.3g} "
            f"(1.5 x {errors.rms_eager:.3g} of the naive version + {floor:g}); "
            + _worst(out, ref64, error, error_eager),
        )
    perturbed = rounded.masked_fill(~finite, 0)
    rounding = _max(((perturbed + 0.3 - 0.3) - perturbed).abs())
    granted = 2 * rounding + floor * _max(exact.abs())
    limit = 2 * errors.max_abs_eager + granted
    if errors.max_abs > limit:
        raise NotEquivalent(
            "E2",
            f"largest error {errors.max_abs:.3g} of {label}, limit {limit:.3g} "
            f"(2 x {errors.max_abs_eager:.3g} of the naive version + {granted:.3g} of rounding); "
            + _worst(out, ref64, error, error_eager),
        )
    _assert_tiles(out, ref64, error, error_eager, exact, floor, tile_rows, label)
    # rows, because errors in one row may agree
    by_chance = 4 * errors.rms_eager / math.sqrt(max(1, len(_as_rows(exact))))
    limit = 1.5 * errors.bias_eager + by_chance + floor / 2
    if errors.bias > limit:
        raise NotEquivalent(
            "E4",
            f"{label} is off by a factor of 1 ± {errors.bias:.3g} as a whole, limit {limit:.3g} "
            f"(1.5 x {errors.bias_eager:.3g} of the naive version + {by_chance:.3g} by chance "
            f"+ {floor / 2:g}); " + _worst(out, ref64, error, error_eager),
        )
    return errors


def _assert_exact(out: Tensor, want: Tensor, label: str) -> Errors:
    wrong = (out != want).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise NotEquivalent(
            "exact",
            f"{len(wrong)} of {out.numel()} elements of {label} differ; first at {list(at)}: "
            f"{out[at].item()}, expected {want[at].item()}",
        )
    return Errors(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _assert_same_specials(out: Tensor, rounded: Tensor, ref64: Tensor, label: str) -> None:
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(out) != test(rounded)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise NotEquivalent(
                "E0",
                f"{len(wrong)} of {out.numel()} elements of {label} differ in being {name}; "
                f"first at {list(at)}: {out[at].item():.6g}, oracle {ref64[at].item():.6g}",
            )


def _assert_tiles(out, ref64, error, error_eager, exact, floor, tile_rows, label) -> None:
    norms = (_tile_norms(x, tile_rows) for x in (error, error_eager, exact))
    for tile, (norm, norm_eager, norm_exact) in enumerate(zip(*(n.tolist() for n in norms))):
        # both sides times |ref64|, because a tile of zeros is legal
        limit = 3 * norm_eager + floor * norm_exact
        if norm > limit:
            rows = slice(tile * tile_rows, (tile + 1) * tile_rows)
            raise NotEquivalent(
                "E3",
                f"error norm {norm:.3g} in rows {rows.start} to {rows.stop - 1} of {label}, limit "
                f"{limit:.3g} (3 x {norm_eager:.3g} of the naive version + {floor:g} x "
                f"{norm_exact:.3g}); " + _worst(out, ref64, error, error_eager, rows),
            )


def _measure(
    error: Tensor, error_eager: Tensor, exact: Tensor, tile_rows: int, floor: float
) -> Errors:
    norm = float(exact.norm())
    tiles, sizes = _tile_norms(error, tile_rows), _tile_norms(exact, tile_rows)
    return Errors(
        rms=_relative(float(error.norm()), norm),
        rms_eager=_relative(float(error_eager.norm()), norm),
        max_abs=_max(error.abs()),
        max_abs_eager=_max(error_eager.abs()),
        worst_tile_rms=max(
            (_relative(a, b) for a, b in zip(tiles.tolist(), sizes.tolist())), default=0.0
        ),
        bias=_relative(abs(float((error * exact).sum())), norm**2),
        bias_eager=_relative(abs(float((error_eager * exact).sum())), norm**2),
        floor=floor,
    )


def _relative(error: float, size: float) -> float:
    return error / size if size else (math.inf if error else 0.0)


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _as_rows(x: Tensor) -> Tensor:
    """[..., D] -> [rows, D]; a vector is one number a row."""
    return x.reshape(-1, x.shape[-1] if x.dim() > 1 and x.shape[-1] else 1)


def _tile_norms(x: Tensor, tile_rows: int) -> Tensor:
    """Frobenius norm of every tile of rows. x: [..., D] -> [tiles]."""
    squares = _as_rows(x).square().sum(-1)
    squares = torch.nn.functional.pad(squares, (0, -len(squares) % tile_rows))
    return squares.view(-1, tile_rows).sum(-1).sqrt()


def _worst(
    out: Tensor, ref64: Tensor, error: Tensor, error_eager: Tensor, rows: slice = slice(None)
) -> str:
    """Where the largest error is, both values, and how many elements are beyond twice the naive
    version's worst.
    """
    magnitude = torch.zeros_like(_as_rows(error))
    magnitude[rows] = _as_rows(error)[rows].abs()
    magnitude = magnitude.reshape(error.shape)
    at = tuple(int(i) for i in torch.unravel_index(magnitude.argmax(), magnitude.shape))
    count = int((error.abs() > 2 * _max(error_eager.abs())).sum())
    return (
        f"worst at {list(at)}: {out[at].item():.8g}, oracle {ref64[at].item():.8g}; {count} of "
        f"{out.numel()} elements are more than twice as wrong as the naive version ever is"
    )


# ---------------------------------------------------------------- the whole proof


def prove(
    optimized: Callable,
    naive: Callable,
    inputs: Sequence[Any],
    *,
    arithmetic: str | None = None,
    floor: float | None = None,
    mutates: Sequence[int] = (),
    deterministic: bool = True,
    tile_rows: int = TILE_ROWS,
) -> Errors | tuple[Errors, ...]:
    """Prove `optimized(*inputs)` equal to `naive(*inputs)`; returns the errors of each output (no
    tuple if there is one).

    Every run gets its own clones, with the strides of the originals. Checked: shape and dtype,
    rules E0 to E4, that no byte of an input's storage changed, the gaps of a non-contiguous input
    included, that nothing of an output was left unwritten (`torch.empty` returns poison), and that
    two calls give the same bits, the second with the kernel's programs in the opposite order.

    inputs: tensors, lists and dicts of them, and anything else, which is passed as it is (and not
    protected). arithmetic:    "float32", "tf32", "float16", "bfloat16", "float64": sets the floor;
    default: the dtype of the output. floor:         another floor, for inputs that amplify
    rounding: `floor_for(dtype, inputs="large_logits")`. mutates:       positions of inputs that the
    function writes to; they are compared as outputs and may change. deterministic: the property
    claimed. False only for kernels with floating-point atomics.
    """
    wide = [tree_map(_upcast, x) for x in _clone(inputs)]
    ref64 = _run(naive, wide, mutates)
    with _matmul_precision("high" if arithmetic == "tf32" else "highest"):
        eager = _run(naive, _clone(inputs), mutates)
    given, seed = _clone(inputs), random.getrandbits(31)
    with poisoned_empty(), program_order(seed):
        outputs = _run(optimized, given, mutates)
    _assert_unchanged(inputs, given, mutates)
    if len(outputs) != len(ref64):
        raise NotEquivalent(
            "shape",
            f"the optimized version gives {len(outputs)} outputs, the naive one {len(ref64)}",
        )
    floor = floor_for(arithmetic) if floor is None and arithmetic is not None else floor
    errors = tuple(
        assert_close_to_oracle(
            out, plain, exact, floor=floor, tile_rows=tile_rows, label=f"output {index}"
        )
        for index, (out, plain, exact) in enumerate(zip(outputs, eager, ref64))
    )
    if deterministic:
        with program_order(seed, backwards=True):
            again = _run(optimized, _clone(inputs), mutates)
        for index, (first, second) in enumerate(zip(outputs, again)):
            assert_same_bits(
                first, second, label=f"output {index} of two calls with the same inputs"
            )
    return errors if len(errors) != 1 else errors[0]


def assert_same_bits(first: Tensor, second: Tensor, label: str = "tensor") -> None:
    """Raise NotEquivalent unless both tensors, [...] each, hold the same bits (NaN equals NaN, 0.0
    differs from -0.0).
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        raise NotEquivalent(
            "deterministic",
            f"{label}: {first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}",
        )
    differ = (_element_bytes(first) != _element_bytes(second)).any(-1)
    if differ.any():
        at = (
            [int(i) for i in torch.unravel_index(differ.int().argmax(), first.shape)]
            if first.dim()
            else []
        )
        raise NotEquivalent(
            "deterministic",
            f"{label}: {int(differ.sum())} of {differ.numel()} elements differ, first at {at}",
        )


def _element_bytes(x: Tensor) -> Tensor:
    """x: [...] -> [numel, bytes per element] uint8."""
    return x.detach().contiguous().reshape(-1, 1).view(torch.uint8)


def _run(function: Callable, inputs: list, mutates: Sequence[int]) -> list[Tensor]:
    result = function(*inputs)
    outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)] + [
        inputs[i] for i in mutates
    ]
    if not outputs:
        raise ValueError(
            f"{getattr(function, '__name__', function)} returned {result!r}; a tensor, or "
            f"`mutates`, is needed"
        )
    return outputs


def _upcast(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.dtype.is_floating_point else x


def _clone(inputs: Sequence[Any]) -> list:
    return [
        tree_map(lambda x: clone_with_strides(x) if isinstance(x, Tensor) else x, x) for x in inputs
    ]


def clone_with_strides(x: Tensor) -> Tensor:
    """A copy in a copied storage, [...] -> [...]: same strides, offset, bytes in the gaps
    (Tensor.clone closes the gaps).
    """
    storage = x.detach().untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        storage, x.storage_offset(), x.shape, x.stride()
    )


def _assert_unchanged(
    originals: Sequence[Any], used: Sequence[Any], mutates: Sequence[int]
) -> None:
    for index, (before, after) in enumerate(zip(originals, used)):
        if index in mutates:
            continue
        for x, y in zip(tree_leaves(before), tree_leaves(after)):
            if isinstance(x, Tensor) and not torch.equal(_storage_bytes(x), _storage_bytes(y)):
                changed = int((_storage_bytes(x) != _storage_bytes(y)).sum())
                raise NotEquivalent(
                    "inputs",
                    f"input {index} {list(x.shape)} was written to: {changed} bytes of its storage "
                    "changed; name it in `mutates` if that is its purpose",
                )


def _storage_bytes(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.detach().untyped_storage())


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Because a process that allows tf32 would otherwise loosen every float32 limit."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
