"""A draft model that guesses K tokens in one pass: PARD.

    draft = load_parallel("models/tiny-pard")
    generate(model, prompts, 32, draft=draft.model, new_drafter=draft.drafter)     # lesson 16's

The pass reads the text and then K - 1 *masks*, all of them one token that no text has. The newest
token predicts what follows it, as in any model. Each mask predicts what follows its own place,
although neither it nor the masks before it say what was guessed there. The model is an ordinary
one that was trained on with masks (models/train_pard.py), so nothing in its layers is new.

Read `place_logits`, the definition, then `MaskDrafter`, which does the same with a cache.

Sources: An et al. 2025, PARD (arXiv 2504.18583), section 3; vLLM, `parallel_drafting`
of speculative_config and `pard_token` of the draft's config.json.
"""

import os
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import Request
from lessons.l16_speculative_sampling.drafts import Drafts, ModelDrafter
from lessons.l17_tree_speculation.naive import run_alone
from lessons.toolbox.model.arguments import is_whole, shown
from lessons.toolbox.model.checkpoint import SMALL_FILES, find_folder
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError, read_json


def place_logits(draft: Decoder, text: list[int], count: int, mask_token: int) -> Tensor:
    """What the draft says of the next `count` places, without a cache: [count, V]."""
    masks = [mask_token] * (count - 1)
    hidden = run_alone(draft, text + masks)
    return draft.logits(hidden[-count:])


class MaskDrafter(ModelDrafter):
    """Lesson 16's drafter, with one pass of the draft instead of K."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        max_context_len: int,
        *,
        mask_token: int,
    ):
        super().__init__(model, num_blocks, block_size, max_context_len)
        self.mask_token = mask_token
        self.places: dict[int, Tensor] = {}  # of this step's requests: [count, V]

    def propose(self, requests: list[Request], counts: list[int]) -> Drafts:
        """One pass for all places of all requests. Then tokens are drawn as from a chain."""
        new, rows = {}, {}
        for request, count in zip(requests, counts):
            if count > 0:
                # what was accepted since, the newest token, and a mask for each further guess
                new[request.row] = self.lacking(request, []) + [self.mask_token] * (count - 1)
                rows[request.row] = count
        if new:
            logits = self.runner.run_rows(new, rows)
            self.places = dict(zip(rows, logits.split(list(rows.values()))))
        for request in requests:
            if request.row in new:
                # K and V of masks are not those of the tokens that come in their places.
                self.runner.rewind(request.row, len(request.tokens))
        return super().propose(requests, counts)

    def next_logits(self, requests: list[Request], drafted: list[list[int]]) -> Tensor:
        """The rows of the pass: a place does not know the tokens that were drawn before it."""
        rows = [self.places[r.row][len(tokens)] for r, tokens in zip(requests, drafted)]
        return torch.stack(rows)


class ParallelDraft(NamedTuple):
    """A draft model and its mask."""

    model: Decoder
    mask_token: int

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def drafter(self) -> partial:
        """What lesson 16's `generate` makes its drafter with."""
        return partial(MaskDrafter, mask_token=self.mask_token)


def load_parallel(name_or_path: str | os.PathLike, **options) -> ParallelDraft:
    """A draft from a folder or hub name. options: of Decoder.from_pretrained. Raises
    CheckpointError, one line, for a model without a mask.
    """
    mask_token = read_mask_token(name_or_path)
    return ParallelDraft(Decoder.from_pretrained(name_or_path, **options), mask_token)


def read_mask_token(name_or_path: str | os.PathLike) -> int:
    """`pard_token` of config.json. Raises CheckpointError, one line, if it is no token."""
    config = read_json(find_folder(name_or_path, SMALL_FILES) / "config.json")
    token, size = config.get("pard_token"), config["vocab_size"]
    if not is_whole(token, 0) or token >= size:
        raise CheckpointError(
            f"{name_or_path}: got pard_token {shown(token)} in config.json; accepted: the token "
            f"of the masks, below {size}, which a draft trained for parallel drafting has"
        )
    return token
