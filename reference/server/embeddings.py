"""A vector for a text: the mean of the model's last hidden states, made to length 1.

The embedded model was trained to predict the next token and not to compare texts, so its vectors
tell less than those of a model that was trained for it. What the endpoint shows is the interface.
"""

import base64
import struct

import torch

from lessons.toolbox.model.placement import launching_on
from reference.engine.engine import Engine


@torch.inference_mode()
def embed(engine: Engine, ids: list[int]) -> list[float]:
    """The vector of one text, of the model's hidden_size. It needs no cache, because nothing
    follows.
    """
    from reference.features.states.generate import whole_sequence  # here: few requests ask for it

    model = engine.runner.model
    tokens = torch.tensor(ids, device=model.device)
    with launching_on(model.device):
        hidden = model(tokens, whole_sequence(model, len(ids))).double().mean(0)
    return (hidden / hidden.norm().clamp(min=1e-12)).tolist()


def as_base64(vector: list[float]) -> str:
    """float32 in little-endian order, as the OpenAI API sends it."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
