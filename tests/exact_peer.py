"""transformers' Qwen3-Next in float64, also where its code says float32: in its norms, its router
and its delta rule.

A random model of that family grows an error of float32 by 10⁴, because the norm after a state makes
small outputs as large as others. In float64 the two sides differ by about 1e-12, so a slip that
changes little is seen too.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

FLOAT = Tensor.float


class WideTorch:
    """The module torch, in which float32 is float64."""

    def __getattr__(self, name: str):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


class Rotary(modeling.Qwen3NextRotaryEmbedding):
    """Its angles in float32, as all of ours are."""

    def forward(self, x, position_ids):
        with patch.object(Tensor, "float", FLOAT), patch.object(modeling, "torch", torch):
            return super().forward(x, position_ids)


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside it the family's code computes in float64."""
    with (
        patch.object(modeling, "torch", WideTorch()),
        patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """A Qwen3-Next of transformers, its weights in float64, in place."""
    model.double().model.rotary_emb.__class__ = Rotary
    return model


@torch.no_grad()
def exact_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The logits of a widened model after each of the tokens: [T] -> [T, V] float64."""
    with in_float64():
        return model(tokens[None]).logits[0]
