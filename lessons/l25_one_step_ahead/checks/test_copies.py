"""What is sent to a device is sent whole. A meta device, which holds no values, takes the place of
a GPU.
"""

from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import new_batch
from lessons.l15_chunked_prefill.lab.virtual import new_request
from lessons.l25_one_step_ahead.model_device import Drawn, new_sampling_batch, send, sent

META, CPU = torch.device("meta"), torch.device("cpu")
PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=1),
    SamplingParams(temperature=0, seed=2),
    SamplingParams(temperature=1.0, top_k=5, seed=3),
]


def tensors_in(value) -> list[Tensor]:
    """All tensors of a dataclass, also within its lists and its own dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_in(part)]
    if not is_dataclass(value):
        return []
    return [t for field in fields(value) for t in tensors_in(getattr(value, field.name))]


def sampling_batch_on(device: torch.device):
    sequences = [new_request(row, [row, 2, 3], 9) for row in range(3)]
    for sequence, params in zip(sequences, PARAMS):
        sequence.sampling = params
    return new_sampling_batch(sequences, device)


@pytest.mark.parametrize(
    "made",
    [
        lambda device: sampling_batch_on(device),
        lambda device: sent(new_batch([([5], 7), ([1, 2], 0)], 4, CPU, [[3, 1], [2]]), device),
    ],
    ids=["sampling", "batch"],
)
def test_every_tensor_of_a_batch_is_sent(made):
    here, there = tensors_in(made(CPU)), tensors_in(made(META))
    assert len(here) == len(there) > 5
    for mine, other in zip(here, there):
        assert (mine.shape, mine.dtype, other.device) == (other.shape, other.dtype, META)


def test_nothing_is_copied_on_a_cpu():
    batch = new_batch([([5], 7)], 4, CPU, [[3, 1]])
    assert sent(batch, CPU) is batch
    assert send([4, 2], CPU).tolist() == [4, 2] and send([], CPU).dtype == torch.int64


def test_tokens_are_read_and_bad_logits_named():
    assert Drawn.of(torch.tensor([7, 9])).read() == [7, 9]
    with pytest.raises(ValueError, match="row 1 is not finite"):
        Drawn.of(torch.tensor([7, -1])).read()
