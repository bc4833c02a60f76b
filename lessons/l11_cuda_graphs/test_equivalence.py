"""Proves that a batch in lockstep and a captured step change no answer, and that every way to break
a capture is noticed.
"""

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.request import read_requests, take_next_tokens
from lessons.l02_naive_attention.rope import rope_inv_freq
from lessons.l11_cuda_graphs import optimized
from lessons.l11_cuda_graphs.lab import pictures as picture
from lessons.l11_cuda_graphs.lab import timeline
from lessons.l11_cuda_graphs.lab.timeline import LaunchCost, eager_spans, graph_spans, recorded_step
from lessons.l11_cuda_graphs.lab.workload import LLAMA_8B, step_bytes
from lessons.l11_cuda_graphs.naive import batch_loop, eager_step, generate, run_wave
from lessons.l11_cuda_graphs.optimized import GraphRunner, batch_buckets, bucket_for, padded
from lessons.l11_cuda_graphs.simulator import CaptureError, SimulatedGraph, SimulatedGraphs
from lessons.l11_cuda_graphs.slots import (
    KernelSlotCache,
    SlotCache,
    batched_decode_attention,
    decode_logits,
    new_slot_cache,
    step_inputs,
)
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.numerics import poison_, prove

# NumPy, the interpreter's engine, warns of what is meant: a row of padding divides 0 by 0.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
CONFIG = ModelConfig(
    "llama",
    vocab_size=53,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=32,
    max_position_embeddings=64,
    sliding_windows=(None, 5),
)


def new_model(dtype=torch.float64, **changes) -> Decoder:
    """Weights under which attention is sharp, so that a wrong row, position or length changes the
    tokens.
    """
    model = Decoder(replace(CONFIG, **changes)).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(std=(4 if "q_proj" in name else 1.5) * weight.shape[-1] ** -0.5)
    return model.to(dtype)


def new_prompts(*lengths) -> list[list[int]]:
    return [random.choices(range(CONFIG.vocab_size), k=length) for length in lengths]


def simulated(model, cache):
    return GraphRunner(model, cache, SimulatedGraphs())


STEPS = {"eager": eager_step, "captured": simulated}


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_lockstep_gives_the_tokens_of_one_at_a_time(name, max_batch, seed):
    """In float64, where nothing ties: requests that end at different steps, in one wave or several,
    with a window.
    """
    model, prompts, limits = new_model(), new_prompts(3, 1, 12, 7, 5), [6, 11, 1, 0, 4]
    expected = one_at_a_time.generate(model, prompts, limits)
    seen = [[] for _ in prompts]
    got = batch_loop(
        STEPS[name],
        model,
        prompts,
        limits,
        None,
        lambda row, token: seen[row].append(token),
        max_batch,
    )
    assert got == seen == expected


def test_a_request_that_stops_early_leaves_its_neighbours_alone(seed):
    model, prompts = new_model(), new_prompts(4, 2, 6)
    free = one_at_a_time.generate(model, prompts, 9)
    model.config = replace(model.config, eos_token_ids=(free[0][2],))
    expected = one_at_a_time.generate(model, prompts, 9)
    assert len(expected[0]) <= 3
    for step in STEPS.values():
        assert batch_loop(step, model, prompts, 9) == expected


def test_generate_of_both_files(seed):
    model, prompts = new_model(), new_prompts(4, 9)
    expected = one_at_a_time.generate(model, prompts, 5)
    assert generate(model, prompts, 5) == optimized.generate(model, prompts, 5) == expected


def test_the_kernels_inside_a_graph(seed):
    """What a GPU runs, interpreted where there is none, recorded by the simulated graph like any
    other launch.

    Two requests of three, then one: padding reaches both kernels, and rows of the cache that were
    never written hold NaN.
    """
    model, wave_of = new_model(torch.float32).to(DEVICE), [new_prompts(4, 2, 3), [3, 2, 3]]
    expected = one_at_a_time.generate(model, *wave_of)
    cache = KernelSlotCache(CONFIG, 4, 6, device=DEVICE)
    poison_(cache.keys)
    poison_(cache.values)
    runner = GraphRunner(model, cache, SimulatedGraphs(), buckets=[1, 4])
    launched = Counter(launch.name for launch in runner.graphs[4].launches)
    assert (
        launched["rope_cache_kernel"] == launched["split_decode_kernel"] == CONFIG.num_hidden_layers
    )
    requests = read_requests(CONFIG, *wave_of)
    with torch.inference_mode():
        run_wave(model, cache, runner, requests)
    assert [request.output for request in requests] == expected
    written = cache.keys[0, :-1].unflatten(0, (4, 6)).isfinite().all(-1).all(-1).sum(-1)
    assert written.tolist()[3] == 0 and cache.keys[:, -1].isnan().all(), (
        "a row of padding was written"
    )


# ---------------------------------------------------------------- one step, logits held against an eager step


def admit(model, cache, row, prompt):
    """A request whose prompt is prefilled into `row` of the cache, and its first token."""
    (request,) = read_requests(model.config, [prompt], 20)
    tokens = torch.tensor(prompt, device=model.device)
    hidden = model(tokens, torch.arange(len(prompt), device=model.device), cache.prefilling(row))
    take_next_tokens(model.logits(hidden[-1:]), [request])
    return request


def check_runner(new_runner, seed, batches=(3, 3, 4, 2, 2, 1, 4), newcomer=4) -> None:
    """Steps of these batch sizes, with tokens chosen at random: all logits, looked at in the end,
    and the caches must be equal.

    Before step `newcomer` the last row gets another request, while it takes no part in the steps.
    """
    random.seed(seed)
    model, prompts = new_model(), new_prompts(3, 5, 2, 4)
    caches = [SlotCache(CONFIG, 4, 12, model.dtype) for _ in range(2)]
    steps, results = [eager_step(model, caches[0]), new_runner(model, caches[1])], ([], [])
    with torch.inference_mode():
        requests, _ = (
            [admit(model, cache, row, prompt) for row, prompt in enumerate(prompts)]
            for cache in caches
        )
        for index, batch in enumerate(batches):
            if index == newcomer:
                (prompt,) = new_prompts(10)
                requests[3], _ = (admit(model, cache, 3, prompt) for cache in caches)
            inputs = step_inputs(requests[:batch], 12)
            for result, step in zip(results, steps):
                result.append(step(inputs.clone()))
            for request in requests[:batch]:
                request.output.append(random.randrange(CONFIG.vocab_size))
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)
    for name in ("keys", "values"):  # but for the slot that is nobody's
        torch.testing.assert_close(
            getattr(caches[1], name)[:, :-1], getattr(caches[0], name)[:, :-1], atol=1e-9, rtol=1e-9
        )


@pytest.mark.parametrize("buckets", [None, [4], [1, 2, 3, 4], [3, 4]])
def test_replays_equal_eager_steps(buckets, seed):
    """Whatever the buckets; the batch shrinks and grows between them."""
    check_runner(lambda model, cache: GraphRunner(model, cache, SimulatedGraphs(), buckets), seed)


class Rebinds(GraphRunner):
    """Puts another tensor into the runner's attribute; the graph goes on reading the one it was
    captured with.
    """

    def __call__(self, inputs):
        bucket = bucket_for(inputs.shape[1], self.buckets)
        self.inputs[bucket] = padded(inputs, bucket)
        self.graphs[bucket].replay()
        return self.logits[bucket][: inputs.shape[1]].clone()


def keeps(row):
    class Stale(GraphRunner):
        """Copies everything but one row of the inputs, which stays as it was at capture."""

        def __call__(self, inputs):
            bucket = bucket_for(inputs.shape[1], self.buckets)
            fresh = padded(inputs, bucket)
            fresh[row] = self.inputs[bucket][row]
            self.inputs[bucket].copy_(fresh)
            self.graphs[bucket].replay()
            return self.logits[bucket][: inputs.shape[1]].clone()

    return Stale


class OneBucketTooSmall(GraphRunner):
    """Takes the largest bucket that is not larger than the batch, and drops who finds no place."""

    def __call__(self, inputs):
        bucket = max(b for b in self.buckets if b <= inputs.shape[1])
        return super().__call__(inputs[:, :bucket])


class NotCloned(GraphRunner):
    """Returns the graph's own output, which the next replay overwrites."""

    def __call__(self, inputs):
        super().__call__(inputs)
        return self.logits[bucket_for(inputs.shape[1], self.buckets)][: inputs.shape[1]]


class NoPadding(GraphRunner):
    """One graph for all batches; the columns behind the batch keep what was there before."""

    def __call__(self, inputs):
        bucket, batch = self.buckets[-1], inputs.shape[1]
        self.inputs[bucket][:, :batch] = inputs
        self.graphs[bucket].replay()
        return self.logits[bucket][:batch].clone()


def cache_after_capture(model, cache):
    """The cache moves to new memory, as one that grows would; prefills go there, the graphs go on
    with the old.
    """
    runner = simulated(model, cache)
    cache.keys, cache.values = cache.keys.clone(), cache.values.clone()
    return runner


def padding_into_slot_0(model, cache):
    """Padding like a real row of no interest: token 0 at position 0, which is slot 0 of sequence 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimized, "PADDING", (0, 0, 0, 1))
        runner = simulated(model, cache)

    def step(inputs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimized, "PADDING", (0, 0, 0, 1))
            return runner(inputs)

    return step


def without_warm_up(model, cache):
    """What the first run computes once and keeps, the frequencies of RoPE, is then made inside the
    first graph alone.
    """
    rope_inv_freq.cache_clear()
    return GraphRunner(model, cache, SimulatedGraphs(warm_ups=0))


def length_of_python(model, cache):
    """The slice as long as the longest sequence, which the eager step takes: a number in Python, so
    it stays as captured.
    """
    inputs = padded(torch.empty(4, 0, dtype=torch.int64), 4)
    seen = []

    def step():
        return decode_logits(model, cache, inputs, max(seen, default=6))

    graph, logits = SimulatedGraphs().capture(step)

    def run(batch):
        seen.append(int(batch[3].max()))
        inputs.copy_(padded(batch, 4))
        graph.replay()
        return logits[: batch.shape[1]].clone()

    return run


def never_replayed(model, cache):
    runner = simulated(model, cache)
    return lambda inputs: runner.logits[bucket_for(inputs.shape[1], runner.buckets)][
        : inputs.shape[1]
    ].clone()


BROKEN = {
    "inputs rebound": lambda *x: Rebinds(*x, SimulatedGraphs()),
    "stale tokens": lambda *x: keeps(0)(*x, SimulatedGraphs()),
    "stale positions": lambda *x: keeps(1)(*x, SimulatedGraphs()),
    "stale slot_mapping": lambda *x: keeps(2)(*x, SimulatedGraphs()),
    "stale context_lens": lambda *x: keeps(3)(*x, SimulatedGraphs()),
    "bucket too small": lambda *x: OneBucketTooSmall(*x, SimulatedGraphs()),
    "output not cloned": lambda *x: NotCloned(*x, SimulatedGraphs()),
    "no padding": lambda *x: NoPadding(*x, SimulatedGraphs()),
    "cache allocated after capture": cache_after_capture,
    "padding writes into slot 0": padding_into_slot_0,
    "no warm-up": without_warm_up,
    "a length that Python knew": length_of_python,
    "never replayed": never_replayed,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_capture_is_rejected(name, seed):
    error, message = (ValueError, "is nan") if name == "no warm-up" else (AssertionError, None)
    try:
        with pytest.raises(error, match=message):
            check_runner(BROKEN[name], seed)
    finally:
        rope_inv_freq.cache_clear()  # one of them leaves a poisoned tensor there


def test_one_bucket_for_a_changing_batch_is_rejected(seed):
    """The shape of a graph is fixed: 2 rows do not fit into buffers for 3, and no error would be
    the worse outcome.
    """
    model = new_model()
    runner = GraphRunner(model, SlotCache(CONFIG, 3, 8, model.dtype), SimulatedGraphs(), [3])
    with pytest.raises(RuntimeError, match="size"):
        runner.inputs[3].copy_(torch.zeros(4, 2, dtype=torch.int64))


def test_capturing_writes_into_no_row_of_the_cache(seed):
    model = new_model()
    cache = SlotCache(CONFIG, 4, 6, model.dtype)
    before = cache.keys.normal_().clone(), cache.values.normal_().clone()
    simulated(model, cache)
    assert torch.equal(cache.keys[:, :-1], before[0][:, :-1]) and torch.equal(
        cache.values[:, :-1], before[1][:, :-1]
    )


def test_replays_are_bitwise_equal(seed):
    """Twenty replays of one step write the same rows and return the same bits."""
    model = new_model(torch.float32)
    cache = SlotCache(CONFIG, 2, 12)
    runner = simulated(model, cache)
    with torch.inference_mode():
        inputs = step_inputs(
            [admit(model, cache, row, prompt) for row, prompt in enumerate(new_prompts(3, 7))], 12
        )
        first = runner(inputs)
        assert first.isfinite().all() and all(torch.equal(runner(inputs), first) for _ in range(20))


# ---------------------------------------------------------------- attention over the slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_batched_decode_attention(dtype, window, seed):
    """Ragged lengths, one of them 0; what is not in use holds large numbers."""
    lengths = [5, 0, 1, 9, 12]
    q, keys, values = (
        torch.randn(5, *shape).to(dtype) for shape in ((4, 6), (12, 2, 6), (12, 2, 6))
    )
    for b, n in enumerate(lengths):
        keys[b, n:] = values[b, n:] = 1e4

    def by_slicing(q, keys, values):
        return torch.stack(
            [
                attention(q[b : b + 1], keys[b, :n], values[b, :n], 0.4, window=window)[0]
                for b, n in enumerate(lengths)
            ]
        )

    prove(
        lambda *x: batched_decode_attention(*x, torch.tensor(lengths), 0.4, window),
        by_slicing,
        (q, keys, values),
    )


@pytest.mark.parametrize("kind", [SlotCache, KernelSlotCache])
def test_slots(kind, seed):
    """Each row goes to its slot, -1 to none; a sequence that moves takes its rows along, in every
    layer.
    """
    cache = kind(CONFIG, 3, 4, device=DEVICE)
    k, v = torch.randn(2, 3, 2, 6, device=DEVICE)
    # where lesson 4's kernel turns nothing
    positions = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for layer in range(2):
        cache.write(
            layer,
            torch.randn(3, 4, 6, device=DEVICE),
            k,
            v,
            positions,
            torch.tensor([9, -1, 2], device=DEVICE),
        )
    for buffer, rows in ((cache.keys, k), (cache.values, v)):
        assert torch.equal(buffer[:, [9, 2]], rows[[0, 2]].expand(2, -1, -1, -1))
        assert not buffer[:, [0, 1, 3, 4, 5, 6, 7, 8, 10, 11]].any()
    cache.move(2, 0, 2)
    assert torch.equal(cache.keys[:, 1], cache.keys[:, 9]) and torch.equal(
        cache.keys[:, 2], k[2].expand(2, -1, -1)
    )


# ---------------------------------------------------------------- the simulator refuses what a GPU refuses

X = torch.arange(6)
REFUSED = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X[0] == 0),
    "int": lambda: int(X[1]),
    "if": lambda: 1 if X[2] > 1 else 2,
    "tolist": X.tolist,
    "cpu": X.cpu,
    "numpy": X.numpy,
    "print": lambda: str(X),
    "equal": lambda: torch.equal(X, X),
    "nonzero": X.nonzero,
    "mask": lambda: X[X > 2],
    "masked_select": lambda: X.masked_select(X > 2),
    "unique": X.unique,
    "repeat_interleave": lambda: X.repeat_interleave(X),
    "a list becomes a tensor": lambda: torch.tensor([1, 2]),
    "foreign generator": lambda: torch.rand(3, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_capture_refuses(name):
    graph = SimulatedGraph()
    with pytest.raises(
        CaptureError, match="operation not permitted when stream is capturing: "
    ) as error:
        graph.record(REFUSED[name])
    assert "\n" not in str(error.value)
    with pytest.raises(
        RuntimeError, match="accepted: one whose capture has ended without an error"
    ):
        graph.replay()


def test_an_item_inside_the_step_is_refused(seed):
    model = new_model()
    cache, inputs = (
        SlotCache(CONFIG, 2, 8, model.dtype),
        padded(torch.empty(4, 0, dtype=torch.int64), 2),
    )
    with torch.inference_mode(), pytest.raises(CaptureError, match="item waits for the GPU"):
        SimulatedGraphs().capture(
            lambda: decode_logits(model, cache, inputs, int(inputs[3].max()) + 1)
        )


def captured(function):
    graph = SimulatedGraph()
    return graph, graph.record(function)


def test_a_capture_runs_nothing_and_a_replay_runs_all(seed):
    """Operations in place, views, broadcasts, several outputs; garbage until the first replay, then
    today's inputs each time.
    """
    x, total = torch.ones(4), torch.zeros(4)

    def step():
        total.add_(x)
        first, second = (x * 2).chunk(2)
        values, indices = (first + second).sort(descending=True)
        return values + indices + total.view(2, 2)[1]

    graph, out = captured(step)
    assert not total.any() and not out.isfinite().any()
    for turn in range(1, 4):
        x.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]) * turn)
        graph.replay()
        doubled = 2 * x
        values, indices = (doubled[:2] + doubled[2:]).sort(descending=True)
        torch.testing.assert_close(out, values + indices + total[2:])
    torch.testing.assert_close(total, 6 * torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_what_python_decided_stays_decided():
    x, double = torch.ones(2), True
    graph, out = captured(lambda: x * 2 if double else x * 3)
    double = False
    graph.replay()
    assert out.tolist() == [2, 2]


def noise(seed, tokens):
    """Gumbel noise by a counter-based generator, [V]: the same seed and token give the same number,
    as in a sampling kernel.
    """
    mixed = (torch.arange(tokens) * 2654435761 + seed * 40503) % 2**31
    mixed = (mixed * 48271 + 11) % (2**31 - 1)
    return -((mixed.double() + 0.5) / 2**31).log().neg().log()


def test_a_seed_that_python_knows_is_frozen():
    """A number becomes part of the recording: every replay samples the same token. A buffer is read
    anew each time.
    """
    logits, counter, seed = torch.zeros(97), 0, torch.zeros((), dtype=torch.int64)
    frozen, out = captured(lambda: (logits + noise(counter, 97)).argmax())
    drawn = set()
    for counter in range(30):  # noqa: B007  the recorded function read `counter`, once
        frozen.replay()
        drawn.add(int(out))
    assert len(drawn) == 1
    fresh, out = captured(lambda: (logits + noise(seed, 97)).argmax())
    for step in range(30):
        seed.fill_(step)
        fresh.replay()
        drawn.add(int(out))
    assert len(drawn) > 15


# ---------------------------------------------------------------- the launch-cost model


def test_the_model_on_paper():
    """Three kernels of 2 µs: eager they wait for their launches of 6 µs, in a graph they follow
    each other.
    """
    x = torch.zeros(8)
    launches = captured(lambda: ((x + 1) * 2).relu())[0].launches
    cost = LaunchCost(
        eager_us=6, graph_us=12, latency_us=3, gap_us=0.5, kernel_us=2, bytes_per_s=4.8e12
    )
    assert [(s.start, s.end) for s in eager_spans(launches, cost)] == [(9, 11), (15, 17), (21, 23)]
    assert [(s.start, s.end) for s in graph_spans(launches, cost)] == [
        (15, 17),
        (17.5, 19.5),
        (20, 22),
    ]
    # 64 bytes at 1 byte/µs: now the kernels hide the launches
    slow = replace(cost, bytes_per_s=1e6)
    assert [(s.start, s.end) for s in eager_spans(launches, slow)] == [
        (9, 73),
        (73.5, 137.5),
        (138, 202),
    ]
    assert timeline.busy_share(eager_spans(launches, cost)) == 6 / 23


def test_a_recorded_step_moves_weights_and_cache_once():
    """Beside them only activations: a few percent. And the number of launches does not depend on
    the batch.
    """
    config = replace(picture.TINY, num_hidden_layers=3, vocab_size=32000)
    for batch in (1, 8):
        launches = recorded_step(config, batch, 256).launches
        moved = sum(map(timeline.moved_bytes, launches))
        weights = 2 * sum(p.numel() for p in Decoder(config).parameters())
        floor = weights + batch * 256 * config.kv_bytes_per_token(2)
        assert floor < moved < 1.15 * floor
    assert len({len(recorded_step(config, batch, 64).launches) for batch in (1, 2, 16)}) == 1


def test_a_graph_needs_room_for_what_lives_at_once():
    x = torch.zeros(1000)
    graph, _ = captured(lambda: x.add(1).mul(2).relu().sum(0, keepdim=True))
    # an input and an output of the same kernel, never more
    assert timeline.peak_bytes(graph) == 2 * 4000
    step = recorded_step(picture.TINY, 8, 64)
    made = sum(x.nbytes for launch in step.launches for x in launch.outputs)
    assert 8 * picture.TINY.vocab_size * 2 <= timeline.peak_bytes(step) < made / 5


def event(name, device, start, end):
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end)
    )


def test_a_profile_becomes_spans():
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        event("aten::mm", cpu, 99, 140),
        event("cudaLaunchKernel", cpu, 100, 104),
        event("cuLaunchKernelEx", cpu, 110, 113),
        event("gemv2T_kernel", gpu, 108, 120),
        event("decode_kernel", gpu, 121, 130),
    ]
    spans = timeline.spans_of(events)
    assert [(s.cpu_start, s.cpu_end, s.start, s.end) for s in spans] == [
        (0, 4, 8, 20),
        (10, 13, 21, 30),
    ]
    graph = timeline.spans_of([event("cudaGraphLaunch", cpu, 50, 60), *events[3:]])
    assert {(s.cpu_start, s.cpu_end) for s in graph} == {(0, 10)} and len(graph) == 2
    rows = timeline.gantt_rows("graph", graph, 1000)
    assert [kind for *_, kind in rows["graph: GPU"]] == [
        timeline.PRODUCT,
        timeline.ATTENTION,
    ] and len(rows["graph: CPU"]) == 1
    with pytest.raises(
        ValueError,
        match="events: got no kernel or no launch; accepted: a profile of a step that ran on a GPU",
    ):
        timeline.spans_of(events[:3])


def test_the_predictions_of_the_readme():
    """Its table, and the memory that it names, as the simulator records them and the model
    predicts.
    """
    text, cost = (Path(__file__).parent / "README.md").read_text(encoding="utf-8"), LaunchCost()
    models = {
        "models/tiny, 512": (picture.TINY, 512),
        "Llama-3-8B, 4096": (replace(LLAMA_8B, num_hidden_layers=32), 4096),
    }
    for name, (config, context) in models.items():
        for label, twin in (
            (name, timeline.plain),
            (f"{name}, fused", timeline.with_fused_kernels),
        ):
            launches = recorded_step(config, 1, context, twin=twin).launches
            eager, graph = eager_spans(launches, cost)[-1].end, graph_spans(launches, cost)[-1].end
            read = 1e6 * step_bytes(config, 1, context, torch.bfloat16) / cost.bytes_per_s
            row = f"| {label} | {len(launches)} | {eager / 1000:.2f} | {graph / 1000:.2f} | {read / 1000:.2g} |"
            assert row in text, f"the README lacks {row}"
    step = recorded_step(config, 32, 4096, twin=timeline.with_fused_kernels)
    made = sum(x.nbytes for launch in step.launches for x in launch.outputs)
    assert f"at batch 32 makes {made / 1e6:.0f} MB of tensors" in text
    assert f"{timeline.peak_bytes(step) / 1e6:.1f} MB live at once" in text


def test_the_picture_fits():
    figure = picture.draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


# ---------------------------------------------------------------- buckets, bad input


def test_buckets():
    assert [batch_buckets(n) for n in (1, 2, 3, 8, 20)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 16, 20],
    ]
    assert [bucket_for(n, [1, 2, 4, 8]) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    assert padded(torch.tensor([[7], [3], [3], [4]]), 3).tolist() == [
        [7, 0, 0],
        [3, 0, 0],
        [3, -1, -1],
        [4, 0, 0],
    ]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bucket_for(9, [1, 8]), "batch: got 9; accepted: 1 to 8, the largest bucket"),
        (lambda: bucket_for(0, [1, 8]), "batch: got 0; accepted: 1 to 8"),
        (lambda: batch_buckets(0), "max_batch: got 0; accepted: 1 or more"),
        (lambda: SlotCache(CONFIG, 0, 5), "rows, capacity: got 0, 5; accepted: 1 or more"),
        (lambda: SlotCache(CONFIG, 5, 0), "rows, capacity: got 5, 0; accepted: 1 or more"),
        (
            lambda: GraphRunner(new_model(), SlotCache(CONFIG, 2, 4), None, [1, 4]),
            r"buckets: got \[1, 4\]; accepted: .* from 1 to 2",
        ),
        (
            lambda: GraphRunner(new_model(), SlotCache(CONFIG, 2, 4), None, [0, 2]),
            r"buckets: got \[0, 2\]; accepted",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- for real


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_on_a_gpu(dtype, seed):
    """The same logits as eager steps, batch after batch, and a hundred replays with the same bits."""
    model, prompts = (
        new_model(dtype, head_dim=16, hidden_size=64).cuda(),
        new_prompts(3, 5, 2, 4, 9),
    )
    caches = [new_slot_cache(model, 5, 30) for _ in range(2)]
    steps = [
        eager_step(model, caches[0]),
        GraphRunner(model, caches[1], optimized.CudaGraphs(model.device)),
    ]
    with torch.inference_mode():
        requests, _ = (
            [admit(model, cache, row, prompt) for row, prompt in enumerate(prompts)]
            for cache in caches
        )
        for batch in (5, 5, 3, 2, 1, 4):
            inputs = step_inputs(requests[:batch], 30)
            expected, got = (step(inputs) for step in steps)
            tolerance = 1e-4 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(
                got, expected, atol=tolerance * float(expected.abs().max()), rtol=0
            )
            assert all(torch.equal(steps[1](inputs), got) for _ in range(100))
            for request in requests[:batch]:
                request.output.append(random.randrange(CONFIG.vocab_size))


@pytest.mark.gpu
def test_the_tokens_of_a_gpu(seed):
    model = new_model(torch.float32, head_dim=16, hidden_size=64).cuda()
    prompts, limits = new_prompts(3, 1, 12, 7, 5), [6, 11, 1, 9, 4]
    expected = one_at_a_time.generate(model, prompts, limits)
    assert generate(model, prompts, limits) == expected
    assert optimized.generate(model, prompts, limits) == expected
    assert batch_loop(optimized.graph_step, model, prompts, limits, max_batch=2) == expected


TRIES_TO_CAPTURE = """
import sys
import torch
from lessons.l11_cuda_graphs.optimized import CudaGraphs
x = torch.arange(6, device="cuda")
calls = {"item": lambda: x.sum().item(), "bool": lambda: bool(x[0] == 0), "tolist": x.tolist, "nonzero": x.nonzero,
         "mask": lambda: x[x > 2]}
calls[sys.argv[1]]()
try:
    CudaGraphs(x.device).capture(calls[sys.argv[1]])
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0], flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["item", "bool", "tolist", "nonzero", "mask"])
def test_a_gpu_refuses_what_the_simulator_refuses(name):
    """In a process of its own, because PyTorch does not promise to be usable after a capture that
    failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", TRIES_TO_CAPTURE, name],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert "refused:" in done.stdout, done.stdout + done.stderr
