"""What 16 bits do to a state: the error of what is read, after many steps each of which rounds it.

    python -m lessons.l27_states.lab.rounded        the table of MORE.md, on a CPU

The steps are stand_ins.py's over slots of a dtype, the truth is naive.py's in float64. Keys have
length 1, as in Qwen3-Next; in each step all heads fade by `kept`. An error is relative, over the
last LAST tokens.
"""

import sys

import torch
from torch import Tensor

from lessons.l27_states import naive
from lessons.l27_states.stand_ins import decayed_step, gated_delta_step

HEADS, DIM, LAST = 4, 64, 32
LENGTHS = (64, 512, 2048)  # tokens
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KEPT = {
    "delta rule, exp(g) = 1": 1.0,
    "delta rule, exp(g) = 0.99": 0.99,
    "sum, exp(g) = 0.99": 0.99,
}


def new_inputs(tokens: int, kept: float) -> tuple[Tensor, ...]:
    """q, k, v: [T, H, D], log_decay, beta: [T, H], float32. kept: exp(g), of all tokens."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, tokens, HEADS, DIM, generator=draw)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    log_decay = torch.full((tokens, HEADS), kept).log()
    return q, k, v, log_decay, torch.rand(tokens, HEADS, generator=draw)


def stepped(inputs: tuple[Tensor, ...], has_delta: bool, dtype: torch.dtype) -> Tensor:
    """Token by token over a state in one slot of this dtype: [T, H, D] float32. inputs:
    new_inputs'.
    """
    states, slots = torch.zeros(1, HEADS, DIM, DIM, dtype=dtype), torch.tensor([0])
    step, used = (gated_delta_step, inputs) if has_delta else (decayed_step, inputs[:-1])
    return torch.cat([step(*(x[None] for x in each), states, slots) for each in zip(*used)])


def exact(inputs: tuple[Tensor, ...], has_delta: bool) -> Tensor:
    """The same in float64. inputs: new_inputs' -> [T, H, D]."""
    doubles = [x.double() for x in inputs]
    if has_delta:
        return naive.gated_delta_rule(*doubles)[0]
    return naive.decayed_linear_attention(*doubles[:-1])[0]


def errors(name: str, lengths: tuple[int, ...] = LENGTHS) -> dict[torch.dtype, list[float]]:
    """{dtype of the state: the error after each of `lengths`}. name: one of KEPT."""
    has_delta, inputs = name.startswith("delta"), new_inputs(max(lengths), KEPT[name])
    truth, found = exact(inputs, has_delta), {}
    for dtype in DTYPES:
        off = stepped(inputs, has_delta, dtype) - truth
        parts = [slice(length - LAST, length) for length in lengths]
        found[dtype] = [float(off[part].norm() / truth[part].norm()) for part in parts]
    return found


def main() -> int:
    """Print the table."""
    print("| | state | " + " | ".join(f"after {length:,} tokens" for length in LENGTHS) + " |")
    print("|---" * (2 + len(LENGTHS)) + "|")
    for name in KEPT:
        for dtype, off in errors(name).items():
            cells = " | ".join(f"{x:.1g}" for x in off)
            print(f"| {name} | {str(dtype).removeprefix('torch.')} | {cells} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
