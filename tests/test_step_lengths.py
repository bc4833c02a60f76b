"""A step asks its device for no length: Python put it together, so it knows all of them. On the
meta device tensors have no values, and whatever would read one raises.
"""

from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import Batch, new_batch, sequences
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH
from lessons.l12_paged_kv.lab.testing import new_deepseek
from lessons.l12_paged_kv.runner import new_pool, paged_rung_of
from lessons.l20_parallelism.processes.group import Group
from lessons.toolbox.proof.planted import with_bug
from reference.parallel import shared_tokens
from reference.parallel.shared_tokens import StepShare, TokenShare, over_whole_blocks

BLOCK = 4
# new tokens, tokens held: two single queries in front of prompts
STEPS = {
    "one prompt": [(1, 8), (1, 5), (6, 0)],
    "a chunk": [(1, 30), (3, 9)],
    "prompts": [(1, 2), (5, 0), (2, 11), (1, 6)],
    "prompts alone": [(5, 3), (4, 0)],
    "one sequence": [(3, 6)],
    "single queries": [(1, 3), (1, 9)],
}


def step_of(name: str, device: str) -> Batch:
    """A step as on a GPU: without the list of work of PyTorch's operations."""
    chunks = [([1] * new, held) for new, held in STEPS[name]]
    tables, free = [], iter(range(64))
    for new, held in STEPS[name]:
        tables.append([next(free) for _ in range(-(-(new + held) // BLOCK))])
    return new_batch(chunks, BLOCK, device, tables)


def parts_of(batch: Batch) -> list[Batch]:
    return list(batch.in_two) if batch.num_decodes else [batch]


@pytest.mark.parametrize("name", STEPS)
def test_lengths_are_those_on_the_device(name):
    """Of the step, and of both parts of it; and so is the longest of each."""
    batch = step_of(name, "cpu")
    for part in [batch, *parts_of(batch)]:
        read = list(sequences(replace(part, lengths=None)))
        assert list(sequences(part)) == read
        assert part.max_context_len == int(part.context_lens.max())
        assert sum(rows.stop - rows.start for rows, _ in read) == int(part.cu_seqlens_q[-1])


@pytest.mark.parametrize("name", STEPS)
def test_no_length_is_read(name):
    """By a part's sequences, or where ranks share tokens, by the blocks that they send."""
    batch = step_of(name, "meta")
    for part in parts_of(batch):
        list(sequences(part))
        over_whole_blocks(part, BLOCK, 2)
    for find in (sequences, lambda part: over_whole_blocks(part, BLOCK, 2)):
        with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
            list(find(replace(batch, lengths=None)))


def lengths_left_out(self: Batch) -> tuple[Batch, Batch]:
    """Batch.in_two as it would be if it forgot what Python knows."""
    front, rest = parts(self)
    return replace(front, lengths=None), replace(rest, lengths=None)


parts = Batch.in_two.func


def attend_to_nothing(q, k_cache, v_cache, batch, softmax_scale, window):
    """In the place of a kernel for single queries, which meta tensors have none of."""
    return q.new_empty(*q.shape[:2], v_cache.shape[-1])


def run_on_meta(model: Decoder, name: str) -> None:
    """A step of the model over a pool, both without values."""
    rung = paged_rung_of(model)
    model = rung.prepare(model.to("meta"))
    pool = new_pool(model, 64, BLOCK, 64, rung)
    pool.ops = pool.ops._replace(decode=attend_to_nothing)
    batch = step_of(name, "meta")
    model.logits(model(batch.tokens, pool.attending(batch)))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_over_latents_reads_nothing(name, monkeypatch):
    """Whose prompts are expanded one sequence after the other, in each layer."""
    run_on_meta(new_deepseek(), name)
    if step_of(name, "meta").num_decodes:
        monkeypatch.setattr(Batch, "in_two", property(lengths_left_out))
        with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
            run_on_meta(new_deepseek(), name)


# ---------------------------------------------------------------- single queries of shards


def decode_on_meta(module, window: int | None) -> None:
    """Single queries over tokens that shards share, with sinks, as a CUDA graph records them."""
    share = TokenShare(Group.alone())
    batch = step_of("single queries", "meta")
    batch = replace(batch, share=StepShare(share.own_lens(batch.context_lens)), lengths=None)
    q, cache = torch.empty(2, 4, 8, device="meta"), torch.empty(64, BLOCK, 1, 8, device="meta")
    ops = module.sharing(LESSON_12_TORCH, share, module.torch_states, BLOCK)
    sinks = torch.empty(4, device="meta")
    assert ops.decode(q, cache, cache, batch, 0.3, window, sinks=sinks).shape == q.shape


@pytest.mark.parametrize("window", [None, 3, 6])
def test_shards_read_nothing_for_single_queries(window):
    decode_on_meta(shared_tokens, window)


def test_a_length_that_is_read_there_is_seen(tmp_path):
    wrong = "place = torch.arange(int(batch.context_lens.max() // block_size) + 1"
    right = "place = torch.arange(min(width, -(-most // block_size) + 1)"
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
        decode_on_meta(with_bug(shared_tokens, tmp_path, right, wrong), 3)
