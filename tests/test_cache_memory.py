"""How many blocks the cache gets: the arithmetic on a GPU whose memory is made up, and what is said
when it is too small.
"""

import pytest
import torch

from lessons.toolbox.measure.device import default_device
from reference import LLM
from reference.engine import cache_memory
from reference.engine.cache_memory import blocks_that_fit, memory_left, run_largest_step
from reference.engine.engine_args import EngineArgs
from tests.engine_cases import CONFIG, new_model

TOTAL, OTHERS, WEIGHTS = 1_000_000, 50_000, 200_000
KERNELS = 7_000  # loaded by the first step, and not by PyTorch's allocator
STEP = 100_000  # that a step allocates and gives back
CACHE = 60_000  # that the measured step allocates for its own cache, and gives back
KEPT = 3_000  # that it allocates and keeps, as a workspace


class MadeUpGPU:
    """torch.cuda of a GPU with TOTAL bytes. What is given back stays in the allocator's cache."""

    def __init__(self):
        self.others, self.allocated, self.cached = OTHERS, WEIGHTS, 30_000
        self.peak = 900_000  # while the weights were loaded
        self.has_run = False

    def step(self, cache: int = CACHE) -> int:
        """The first loads kernels and makes a workspace; all of them need STEP bytes meanwhile, and
        a cache unless there is one.
        """
        self.cached = 0  # it is used again
        if not self.has_run:
            self.allocated, self.others = self.allocated + KEPT, self.others + KERNELS
        if self.free < STEP + cache:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate ...")
        self.has_run = True
        self.peak = max(self.peak, self.allocated + STEP + cache)
        self.cached = STEP + cache
        return cache

    @property
    def free(self) -> int:
        return TOTAL - self.others - self.allocated - self.cached

    def reset_peak_memory_stats(self, device):
        self.peak = self.allocated

    def memory_allocated(self, device):
        return self.allocated

    def max_memory_allocated(self, device):
        return self.peak

    def empty_cache(self):
        self.cached = 0

    def synchronize(self, device):
        pass

    def mem_get_info(self, device):
        return self.free, TOTAL


@pytest.fixture
def gpu(monkeypatch):
    gpu = MadeUpGPU()
    for name in vars(MadeUpGPU):
        if hasattr(torch.cuda, name) and not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    return gpu


@pytest.mark.parametrize("share", [0.9, 0.5, 1])
def test_the_cache_gets_what_the_largest_step_leaves(gpu, share):
    args = EngineArgs(gpu_memory_utilization=share)
    left = memory_left(args, torch.device("cuda"), gpu.step)
    used = OTHERS + KERNELS + WEIGHTS + KEPT + STEP
    assert left == pytest.approx(share * TOTAL - used)
    gpu.allocated += int(left)
    gpu.step(cache=0)  # which still fits beside the cache
    if share == 1:
        assert gpu.free == 0, "and leaves nothing unused"


def test_a_step_that_does_not_fit_is_said_in_one_line(gpu):
    gpu.allocated = TOTAL - OTHERS - STEP
    with pytest.raises(ValueError) as error:
        memory_left(EngineArgs(max_num_batched_tokens=4096), torch.device("cuda"), gpu.step)
    said = str(error.value)
    assert (
        said.startswith("max_num_batched_tokens: got 4096; accepted: fewer, or")
        and "\n" not in said
    )


@pytest.mark.parametrize(
    "max_num_seqs, tokens, max_model_len, counts",
    [
        (4, 20, 64, [5, 5, 5, 5]),
        (3, 20, 64, [7, 7, 6]),
        (8, 8, 64, [1] * 8),
        (2, 100, 30, [30, 30]),  # no sequence is longer than the model
    ],
)
def test_the_largest_step(monkeypatch, max_num_seqs, tokens, max_model_len, counts):
    """All tokens of the budget, at the ends of sequences as long as may be, and all of them
    sampled.
    """
    seen, step_batch = [], cache_memory.step_batch

    def noted(pool, chunks, tables):
        seen.append(chunks)
        return step_batch(pool, chunks, tables)

    monkeypatch.setattr(cache_memory, "step_batch", noted)
    args = EngineArgs(max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens, block_size=4)
    held = run_largest_step(args, new_model().to(default_device()), max_model_len)
    assert held >= CONFIG.kv_bytes_per_token(4) * max_model_len
    [chunks] = seen
    assert [len(new) for new, _ in chunks] == counts
    assert {len(new) + held for new, held in chunks} == {max_model_len}


BLOCK_BYTES = 4 * CONFIG.kv_bytes_per_token(4)


@pytest.mark.parametrize("blocks, want", [(16, 16), (16.9, 16), (31, 31), (1000, 2 * 16)])
def test_as_many_blocks_as_fit_and_as_are_of_use(monkeypatch, blocks, want):
    monkeypatch.setattr(cache_memory, "cache_memory", lambda *_: blocks * BLOCK_BYTES)
    args = EngineArgs(max_num_seqs=2, block_size=4)
    assert blocks_that_fit(args, new_model(), 64) == want


@pytest.mark.parametrize("blocks, most", [(15.9, 60), (0.5, 0), (-3, 0)])
def test_a_cache_for_not_one_request_is_said_in_one_line(monkeypatch, blocks, most):
    monkeypatch.setattr(cache_memory, "cache_memory", lambda *_: blocks * BLOCK_BYTES)
    with pytest.raises(ValueError) as error:
        blocks_that_fit(EngineArgs(block_size=4), new_model(), 64)
    said = str(error.value)
    assert said.startswith(f"max_model_len: got 64; accepted: at most {most}, the tokens that")
    assert "gpu_memory_utilization" in said and "\n" not in said


def test_the_engine_says_it_too():
    with pytest.raises(ValueError, match="max_model_len: got 2048; accepted: at most"):
        LLM(kv_cache_memory_bytes=100_000, device="cpu")
    small = LLM(kv_cache_memory_bytes=100_000, max_model_len=16, device="cpu")
    assert small.engine.scheduler.blocks.num_blocks == 1
