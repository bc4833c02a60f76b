"""The two phases of serving, measured on a real model with a well-known library: TTFT is
prefill, TPOT is decode.

The model is a black box here (transformers' own); lesson 2 opens it.
"""

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.model.checkpoint import find_folder


class ServingTimes(NamedTuple):
    """ttft_ms: from the call to the first token on the host (no queue in front of it); tpot_ms:
    each further token, [N - 1].
    """

    ttft_ms: float
    tpot_ms: list[float]
    tokens: list[int]


def load_model(name_or_path: str = "models/tiny"):
    """A checkpoint as transformers' own model, on this machine's device and dtype. Raises
    CheckpointError if there is none.
    """
    # Imported here, because it takes seconds that the calculators need not pay.
    from transformers import AutoModelForCausalLM

    folder = find_folder(name_or_path, ["config.json", "generation_config.json", "*.safetensors*"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=default_dtype())
    return model.to(default_device()).eval()


@torch.inference_mode()
def serving_times(
    model, prompt: Tensor, new_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> ServingTimes:
    """Greedy generation with a KV cache, each token timed when the host holds it.

    model: a causal language model of transformers; prompt: [T] int64; new_tokens: 2 or more; clock:
    seconds.
    """
    if new_tokens < 2 or prompt.ndim != 1 or not len(prompt):
        raise ValueError(
            f"prompt is {list(prompt.shape)}, new_tokens is {new_tokens}; accepted: [T] with T "
            f"above 0, 2 or more"
        )
    tokens, at = [], [clock()]
    step, cache = prompt[None].to(model.device), None
    for _ in range(new_tokens):
        # logits_to_keep: the output head runs for the last token alone.
        out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        step, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        # .item() waits for the device, so this stopwatch is honest.
        tokens.append(step.item())
        at.append(clock())
    steps_ms = [(end - start) * 1e3 for start, end in itertools.pairwise(at)]
    return ServingTimes(steps_ms[0], steps_ms[1:], tokens)
