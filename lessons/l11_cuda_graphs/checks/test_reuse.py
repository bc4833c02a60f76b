"""Proves that pool and graphs serve later calls without being captured again, that they do not
outlive their model, and that inputs reach a GPU whole.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l11_cuda_graphs import optimized
from lessons.l11_cuda_graphs.lab.testing import new_model, new_prompts
from lessons.l11_cuda_graphs.naive import LOCKSTEP
from lessons.l11_cuda_graphs.optimized import KEPT, GraphRunner, PinnedCopies, batch_buckets
from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.toolbox.proof.traps import poison_

# ---------------------------------------------------------------- captured once, used by every call


class CountedGraphs(SimulatedGraphs):
    """Counts captures."""

    captures = 0

    def capture(self, step):
        self.captures += 1
        return super().capture(step)


@pytest.fixture
def graphs(monkeypatch):
    """`optimized.generate` captures in these, as it would on a GPU."""
    counted = CountedGraphs(warm_ups=1)

    def graph_step(model, pool):
        return GraphRunner(model, pool, counted)

    monkeypatch.setattr(optimized, "graph_step", graph_step)
    return counted


def assert_right(model, lengths, max_new_tokens):
    prompts = new_prompts(*lengths)
    expected = one_at_a_time.generate(model, prompts, max_new_tokens)
    assert optimized.generate(model, prompts, max_new_tokens) == expected


def test_a_second_call_captures_nothing(graphs, seed):
    """As many requests as before or fewer, as long or shorter."""
    model = new_model()
    assert_right(model, [3, 9, 2], 5)
    assert graphs.captures == len(batch_buckets(3)) == 3
    for lengths in ([3, 9, 2], [4, 1], [9]):
        assert_right(model, lengths, 4)
    assert graphs.captures == 3
    assert_right(new_model(), [3, 9, 2], 5)  # another model has graphs of its own
    assert graphs.captures == 6


def test_a_call_that_needs_more_room_captures_anew(graphs, seed):
    model = new_model()
    assert_right(model, [3, 4], 3)
    assert_right(model, [3, 4], 9)  # longer
    assert_right(model, [3, 4, 5], 3)  # more requests
    assert graphs.captures == len(batch_buckets(2)) * 2 + len(batch_buckets(3))


def test_other_weights_in_the_same_place_need_no_capture(graphs, seed):
    model = new_model()
    assert_right(model, [3, 4], 3)
    model.load_state_dict(new_model().state_dict())
    assert_right(model, [3, 4], 3)
    assert graphs.captures == 2


def test_weights_in_another_place_are_captured_anew(graphs, seed):
    """The old graphs would go on reading the old ones."""
    model = new_model()
    assert_right(model, [3, 4], 3)
    model.lm_head = new_model().lm_head
    assert_right(model, [3, 4], 3)
    model.float().double()
    assert_right(model, [3, 4], 3)
    model.config = replace(model.config, sliding_windows=None)
    assert_right(model, [3, 4], 3)
    assert graphs.captures == 8


def test_what_an_earlier_call_left_behind_does_not_count(graphs, seed):
    model = new_model()
    assert_right(model, [3, 4], 3)
    _, setup = KEPT[model]
    with torch.inference_mode():
        poison_(setup.pool.k_slots)
        poison_(setup.pool.v_slots)
    assert_right(model, [2, 3], 3)


def test_a_call_inside_a_call_has_a_pool_of_its_own(graphs, seed):
    model, prompts, others = new_model(), new_prompts(3, 4), new_prompts(2, 5)
    assert_right(model, [6, 6], 3)
    expected = [one_at_a_time.generate(model, given, 3) for given in (prompts, others)]
    inside = []

    def on_token(row, token):
        if not inside:
            inside.append(optimized.generate(model, others, 3))

    assert optimized.generate(model, prompts, 3, on_token=on_token) == expected[0]
    assert inside == expected[1:]


def test_a_call_that_fails_leaves_nothing_behind(graphs, seed):
    model = new_model()

    def on_token(row, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimized.generate(model, new_prompts(3, 4), 3, on_token=on_token)
    assert model not in KEPT
    assert_right(model, [3, 4], 3)


@pytest.mark.parametrize("kind", [new_model, lambda: fused(new_model())], ids=["plain", "fused"])
def test_a_deleted_model_is_not_kept_alive(kind, graphs, seed):
    """Nor is its pool, even where the rung would serve the model as it is."""
    model = kind()
    optimized.generate(model, new_prompts(3, 4), 3)
    gone = [weakref.ref(model), weakref.ref(KEPT[model][1].pool)]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


# ---------------------------------------------------------------- copies through pinned memory


class LateGPU:
    """A stream, its event and a buffer: the GPU works only when somebody waits for it."""

    device = torch.device("cpu")

    def __init__(self, records=True):
        self.queue, self.marked, self.received, self.records = [], 0, [], records

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.queue.append(source)

    def record(self, stream):
        self.marked = len(self.queue) if self.records else 0

    def synchronize(self):
        self.received += [source.clone() for source in self.queue[: self.marked]]
        del self.queue[: self.marked]
        self.marked = 0


@pytest.mark.parametrize("records", [True, False])
def test_pinned_memory_waits_until_it_was_read(records, monkeypatch):
    """Five steps that the CPU has ready before the GPU begins; without the event's record four of
    them would be lost.
    """
    gpu = LateGPU(records)
    monkeypatch.setattr(torch.cuda, "Event", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty_like", lambda x, **how: torch.zeros(4, 2))
    copies = PinnedCopies({2: gpu})
    sent = [torch.full((4, 2), float(n)) for n in range(5)]
    for inputs in sent:
        copies.copy_in(inputs, 2)
    gpu.marked = len(gpu.queue)
    gpu.synchronize()
    arrived = [torch.equal(*pair) for pair in zip(gpu.received, sent)]
    assert arrived == ([True] * 5 if records else [False] * 4 + [True])


@pytest.mark.gpu
def test_a_step_is_launched_while_the_gpu_is_busy(seed):
    """The copy from pinned memory does not wait for the work before it."""
    model = new_model(torch.float32, head_dim=16, hidden_size=64).cuda()
    pool = LOCKSTEP.new_cache(model, 2, 16)
    step = optimized.graph_step(model, pool)
    inputs = torch.tensor([[5, 9], [2, 3], [2, 19], [3, 4]])
    step(inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
    step(inputs)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the CPU waited for the GPU"
    torch.cuda.synchronize()
