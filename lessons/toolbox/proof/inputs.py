"""Named inputs and lengths at which wrong kernels fail; constant or small inputs pass anything."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lessons.toolbox.proof.traps import poisoned


def draw(
    name: str,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Tensor:
    """A tensor of a named distribution (`DISTRIBUTIONS`), [*shape]: the same numbers for the same
    seed on every device.
    """
    if name not in DISTRIBUTIONS:
        raise ValueError(f"distribution is {name!r}, known are {', '.join(DISTRIBUTIONS)}")
    x = DISTRIBUTIONS[name](
        torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    ).to(device, dtype)
    return _non_contiguous(x) if name == "non_contiguous" else x


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    # exp overflows float32 above 88: softmax without the max fails
    "large": lambda x: 30 * x,
    # the largest comes last: a frozen running max fails
    "ascending": lambda x: x.sort(-1).values,
    "all_negative": lambda x: -x.abs() - 0.1,  # padding that counts as 0 would win the max
    "tied": lambda x: x.round(),  # equal values: top-k and argmax must break ties
    "tiny": lambda x: 1e-4 * x,  # an absolute tolerance passes anything
    "non_contiguous": lambda x: x,  # strides that are not those of the shape
}


def attention_inputs(
    name: str,
    num_queries: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """q: [num_queries, num_heads, head_dim]; k, v: [num_keys, num_kv_heads, head_dim], as
    `ATTENTION_INPUTS` names them.
    """
    if name not in ATTENTION_INPUTS:
        raise ValueError(f"attention input is {name!r}, known are {', '.join(ATTENTION_INPUTS)}")
    generator = torch.Generator().manual_seed(seed)
    num_queries = 1 if name == "one_row" else num_queries
    q = torch.randn(num_queries, num_heads, head_dim, generator=generator)
    k, v = torch.randn(2, num_keys, num_kv_heads, head_dim, generator=generator)
    if name == "large_logits":
        q, k = 6 * q, 6 * k
    elif name == "ascending":
        # every key scores higher than the one before, so the running max moves in every tile
        q, k = q.abs(), k.abs() * torch.linspace(0, 2, num_keys)[:, None, None]
    elif name == "all_negative":  # a padded key that scores 0 would take nearly all of the weight
        q, k = q.abs(), -k.abs()
    elif name == "tied":
        k = k[:1].expand_as(k)
    q, k, v = (x.to(device, dtype).contiguous() for x in (q, k, v))
    return tuple(map(_non_contiguous, (q, k, v))) if name == "non_contiguous" else (q, k, v)


ATTENTION_INPUTS = (
    "normal",
    "large_logits",
    "ascending",
    "all_negative",
    "one_row",
    "tied",
    "non_contiguous",
)


def _non_contiguous(x: Tensor) -> Tensor:
    """The same values with a gap of poison behind every row; the last dimension stays dense, as
    kernels ask.
    """
    padded = poisoned((*x.shape[:-1], x.shape[-1] + 8), x.dtype, x.device)
    padded[..., : x.shape[-1]] = x
    return padded[..., : x.shape[-1]]


def apart(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same numbers, x: [N, …, D] each, in larger tensors full of poison: no row follows the one
    before, and no two tensors have the same strides, so a kernel that takes one for another's, or a
    dense one, reads poison. The last dimension stays dense, and gaps are whole multiples of 8.
    """
    found = []
    for number, x in enumerate(tensors, 1):
        sizes = [x.shape[0], *(size + number for size in x.shape[1:-1]), x.shape[-1] + 8 * number]
        larger = poisoned(sizes, x.dtype, x.device)
        found.append(larger[tuple(slice(size) for size in x.shape)].copy_(x))
    return tuple(found)


FAR = 2**30 + 64  # elements: twice as many do not fit into an int32


def far_apart(x: Tensor, stride: int = FAR) -> Tensor:
    """The same numbers, x: [N, ...], `stride` elements from one row to the next, because a kernel
    that multiplies row by stride in 32 bits is right until the third row. A CPU takes memory only
    for what is written; a GPU needs all of it, 4 GiB for three rows of 16 bits.
    """
    num_elements = (len(x) - 1) * stride + x[0].numel()
    memory = torch.empty(num_elements, dtype=x.dtype, device=x.device)
    apart = memory.as_strided(x.shape, (stride, *x[0].contiguous().stride()))
    return apart.copy_(x)


def edge_lengths(block: int, at_most: int | None = None) -> list[int]:
    """Lengths at which kernels with tiles of `block` go wrong: 1, 2, around one and two blocks, and
    a prime.
    """
    prime = next(
        n
        for n in range(3 * block + 1, 6 * block + 8)
        if all(n % d for d in range(2, math.isqrt(n) + 1))
    )
    lengths = {
        1,
        2,
        block - 1,
        block,
        block + 1,
        2 * block - 1,
        2 * block,
        2 * block + 1,
        prime,
    } - {0}
    return sorted(n for n in lengths if at_most is None or n <= at_most)
