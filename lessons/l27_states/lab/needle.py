"""What a state still knows, counted on random keys and values: where each rule forgets.

    python -m lessons.l27_states.lab.needle

No model is trained here. A pair is a random key of length 1 and a random code of ±1; the state is
asked for a key, and the answer is right if, of all codes, the right one is the most similar.
"""

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lessons.l27_states.chunks import decayed_linear_attention_chunked, gated_delta_rule_chunked

KEY_DIM = VALUE_DIM = 64
HEADS = 64  # states of the same kind, for the mean
DECAY = 0.99
WRITES = (16, 32, 64, 128, 256, 512)
FEW_KEYS = 16


class Rule(NamedTuple):
    """Whether it fades, and whether it writes what is missing instead of the value."""

    fades: bool
    replaces: bool


RULES = {
    "sum": Rule(False, False),
    "decay": Rule(True, False),
    "delta rule": Rule(False, True),
    "both": Rule(True, True),
}


def state_of(rule: Rule, k: Tensor, v: Tensor) -> Tensor:
    """After all pairs. k: [T, H, Dk], v: [T, H, Dv] -> [H, Dk, Dv]."""
    log_decay = torch.full(k.shape[:2], math.log(DECAY) if rule.fades else 0.0)
    if rule.replaces:
        return gated_delta_rule_chunked(k, k, v, log_decay, torch.ones(k.shape[:2]))[1]
    return decayed_linear_attention_chunked(k, k, v, log_decay)[1]


def is_right(state: Tensor, k: Tensor, v: Tensor, candidates: Tensor) -> Tensor:
    """Which of the pairs are read right. state: [H, Dk, Dv], k, v: [pairs, H, D], candidates:
    [codes, H, Dv], of which v are the first -> [pairs, H] bool.
    """
    read = torch.einsum("hkv,nhk->nhv", state, k)
    similar = torch.einsum("nhv,mhv->nhm", read, candidates)
    return similar.argmax(-1) == torch.arange(len(v))[:, None]


def different_keys(rule: Rule, writes: int, seed: int = 0) -> Tensor:
    """The share of pairs that are read right after so many with different keys, by their age, the
    oldest first: [writes].
    """
    drawn = torch.Generator().manual_seed(seed)
    k, v = pairs(writes, drawn)
    return is_right(state_of(rule, k, v), k, v, v).float().mean(1)


def same_keys(rule: Rule, writes: int, seed: int = 0) -> float:
    """The share of FEW_KEYS keys that are read right, each by its newest value, after they were
    written in turns, with a new value each time.
    """
    drawn = torch.Generator().manual_seed(seed)
    k, _ = pairs(FEW_KEYS, drawn)
    _, v = pairs(writes, drawn)
    k = k.repeat(math.ceil(writes / FEW_KEYS), 1, 1)[:writes]
    newest = list(range(writes - FEW_KEYS, writes))
    others = list(range(writes - FEW_KEYS))
    found = is_right(state_of(rule, k, v), k[newest], v[newest], v[newest + others])
    return float(found.float().mean())


def pairs(count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys: [count, H, Dk], codes: [count, H, Dv]."""
    k = normalize(torch.randn(count, HEADS, KEY_DIM, generator=drawn), dim=-1)
    v = torch.randint(0, 2, (count, HEADS, VALUE_DIM), generator=drawn) * 2.0 - 1
    return k, v


def main() -> int:
    """Print both tables."""
    print(f"states of {KEY_DIM} x {VALUE_DIM}, decay {DECAY}; read right, in percent, after writes")
    print(f"{'':24}" + "".join(f"{writes:>6}" for writes in WRITES))
    for name, rule in RULES.items():
        shares = (float(different_keys(rule, writes).mean()) for writes in WRITES)
        print(f"different keys, {name:8}" + "".join(f"{100 * share:>6.0f}" for share in shares))
    for name, rule in RULES.items():
        shares = (same_keys(rule, writes) for writes in WRITES)
        print(f"{FEW_KEYS} keys again, {name:8}" + "".join(f"{100 * x:>6.0f}" for x in shares))
    return 0


if __name__ == "__main__":
    sys.exit(main())
