"""Arguments with which a kernel would read foreign memory, or give up a gradient without a word:
each is refused in one line that names the argument, the value and what is accepted.
"""

from dataclasses import replace

import pytest
import torch

from lessons.l09_flash_attention.optimized import flash_attention
from lessons.l12_paged_kv.lab.testing import PagedInputs, paged
from lessons.l12_paged_kv.optimized import paged_decode, paged_prefill
from lessons.l17_tree_speculation.lab.testing import BRANCHES, tree_inputs
from lessons.l17_tree_speculation.optimized import tree_attention
from lessons.l18_weight_quantization.naive import round_to_nearest
from lessons.l18_weight_quantization.optimized import matmul
from lessons.l19_kv_quantization.formats import Int8
from lessons.l19_kv_quantization.lab.testing import coded
from lessons.l19_kv_quantization.optimized import quantized_decode, quantized_prefill
from lessons.l21_multi_lora import optimized as adapters
from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.kernels import stand_ins
from lessons.l21_multi_lora.lab.testing import DEVICE, slots_of

on_a_cpu = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: on a GPU these values are not read"
)


def refuses(call, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        call()
    assert said in str(refused.value) and "\n" not in str(refused.value)


def spoilt(kind: str, inputs: PagedInputs) -> tuple[PagedInputs, str]:
    """Inputs with one wrong value, and what the message says of it."""
    table, starts = inputs.block_table.clone(), inputs.cu_seqlens_q.clone()
    lengths = inputs.context_lens.clone()
    if kind == "a block that is not there":
        table[1, 0] = len(inputs.k_cache)
        said = f"to {len(inputs.k_cache)}; accepted: 0 to {len(inputs.k_cache) - 1}"
    elif kind == "a context longer than its table":
        lengths[0] = table.shape[1] * inputs.k_cache.shape[1] + 1
        said = "context_lens: got values"
    elif kind == "a negative context":
        lengths[0], said = -1, "context_lens: got values from -1"
    elif kind == "sequences beyond q":
        starts[-1] += 1
        said = "cu_seqlens_q: got"
    else:
        starts[1], said = starts[2] + 1, "cu_seqlens_q: got"
    return inputs._replace(block_table=table, cu_seqlens_q=starts, context_lens=lengths), said


PLACES = ("a block that is not there", "a context longer than its table", "a negative context")
STARTS = ("sequences beyond q", "sequences out of order")


@on_a_cpu
@pytest.mark.parametrize("kind", PLACES)
def test_places_that_are_not_there(kind):
    good = paged([7, 9], block_size=4)
    paged_decode(*good.decode)
    inputs, said = spoilt(kind, good)
    refuses(lambda: paged_decode(*inputs.decode), said)
    codes = coded(Int8(), inputs)
    refuses(lambda: quantized_decode(*codes.decode, Int8()), said)


@on_a_cpu
@pytest.mark.parametrize("kind", [*PLACES, *STARTS])
def test_prompts_that_are_not_there(kind):
    good = paged([7, 9], [7, 3], block_size=4)
    paged_prefill(*good)
    inputs, said = spoilt(kind, good)
    refuses(lambda: paged_prefill(*inputs), said)
    refuses(lambda: quantized_prefill(*coded(Int8(), inputs), Int8()), said)


@on_a_cpu
@pytest.mark.parametrize("kind", [*PLACES, *STARTS])
def test_trees_that_are_not_there(kind):
    good, tree = tree_inputs([BRANCHES, None], [6, 4], [9, 8], block_size=4)
    tree_attention(*good, tree)
    inputs, said = spoilt(kind, good)
    refuses(lambda: tree_attention(*inputs, tree), said)


@pytest.mark.parametrize("add_lora", [adapters.add_lora, stand_ins.add_lora])
@pytest.mark.parametrize("slot", [2, 5, -2])
def test_a_slot_that_is_not_there(add_lora, slot):
    weights = slots_of([4, 8], 8, 32, 48)
    x, out = torch.randn(3, 32, device=DEVICE), torch.zeros(3, 48, device=DEVICE)
    add_lora(out, x, weights, AdapterBatch.of([0, -1, 1], DEVICE))
    batch = AdapterBatch.of([0, -1, slot], DEVICE)
    refuses(lambda: add_lora(out, x, weights, batch), f"batch: got slot {slot}; accepted: -1")


@pytest.mark.parametrize("name", ["scales", "zeros"])
def test_scales_of_another_shape(name):
    weight = round_to_nearest(torch.randn(8, 64), bits=4, group_size=32, symmetric=False)
    x = torch.randn(2, 64)
    matmul(x, weight)
    wrong = replace(weight, **{name: getattr(weight, name)[:, :1].contiguous()})
    refuses(lambda: matmul(x, wrong), f"{name}: got (8, 1); accepted: (8, 2)")


def test_a_gradient_that_is_not_there():
    q, k, v = (torch.randn(5, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    refuses(lambda: flash_attention(q, k, v), "q, k, v: got tensors that require grad")
    with torch.no_grad():
        assert flash_attention(q, k, v)[0].isfinite().all()
