"""The library of the benchmark: transformers with a prefix computed once.

transformers has no prefix cache that finds anything by itself. A caller who knows the common part
can compute its keys and values once and hand every request a copy of them.
"""

import copy
from collections.abc import Callable

import torch
from transformers import DynamicCache

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.lab.peers import peer_of


def with_a_copied_prefix(model: Decoder, prefix: list[int]) -> Callable[[list[int]], int]:
    """A function that returns the first token of an answer to prefix + question."""
    peer = peer_of(model)
    kept = DynamicCache(config=peer.config)
    with torch.inference_mode():
        peer(torch.tensor([prefix]), past_key_values=kept, use_cache=True, logits_to_keep=1)

    def first_token(question: list[int]) -> int:
        cache = copy.deepcopy(kept)  # because running a question makes it longer
        with torch.inference_mode():
            tokens = torch.tensor([question])
            out = peer(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    return first_token
