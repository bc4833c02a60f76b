"""What the 32 lanes of a warp hold while `warp_merge` of optimized.cu runs, as tensors: a picture
that can be tested.

A GPU runs the lanes at the same time and keeps m and l in a register of each; here a register is a
tensor, one number a lane.

Source: CUDA C++ Programming Guide, section "Warp Shuffle Functions" (__shfl_xor_sync).
"""

import torch
from torch import Tensor

LANES = 32
DISTANCES = (16, 8, 4, 2, 1)


def shfl_xor(register: Tensor, distance: int) -> Tensor:
    """Each lane reads the register of the lane whose number differs in the bit `distance`.
    register: [32] -> [32].
    """
    return register[torch.arange(LANES) ^ distance]


def butterfly(m: Tensor, l: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(m, l) of all lanes before the first round and after each of the five. m, l: [32] float32, m
    finite or lowest.
    """
    rounds = [(m, l)]
    for distance in DISTANCES:
        other_m, other_l = shfl_xor(m, distance), shfl_xor(l, distance)
        m_new = torch.maximum(m, other_m)
        m, l = m_new, l * torch.exp(m - m_new) + other_l * torch.exp(other_m - m_new)
        rounds.append((m, l))
    return rounds


def heard_of(lane: int, rounds: int) -> list[int]:
    """The lanes whose numbers are in `lane` after so many rounds: twice as many each time."""
    lanes = {lane}
    for distance in DISTANCES[:rounds]:
        lanes |= {other ^ distance for other in lanes}
    return sorted(lanes)
