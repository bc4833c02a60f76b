"""Exercise 23.3: a kernel like that of 23.1, with a planted bug, and the test that finds it."""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l23_experts.align import align_in_python
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def planted_kernel(
    x_ptr,
    weight_ptr,
    pairs_ptr,
    tile_experts_ptr,
    router_ptr,
    out_ptr,
    num_pairs,
    size,
    num_outputs,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """23.1's kernel by someone in a hurry: one program a tile, all blocks of outputs in a loop."""
    tile, lane = tl.program_id(0), tl.arange(0, BLOCK)
    expert = tl.load(tile_experts_ptr + tile)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tile * BLOCK + lane)
    is_pair = (pair < num_pairs)[:, None]
    router = tl.load(router_ptr + pair, mask=pair < num_pairs, other=0.0)
    row = x_ptr + (pair // TOP_K)[:, None] * size
    for first in range(0, num_outputs, BLOCK):
        n = first + lane
        matrix = weight_ptr + (expert * num_outputs + n)[None, :] * size
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
        for start in range(0, size // BLOCK * BLOCK, BLOCK):
            k = start + lane
            x = tl.load(row + k[None, :], mask=is_pair, other=0.0)
            w = tl.load(matrix + k[:, None], mask=(n < num_outputs)[None, :], other=0.0)
            acc += tl.dot(x, w, input_precision="ieee")
        out = out_ptr + pair[:, None] * num_outputs + n[None, :]
        tl.store(out, acc * router[:, None], mask=is_pair & (n < num_outputs)[None, :])


def planted_rows(
    x: Tensor, weight: Tensor, pairs: Tensor, tile_experts: Tensor, router: Tensor
) -> Tensor:
    """`expert_rows` by `planted_kernel`, which has a bug: your test of 23.3 has to find it."""
    out = x.new_zeros(router.numel(), weight.shape[1])
    planted_kernel[(len(tile_experts),)](
        x,
        weight,
        pairs,
        tile_experts,
        router,
        out,
        len(out),
        x.shape[1],
        out.shape[1],
        TOP_K=router.shape[1],
        BLOCK=16,
    )
    return out


@exercise("23.3", "Write the test that finds the bug", minutes=45, difficulty=4)
def check_expert_rows(implementation: Callable[..., Tensor]) -> None:
    """A test of any implementation of 23.1: raises AssertionError if it is wrong, else returns
    None.

    implementation(x, weight, pairs, tile_experts, router) -> [T · k, N], as `expert_rows` in 23.1.
    `planted_rows` above is one, and it is wrong, though many inputs do not show it. Your test has
    to find that, and also bugs that you have not seen: read what 23.1 promises, and ask which
    inputs show that a promise is broken.

    `align_in_python(chosen, num_experts, 16)` gives (pairs, tile_experts, 16) for chosen: [T, k],
    the experts of each token. Experts of another rank are −1 there. Its tiles that are not used
    hold T · k; a harder test puts old numbers into them, as 23.1 allows.

    - What is right you compute yourself, from the definition in float64, in PyTorch.
    - A right implementation adds float32 numbers in another order. Errors up to 1e-4 of the
      largest element are no bug. Errors of 1 % are one. NaN, another shape or another dtype than
      float32 is wrong.
    - A wrong answer to one call is enough for AssertionError, with a message that names the case.
    - At most 20 calls, with at most 100000 numbers in all tensors of a call. Inputs are as 23.1
      says, and the same in each run of your test: torch.Generator with a seed of its own.
    - The implementation gets tensors that are its own: what it writes into its inputs must not
      spoil what you compare with.
    Errors: AssertionError for wrong implementations, none for right ones.

    Example: check_expert_rows(expert_rows) returns None; check_expert_rows(planted_rows) raises
        AssertionError("tails: row 0 is off by 1.7")
    """
    # SOLUTION
    for name, (tokens, top_k, num_experts, size, outputs, held) in {
        "one choice": (5, 1, 3, 16, 16, 3),
        "two choices": (6, 2, 4, 16, 16, 4),
        "tails": (7, 2, 3, 21, 19, 3),
        "several blocks": (5, 2, 3, 40, 37, 3),
        "several tiles": (40, 2, 3, 16, 16, 3),
        "other ranks": (12, 3, 6, 16, 16, 3),
    }.items():
        g = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, size, generator=g)
        weight = torch.randn(held, outputs, size, generator=g)
        router = torch.rand(tokens, top_k, generator=g) + 0.1
        favour = torch.rand(tokens, num_experts, generator=g)
        chosen = favour.topk(top_k).indices
        chosen = torch.where(chosen < held, chosen, -1)
        pairs, tile_experts, _ = align_in_python(chosen, held, 16)
        if (chosen < 0).any():  # unused tiles with the numbers of all pairs
            old = torch.arange(3 * 16, dtype=torch.int32) % (tokens * top_k)
            pairs = torch.cat([pairs, old])
            tile_experts = torch.cat([tile_experts, tile_experts.new_tensor([-1] * 3)])
        want = torch.zeros(tokens * top_k, outputs, dtype=torch.float64)
        for pair, expert in enumerate(chosen.flatten().tolist()):
            if expert >= 0:
                scale = router.flatten()[pair].double()
                want[pair] = scale * (weight[expert].double() @ x[pair // top_k].double())
        inputs = (x, weight, pairs, tile_experts, router)
        got = implementation(*(tensor.clone() for tensor in inputs))
        assert isinstance(got, Tensor) and got.dtype == torch.float32, f"{name}: no float32"
        assert got.shape == want.shape, f"{name}: shape {list(got.shape)}"
        error = (got.double() - want).abs()
        worst = error.nan_to_num(torch.inf).max()
        assert worst <= 1e-3 * want.abs().max(), f"{name}: off by {worst:.3g}"
    # END
