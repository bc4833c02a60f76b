"""How much work an answer is with and without a cache: tokens through the weights, and pairs of a
query and a key through attention. Counted, not timed.
"""

from math import comb

from lessons.l01_roofline.calculators import attention_flops
from lessons.l01_roofline.planner.models import ModelShape


def tokens_run(prompt: int, answer: int, cached: bool) -> int:
    """Tokens that pass through the model. prompt, answer: tokens, each 1 or more."""
    held = prompt + answer - 1  # nothing is computed from the last token
    if cached:
        return held
    return comb(held + 1, 2) - comb(prompt, 2)  # prompt + (prompt + 1) + ... + held


def pairs_run(prompt: int, answer: int, cached: bool) -> int:
    """(query, key) pairs that one head of one layer computes under a causal mask."""
    held = prompt + answer - 1
    if cached:
        return comb(held + 1, 2)  # each token meets itself and all before it, once
    return comb(held + 2, 3) - comb(prompt + 1, 3)  # each pass meets all pairs again


def flops(model: ModelShape, prompt: int, answer: int, cached: bool) -> tuple[float, float]:
    """FLOPs of the layers' weights, and of attention. The output head is left out."""
    weights = 2 * model.layer_params(model.num_experts_per_tok)
    pairs = pairs_run(prompt, answer, cached)
    return weights * tokens_run(prompt, answer, cached), attention_flops(model, pairs)
