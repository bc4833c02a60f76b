"""Exercise 21.3, the kernel of rows with an adapter each, where lesson 21 adds adapters."""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.kernels.weights import SlotWeights


def add_lora_for(yours: Callable, original: Callable) -> Callable:
    """lora_rows in place of lesson 21's products, for models in float32."""

    def choose(device: torch.device) -> Callable:
        lesson = original(device)

        def add_lora(out: Tensor, x: Tensor, weights: SlotWeights, batch: AdapterBatch) -> Tensor:
            if x.dtype != torch.float32 or not len(x):
                return lesson(out, x, weights, batch)
            slots, (a, b, scaling, ranks) = batch.row_slots.int(), weights
            return out.copy_(yours(out, x.contiguous(), a, b, slots, ranks, scaling))

        return add_lora

    return choose
