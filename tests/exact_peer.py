"""transformers' hybrids in float64, also where their code says float32: in norms, routers and the
delta rule.

A random Qwen3-Next grows an error of float32 by 10⁴, because the norm after a state makes small
outputs as large as others. In float64 the two sides differ by about 1e-12, so a slip that changes
little is seen too.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

FAMILIES = ("qwen3_next", "lfm2", "granitemoehybrid", "bamba", "nemotron_h", "llama4_text")
FLOAT = Tensor.float


class WideTorch:
    """The module torch, in which float32 is float64."""

    def __getattr__(self, name: str):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


class TorchOfAngles:
    """The module torch, whose `polar` rounds cosines and sines as `cos` and `sin` do."""

    def __getattr__(self, name: str):
        return by_parts if name == "polar" else getattr(torch, name)


def by_parts(size: Tensor, angle: Tensor) -> Tensor:
    """torch.polar: two tensors of one shape -> complex of the same."""
    return torch.complex(size * angle.cos(), size * angle.sin())


def modeling_of(model: PreTrainedModel) -> ModuleType:
    """The module of transformers that has the family's code."""
    return sys.modules[type(model).__module__]


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Inside it the family's code, and what it borrows of other families, computes in float64."""
    names = {type(part).__module__ for part in model.modules()}
    with ExitStack() as patches:
        for name in names:
            if name.startswith("transformers.models."):
                patches.enter_context(patch.object(sys.modules[name], "torch", WideTorch()))
        patches.enter_context(patch.object(Tensor, "float", Tensor.double))
        yield


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """A model of transformers, its weights in float64, in place; its angles stay in float32, as all
    of ours are.
    """
    rotary, modeling = getattr(model.double().model, "rotary_emb", None), modeling_of(model)
    if rotary is None:
        return model
    turn = rotary.forward

    def in_float32(*args, **named):
        with patch.object(Tensor, "float", FLOAT), patch.object(modeling, "torch", TorchOfAngles()):
            return turn(*args, **named)

    rotary.forward = in_float32
    return model


@torch.no_grad()
def exact_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The logits of a widened model after each of the tokens: [T] -> [T, V] float64."""
    with in_float64(model):
        return model(tokens[None]).logits[0]
