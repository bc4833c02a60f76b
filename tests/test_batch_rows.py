"""The rows of a sampled batch stay apart, and no step of it waits for the GPU."""

import random

import pytest
import torch

from lessons.l02_naive_attention.batched import batch_sampling
from lessons.l02_naive_attention.batched.batch_sampling import (
    SamplingBatch,
    batch_probabilities,
    read_tokens,
    sample_batch,
)
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from lessons.l11_cuda_graphs.optimized import CudaGraphs
from lessons.l11_cuda_graphs.simulator import CaptureError, SimulatedGraphs
from tests.batch_sampling_cases import KINDS, Case, random_tokens

pytestmark = pytest.mark.usefixtures("seed")


def generated(steps: list[torch.Tensor], batch: SamplingBatch) -> list[list[int]]:
    """One list of tokens a row, from one [B, V] a step."""
    tokens = []
    for logits in steps:
        sampled = sample_batch(logits, batch)
        batch.append(sampled)
        tokens.append(read_tokens(sampled))
    return [list(row) for row in zip(*tokens)]


def steps_of(case: Case, count: int) -> list[torch.Tensor]:
    return [case.logits + torch.randn_like(case.logits) for _ in range(count)]


@pytest.mark.parametrize(
    "vocab, dtype", [(7, torch.float64), (1000, torch.float32), (40000, torch.float32)]
)
def test_a_row_does_not_depend_on_the_others(vocab, dtype):
    """Alone, together, in another order, in other groups, on more threads: the same tokens."""
    case = Case(14, vocab, random.choice(KINDS))
    steps = [logits.to(dtype) for logits in steps_of(case, 3)]
    together = generated(steps, case.batch())
    order = random.sample(range(14), 14)
    shuffled = generated([logits[order] for logits in steps], case.batch().select(order))
    assert shuffled == [together[row] for row in order]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for row in range(14):
            one = [logits[row : row + 1] for logits in steps]
            assert generated(one, case.batch().select([row])) == [together[row]]
    finally:
        torch.set_num_threads(threads)


def test_after_a_preemption_a_request_goes_on():
    """A batch made anew from the outputs is the batch that was told every token."""
    case = Case(12, 300)
    steps = steps_of(case, 8)
    kept = case.batch(room=1)  # so that its lists of seen tokens grow
    whole = generated(steps, kept)
    early = case.batch()
    first = generated(steps[:3], early)
    outputs = [output + new for output, new in zip(case.outputs, first)]
    late = SamplingBatch.of(early.params, case.prompts, outputs)
    assert whole == [a + b for a, b in zip(first, generated(steps[3:], late))]
    assert torch.equal(
        batch_probabilities(case.logits, kept), batch_probabilities(case.logits, late)
    )


def test_rows_leave_and_the_others_go_on():
    case = Case(9, 300)
    steps = steps_of(case, 6)
    whole = generated(steps, case.batch())
    batch = case.batch()
    first = generated(steps[:3], batch)
    stay = [7, 0, 4]
    rest = generated([logits[stay] for logits in steps[3:]], batch.select(stay))
    assert [first[row] + new for row, new in zip(stay, rest)] == [whole[row] for row in stay]


def test_seen_tokens_are_those_of_the_row():
    """After every one of many steps the penalties are the specification's, also in a row that began
    with nothing.
    """
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    logits = torch.randn(4, 6, dtype=torch.float64)
    prompts, outputs = [[], [0], [], [5, 3]], [[], [], [3], [3, 3]]
    batch = SamplingBatch.of([params] * 4, prompts, outputs, room=2)
    for _ in range(20):
        rows = zip(logits, [params] * 4, prompts, outputs)
        expected = torch.stack([probabilities(*row) for row in rows])
        got = batch_probabilities(logits, batch)
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
        tokens = random_tokens(6, 4)
        batch.append(torch.tensor(tokens))
        outputs = [[*output, token] for output, token in zip(outputs, tokens)]


def test_a_row_without_a_seed_gets_one_that_stays():
    batch = SamplingBatch.of([SamplingParams()] * 2, [[1]] * 2, [[]] * 2)
    seeds = [params.seed for params in batch.params]
    assert None not in seeds and seeds[0] != seeds[1]
    again = SamplingBatch.of(batch.params, [[1]] * 2, [[]] * 2)
    assert [params.seed for params in again.params] == seeds


def test_sampling_changes_neither_logits_nor_batch():
    case = Case(20, 256)
    batch, before = case.batch(), case.logits.clone()
    first = sample_batch(case.logits, batch)
    assert torch.equal(case.logits, before)
    assert torch.equal(sample_batch(case.logits, batch), first)


def test_inference_mode_and_autograd():
    """A batch may be used in and out of inference mode, with logits that ask for a gradient."""
    case = Case(5, 300)
    batch, logits = case.batch(), case.logits.clone().requires_grad_()
    with torch.inference_mode():
        first = sample_batch(logits, batch)
    again = sample_batch(logits, batch)
    assert torch.equal(first, again) and not again.requires_grad


# ---------------------------------------------------------------- nothing waits for the GPU


def step_of(logits: torch.Tensor, batch: SamplingBatch):
    """A step on these very tensors, for a graph to record."""

    def step() -> torch.Tensor:
        tokens = sample_batch(logits, batch)
        batch.append(tokens)
        return tokens

    return step


FIXED = {
    "mixed": {},
    "float16": {},
    "greedy": dict(temperature=0),
    "no cuts": dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_step_can_be_captured(name):
    """The simulator refuses what a CUDA graph refuses: reading a value, shapes that values decide.
    Replayed on new logits the recorded step gives what an eager one gives.
    """
    case = Case(12, 1000, **FIXED[name])
    logits = case.logits.to(torch.float16 if name == "float16" else torch.float32)
    captured, eager = case.batch(), case.batch()
    graph, tokens = SimulatedGraphs(warm_ups=0).capture(step_of(logits, captured))
    for _ in range(5):
        logits.copy_(2 * torch.randn(12, 1000))
        graph.replay()
        assert tokens.tolist() == step_of(logits, eager)().tolist()


def test_a_step_that_reads_a_value_is_refused(monkeypatch):
    """The capture would notice: a search that ends early, once all rows are found, is refused."""
    search = batch_sampling.lowest_kept

    def ends_early(p, wanted, *memory, **weights):
        return p[:, :1, :1] if bool((wanted > 0).all()) else search(p, wanted, *memory, **weights)

    monkeypatch.setattr(batch_sampling, "lowest_kept", ends_early)
    case = Case(4, 300, temperature=1.0, top_k=0, top_p=0.6107)
    with pytest.raises(CaptureError, match="waits for the GPU"):
        SimulatedGraphs().capture(step_of(case.logits, case.batch()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIXED)
def test_on_a_gpu_a_step_is_captured_and_never_waits(name):
    case = Case(12, 1000, **FIXED[name])
    device = torch.device("cuda")
    logits = case.logits.to(device)
    graph, tokens = CudaGraphs(device).capture(step_of(logits, case.batch(device=device)))
    # the runs before the capture have appended as well
    eager, on_the_cpu = case.batch(device=device), case.batch()
    for batch in (eager, on_the_cpu):
        for _ in range(2):
            batch.append(sample_batch(case.logits.to(batch.drawn.device), batch))
    for _ in range(5):
        logits.copy_(2 * torch.randn(12, 1000))
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = step_of(logits, eager)()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert tokens.tolist() == expected.tolist()
        # float64: the sums of a GPU differ too little to move a draw
        assert tokens.tolist() == step_of(logits.cpu(), on_the_cpu)().tolist()
