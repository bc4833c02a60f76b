"""Slots that the sender writes into the receiver's memory give the same bits as slots that travel
by an all-to-all, over many steps and whichever rank is slow; and planted bugs are seen.
"""

import inspect
import tempfile
import time
from pathlib import Path

import pytest
import torch

from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l23_experts import grouped, optimized
from lessons.l23_experts.lab.moe_ranks import CONFIGS, SIZE, new_moe
from lessons.l23_experts.ranks import experts, windows, windows_kernels
from lessons.l23_experts.ranks.dispatch import FixedSlotsMoE
from lessons.l23_experts.ranks.windows import new_windows, slots_of
from lessons.l23_experts.ranks.windows_kernels import (
    KernelWindows,
    combine_kernel,
    dispatch_kernel,
)
from lessons.l23_experts.ranks.wire import Float8, Plain
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import default_device, has_gpu, interpreting
from lessons.toolbox.proof.numerics import assert_close_to_oracle, assert_same_bits
from lessons.toolbox.proof.planted import with_bug

SLOTS, STEPS, DELAY_S = 6, 4, 0.05
ON_GPU = has_gpu() and not interpreting()  # then kernels need memory of several GPUs
WRITERS = ("python",) if ON_GPU else ("python", "kernels")
DEVICE = default_device()
PROGRAMS, WORDS = 3, 4  # of the kernels here, so that each program has several rows in blocks
FORMS = {"16 bits": Plain(), "FP8": Float8()}


@torch.no_grad()
def steps_of(world: Group, writer: str, config: str, form, dtype, seed: int, bug=None) -> list:
    """(what the windows give, what the all-to-all gives, bytes of both) of each step. Ranks have
    different numbers of tokens in each. In turns one rank is slow before it writes rows, and
    another one before it writes results.
    """
    moe = new_moe(CONFIGS[config], seed, dtype)
    shape = CONFIGS[config].n_routed_experts, SLOTS
    bytes_of = form.row_bytes(SIZE, dtype), SIZE * dtype.itemsize
    module, kernels = windows, windows_kernels
    if bug is not None and bug[0] in inspect.getsource(windows):
        module = with_bug(windows, Path(tempfile.mkdtemp()), *bug)
    elif bug is not None:
        kernels = with_bug(windows_kernels, Path(tempfile.mkdtemp()), *bug)
    kernels.BLOCKS = PROGRAMS
    kernels.BLOCK = WORDS
    writers = module.Windows if writer == "python" else kernels.KernelWindows
    shared = module.new_windows(world, *shape, *bytes_of, kind=writers)
    layer = module.WrittenSlotsMoE(moe, world, shared, form)
    twin = FixedSlotsMoE(moe, world, SLOTS, form)
    step, run_experts, found = 0, layer.experts.rows, []

    def slowly(*inputs):
        time.sleep(DELAY_S * (step % world.size == (world.rank + 1) % world.size))
        return run_experts(*inputs)

    generator = torch.Generator().manual_seed(seed + world.rank)
    for step in range(STEPS):
        x = torch.randn((step + 2 * world.rank) % (SLOTS + 1), SIZE, generator=generator).to(dtype)
        layer.experts.rows = run_experts
        expected = twin(x)
        layer.experts.rows = slowly
        time.sleep(DELAY_S * (step % world.size == world.rank))
        world.wire.clear()
        found.append((layer(x), expected, world.wire.bytes["write"], len(x)))
    return found


def cases_of(world: Group, cases: list) -> list:
    """steps_of each case."""
    return [steps_of(world, *case) for case in cases]


RIGHT = [
    (writer, config, form, dtype)
    for writer in WRITERS
    for config in ("mixtral", "deepseek_v3")
    for form in FORMS.values()
    for dtype in (torch.float64, torch.bfloat16)
    if writer == "python" or (config == "deepseek_v3") == (dtype == torch.bfloat16)
]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_written_slots_are_those_of_an_all_to_all(size, seed, proof):
    """And no more bytes than full slots have."""
    cases = [(*case, seed) for case in RIGHT]
    errors = []
    results = run_ranks(size, cases_of, cases) if size > 1 else [cases_of(Group.alone(), cases)]
    for at, (writer, config, form, dtype, _) in enumerate(cases):
        row, back = form.row_bytes(SIZE, dtype), SIZE * dtype.itemsize
        for step in range(STEPS):
            of_ranks = [result[at][step] for result in results]
            for got, expected, _, _ in of_ranks:
                assert_same_bits(got, expected)
                if writer == "kernels" and len(got):
                    errors.append(assert_close_to_oracle(got, expected, expected.double()))
            pairs = CONFIGS[config].num_experts_per_tok * sum(tokens for *_, tokens in of_ranks)
            assert sum(sent for _, _, sent, _ in of_ranks) == pairs * (row + back)
    if ON_GPU:
        pytest.skip("NOT RUN: the kernels need windows of several GPUs")
    proof.record(dispatch_kernel, errors)
    proof.record(combine_kernel, errors)


@triton.jit
def row_kernel(source_ptr, targets, words, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    windows_kernels.copy_row(source_ptr, targets, 1, 2, words, SIZE, BLOCK)


@pytest.mark.parametrize("words", [1, 6, 8])
def test_a_row_is_copied_and_nothing_beside_it(words):
    """To the second of three ranks, from place 2 on, in blocks of 4."""
    source = torch.arange(1, words + 1, dtype=torch.int32, device=DEVICE)
    targets = torch.zeros(3, 12, dtype=torch.int32, device=DEVICE)
    with in_bounds():
        row_kernel[(1,)](source, tuple(targets), words, SIZE=3, BLOCK=4)
    expected = [0, 0, *range(1, words + 1)] + (10 - words) * [0]
    assert targets.tolist() == [12 * [0], expected, 12 * [0]]


@pytest.mark.skipif(ON_GPU, reason="NOT RUN: needs memory of several GPUs")
@pytest.mark.parametrize("kind", [windows.Windows, KernelWindows])
def test_all_slots_of_an_expert_are_full(kind):
    """The second of three gets every token; what others would send back stays where it is."""
    written = new_windows(Group.alone(), 3, SLOTS, 24, 24, kind=kind)
    rows = torch.arange(SLOTS * 24).view(SLOTS, 24).to(torch.uint8)
    chosen = torch.ones(SLOTS, 1, dtype=torch.int64)
    written.dispatch(rows, chosen, slots_of(chosen, 3))
    assert written.own.full.tolist() == [[0, SLOTS, 0]] and torch.equal(
        written.own.rows[0, 1], rows
    )
    written.own.results.fill_(7)
    written.combine(written.own.rows.flatten(0, 2) + 1)
    assert torch.equal(written.own.results[1], rows + 1)
    assert (written.own.results[[0, 2]] == 7).all()


BUGS = {
    "no rank waits for rows": (
        "window.full[self.memory.rank] = full[peer]\n        self.memory.barrier()",
        "window.full[self.memory.rank] = full[peer]",
    ),
    "no rank waits for results": (
        "= results[sender][is_full]\n        self.memory.barrier()",
        "= results[sender][is_full]",
    ),
    "the slots of another sender": (
        "window.rows[self.memory.rank][place]",
        "window.rows[peer][place]",
    ),
    "the counts of another receiver": ("= full[peer]", "= full[self.memory.rank]"),
    "the row of another token": ("packed[pair // top_k]", "packed[pair % len(packed)]"),
    "results of another sender": ("= results[sender][is_full]", "= results[sender - 1][is_full]"),
    "a rank's experts begin at 0": ("first = self.memory.rank * num_own", "first = 0"),
    "the last slot stays": (
        "is_full = torch.arange(slots) <",
        "is_full = 1 + torch.arange(slots) <",
    ),
    "the next pair's slot": (
        "y = from_bytes(came[chosen.flatten(), slot], x.dtype)",
        "y = from_bytes(came[chosen.flatten(), slot.roll(1)], x.dtype)",
    ),
}


KERNEL_BUGS = {
    "no program waits for rows": (
        "barrier(flags, own_flags_ptr, rank, SIZE)  # all rows",
        "pass  #",
    ),
    "no program waits for results": (
        "barrier(flags, own_flags_ptr, rank, SIZE)  # all results",
        "pass  #",
    ),
    "a kernel's slots of another sender": (
        "slot = (rank * num_own + expert % num_own)",
        "slot = (expert // num_own * num_own + expert % num_own)",
    ),
    "a kernel's counts of another sender": (
        "full[peer] + rank * num_own + expert % num_own",
        "full[peer] + peer * num_own + expert % num_own",
    ),
    "a kernel's row of another token": (
        "tl.cast(pair // TOP_K,",
        "tl.cast(pair % (num_pairs // TOP_K),",
    ),
    "a kernel's experts begin at 0": ("tl.cast(rank * num_own + group", "tl.cast(group"),
    "a kernel's results of another sender": (
        "source_ptr, windows, group // num_own",
        "source_ptr, windows, (group // num_own + 1) % SIZE",
    ),
    "a kernel leaves out the last slot": (
        "range(0, tl.load(full_ptr + group))",
        "range(1, tl.load(full_ptr + group))",
    ),
    "a kernel copies the first block alone": (
        "for start in range(0, words, BLOCK):",
        "for start in range(0, BLOCK, BLOCK):",
    ),
}


BUGS_OF = {"python": BUGS, "kernels": KERNEL_BUGS}


def test_bugs_are_seen(seed):
    """Each of them on two ranks."""
    last = torch.float64, seed
    bugs = [(writer, name) for writer in WRITERS for name in BUGS_OF[writer]]
    cases = [(w, "deepseek_v3", Plain(), *last, BUGS_OF[w][name]) for w, name in bugs]
    results = run_ranks(2, cases_of, cases)
    for at, (_, bug) in enumerate(bugs):
        steps = [step for result in results for step in result[at]]
        same = all(torch.equal(got, expected) for got, expected, *_ in steps)
        assert not same, f"unseen: {bug}"


@pytest.mark.skipif(ON_GPU, reason="NOT RUN: needs memory of several GPUs")
@torch.inference_mode()
def test_a_graph_records_the_kernels(seed, monkeypatch):
    """The arguments of a launch are the same in every step, and nothing waits for a value."""
    for module in (grouped, experts):
        monkeypatch.setattr(module, "ops_for", lambda *_: optimized)
    moe, group = new_moe(CONFIGS["mixtral"], seed, torch.float32), Group.alone()
    written = new_windows(group, 8, SLOTS, 4 * SIZE, 4 * SIZE, kind=KernelWindows)
    layer, x = windows.WrittenSlotsMoE(moe, group, written), torch.randn(3, SIZE)
    graph, out = SimulatedGraphs(warm_ups=0).capture(lambda: layer(x))
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, moe(x))


def test_rows_of_no_whole_words_are_refused():
    with pytest.raises(ValueError, match="row_bytes: got 6; accepted: a multiple of 4"):
        new_windows(Group.alone(), 8, SLOTS, 6, 8, kind=KernelWindows)


def test_the_slot_of_a_pair():
    """How many pairs before it have the same expert."""
    chosen = torch.tensor([[1, 0], [1, 2], [0, 1]])
    assert slots_of(chosen, 3).tolist() == [0, 0, 1, 0, 1, 2]
    assert slots_of(chosen[:0], 3).tolist() == []


def test_experts_that_cannot_be_dealt_out_are_refused():
    with pytest.raises(ValueError, match="num_experts: got 3; accepted: a multiple of 2"):
        new_windows(Group([0, 1], 0), 3, 4, 8, 8)
