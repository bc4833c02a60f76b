"""The Hopper kernel of paged latents equals the oracle on a CPU and on a Hopper GPU; planted bugs
are caught.
"""

import random
import re

import pytest
import torch

from lessons.l09_flash_attention.checks.gluon_cases import need_chip, need_no_gpu, with_bug
from lessons.l10_flash_decoding.splits import work_items
from lessons.l12_paged_kv.kernels.hopper import gluon_mla, launch, tiles
from lessons.l12_paged_kv.kernels.hopper.gluon_mla import paged_mla_hopper_kernel
from lessons.l12_paged_kv.kernels.hopper.launch import paged_mla_hopper
from lessons.l12_paged_kv.lab import specs
from lessons.l12_paged_kv.lab.testing import decoded, paged
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.proof.numerics import NotEquivalent, floor_for, prove

SCALE = 0.1


@pytest.fixture
def hopper_or_cpu():
    need_chip(90)


@pytest.fixture
def compiled_on_cpu(hopper_or_cpu):
    need_no_gpu()


def inputs_of(lengths, seed, block_size=64, heads=16, rank=128, kind="normal"):
    """q: [B, heads, rank + 64]; latents, whose rows have gaps; table, lengths. Pages in random
    order; rows that hold no token are NaN.
    """
    sizes = heads, 1, rank + 64, 1
    q, rows, _, table, lens = paged(
        lengths, block_size=block_size, heads=sizes, dtype=torch.bfloat16, seed=seed, kind=kind
    ).decode
    return q, rows[:, :, 0], table, lens


def plain(q, rows, table, lens):
    """The definition: gather, then lesson 2's attention with the latents as keys and values."""
    cache = rows[:, :, None]
    return decoded(q, cache, cache[..., : q.shape[2] - 64], table, lens, softmax_scale=SCALE)


def fast(kernel=paged_mla_hopper, **options):
    def run(q, *rest):
        return kernel(q, *rest, softmax_scale=SCALE, kv_lora_rank=q.shape[2] - 64, **options)

    return run


# ---------------------------------------------------------------- equal to the oracle


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 192])
@pytest.mark.sample(1, of="the Hopper kernel of latents")
def test_pages_of_any_size(block_size, seed, proof, hopper_or_cpu):
    """Ragged lengths: no token, one, a page and one more or less, a pair of tiles and one more."""
    lengths = [0, 1, block_size - 1, block_size, block_size + 1, 63, 65, 128, 129]
    given = inputs_of(random.Random(seed).sample(lengths, 5), seed, block_size)
    proof.record(paged_mla_hopper_kernel, prove(fast(num_splits=1), plain, given))


@pytest.mark.parametrize("heads", [1, 16, 64, 65, 128])
@pytest.mark.sample(1, of="the Hopper kernel of latents")
def test_any_number_of_heads(heads, seed, proof, hopper_or_cpu):
    given = inputs_of([70, 150], seed, heads=heads)
    proof.record(paged_mla_hopper_kernel, prove(fast(num_splits=2), plain, given))


@pytest.mark.parametrize("rank", [128, 256, 512])
@pytest.mark.sample(1, of="the Hopper kernel of latents")
def test_any_rank(rank, seed, proof, hopper_or_cpu):
    given = inputs_of([200], seed, heads=64, rank=rank)
    proof.record(paged_mla_hopper_kernel, prove(fast(num_splits=1), plain, given))


@pytest.mark.parametrize("options", [dict(num_splits=3), dict(num_splits=9), dict(split_size=64)])
@pytest.mark.sample(1, of="the Hopper kernel of latents")
def test_splits(options, seed, proof, hopper_or_cpu):
    """Some are empty; what was in the partial results before does not matter."""
    given = inputs_of([1, 64, 65, 300], seed, 32)
    proof.record(paged_mla_hopper_kernel, prove(fast(**options), plain, given))


@pytest.mark.parametrize("kind", ["large_logits", "ascending", "all_negative", "tied"])
@pytest.mark.sample(1, of="the Hopper kernel of latents")
def test_hard_inputs(kind, seed, proof, hopper_or_cpu):
    given = inputs_of([40, 200], seed, kind=kind)
    floor = floor_for(torch.bfloat16, kind)
    proof.record(paged_mla_hopper_kernel, prove(fast(num_splits=1), plain, given, floor=floor))


@pytest.mark.parametrize("lengths", [[9, 300, 33], [0, 1, 700, 64]])
@pytest.mark.sample(1, of="the Hopper kernel of latents")
def test_a_list_of_splits(lengths, seed, proof, hopper_or_cpu):
    """Lesson 10's list: a long sequence in many items, others in one, and idle ones."""

    def run(q, rows, table, lens):
        items = work_items(lens, 1, 8, launch.BLOCK_N)
        return fast(items=items)(q, rows, table, lens)

    proof.record(paged_mla_hopper_kernel, prove(run, plain, inputs_of(lengths, seed)))


@pytest.mark.sample(1, of="the Hopper kernel of latents")
def test_every_order_of_events_gives_the_same_bits(seed, compiled_on_cpu):
    """Programs, and the ends of copies, in four drawn orders."""
    given = inputs_of([300, 70], seed)
    first, *others = [fast(num_splits=1)(*given) for _ in range(4)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.sample(1, of="the Hopper kernel of latents")
def test_probes_with_known_answers(seed, compiled_on_cpu):
    """Latents of 1 give 1; a query of 0 gives the mean of the sequence's latents."""
    q, rows, table, lens = inputs_of([150], seed)
    rows = torch.where(rows.isnan(), rows, torch.ones_like(rows))
    assert (fast(num_splits=1)(q, rows, table, lens) == 1).all()
    q, rows, table, lens = inputs_of([150], seed)
    out = fast(num_splits=1)(torch.zeros_like(q), rows, table, lens)
    mean = rows[table[0, :3].long()].flatten(0, 1)[:150, :128].double().mean(0)
    torch.testing.assert_close(out[0, 0].double(), mean, atol=2e-3, rtol=1e-2)


def test_what_it_does_not_do_is_refused():
    given = [x.cpu() for x in inputs_of([70], 0)]
    q, rows, table, lens = given
    run, few = fast(num_splits=1), torch.zeros(1, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"q, kv_lora_rank: got torch.float32"):
        run(q.float(), rows.float(), table, lens)
    with pytest.raises(ValueError, match="latents: got blocks of 24 tokens"):
        run(q, rows[:, :24], few, lens)
    with pytest.raises(ValueError, match="q: got strides"):
        run(torch.cat([q, q], 1)[:, :16], rows, table, lens)
    with pytest.raises(ValueError, match="latents: got strides"):
        run(q, rows[:, :32], few, lens)
    with pytest.raises(ValueError, match="split_size: got 65"):
        fast(split_size=65)(*given)
    with pytest.raises(ValueError, match="accepted: one of the two"):
        fast(split_size=64, num_splits=2)(*given)


# ---------------------------------------------------------------- planted bugs

LEFT_WAIT = """    acc = warpgroup_mma_wait(0, deps=(adding,))
    release(v, a)
    m_b = hear"""
PHASE = "    zero, phase = hidden_zero(), "
LEFT = """
    a, b = 2 * pair + zero, 2 * pair + 1 + zero
    start = begin + a"""
SCORES_WAIT = "    scores = warpgroup_mma_wait(0, deps=(adding,))\n"
RACE = r"race in shared memory|deadlock|more arrivals|is read while"
WAITS = r"deadlock in program .* at the mbarrier of "
# name: (the line, what it becomes, what the error says; "" where only the numbers show it)
BUGS = {
    "the row in the page is the row in the pool": ("page * PAGE_SIZE + key %", "key %", ""),
    "the first page for all": ("key // PAGE_SIZE, mask", "key * 0, mask", ""),
    "every page from its first row": ("+ key % PAGE_SIZE", "+ key * 0", ""),
    "every piece from the tile's first page": (
        "key = start + piece * PIECE",
        "key = start + 0 * piece",
        "",
    ),
    "the table is read beyond the sequence": ("mask=key < end, other=0)", ")", ""),
    "rows that hold no key are not zeroed": (
        "if (start < end) & (start + BLOCK_N > end):",
        "if (start < end) & (start + BLOCK_N < 0):",
        "",
    ),
    "the last key is not seen": ("key < end, 0)", "key < end - 1, 0)", ""),
    "a key too many is seen": ("key < end, 0)", "key < end + 1, 0)", ""),
    "rows of the neighbour's table": (
        "block_table_ptr + sequence * stride_table",
        "block_table_ptr + 0 * sequence * stride_table",
        "",
    ),
    "every block of heads has the first heads": (
        ".to(gl.int32) + gl.program_id(0) * BLOCK_H",
        ".to(gl.int32)",
        "",
    ),
    "the right half is the left one": ("fill_pages(right, i, kv_desc, rows, HALF)",
        "fill_pages(right, i, kv_desc, rows, 0)", ""),
    "q's halves in one buffer": ("tile_of(q, 1 + zero)", "tile_of(q, zero)", ""),
    "without the rotary part": (
        "adding = warpgroup_mma(tile_of(q_pe, zero), k, adding, is_async=True)",
        "wait_for(q_pe, 0)",
        "",
    ),
    "acc is not rescaled by the other's maximum": (
        "    acc = acc * column(beta, OUT)\n    mbarrier.wait(flags",
        "    mbarrier.wait(flags",
        "",
    ),
    "l is not rescaled by the other's maximum": ("m_b, l_i * beta, acc", "m_b, l_i, acc", ""),
    "l of both sides is scaled by one": ("l_i * alpha * beta + gl", "l_i * beta + gl", ""),
    "only its own tiles in the sum": ("    l_i += hear(sums, 1 - SIDE, 0, ROW)\n", "", ""),
    "the log-sum-exp in base 2": (" * 0.6931471805599453", "", ""),
    "scores used before their wait": (
        SCORES_WAIT,
        SCORES_WAIT.replace("wait(0", "wait(1"),
        r"is read while a matrix product \(wgmma\) fills it",
    ),
    "V freed before its product has ended": (
        LEFT_WAIT,
        LEFT_WAIT.replace(
            "    acc = warpgroup_mma_wait(0, deps=(adding,))\n    release(v, a)\n",
            "    release(v, a)\n    acc = warpgroup_mma_wait(0, deps=(adding,))\n",
        ),
        RACE,
    ),
    "the weights' place is freed by no reader": ("    release(pe, b)\n", "", WAITS),
    "the weights are read before they are there": (
        "    mbarrier.wait(flags.index(1), phase)\n",
        "",
        "",
    ),
    "the next tile's pages": (
        "        fill_pages(left, i, kv_desc, rows, 0)",
        "        fill_pages(left, i, kv_desc, next_rows, 0)",
        "",
    ),
    "the maxima are read before they are there": (
        "    mbarrier.wait(numbers[1].index(side), phase)\n",
        "",
        "",
    ),
    "the phase of the exchange never turns": (f"{PHASE}pair & 1{LEFT}", f"{PHASE}0{LEFT}", ""),
    "no wait for a free buffer": ("    mbarrier.wait(free.index(stage), phase ^ 1)\n", "", RACE),
    "half of the bytes expected": (
        "PIECES * desc.block_type.nbytes)",
        "PIECES * desc.block_type.nbytes // 2)",
        RACE,
    ),
    "pieces of pages at one place": ("slice(piece * PIECE, PIECE)", "slice(0 * PIECE, PIECE)", ""),
    "an odd number of tiles": (
        "+ 2 * BLOCK_N - 1) // (2 * BLOCK_N) * 2",
        "+ BLOCK_N - 1) // BLOCK_N",
        "",
    ),
    "partial results of one head": ("(place + head * step) * (2", "(place + head) * (2", ""),
}  # fmt: skip


def shown_by(kernel, seed: int) -> None:
    """Raises NotEquivalent for every bug of BUGS."""
    prove(fast(kernel, num_splits=2), plain, inputs_of([70, 330], seed, 16, heads=65))
    prove(fast(kernel, num_splits=1), plain, inputs_of([200], seed, 128))


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sample(1)
def test_a_planted_bug_is_caught(bug, tmp_path, seed, compiled_on_cpu, monkeypatch):
    old, new, said = BUGS[bug]
    wrong = with_bug(gluon_mla, (tiles,), old, new, tmp_path).paged_mla_hopper_kernel
    monkeypatch.setattr(launch, "paged_mla_hopper_kernel", wrong)
    with pytest.raises(NotEquivalent) as caught:
        shown_by(paged_mla_hopper, seed)
    assert re.search(said, str(caught.value)), caught.value
    assert not said or isinstance(caught.value, Fault)


# ---------------------------------------------------------------- the compiler


@pytest.mark.compiler
def test_the_compiler_spills_nothing_and_serializes_nothing():
    reports = check_all(spec for spec in specs.KERNELS if spec.name.startswith("hopper_page"))
    assert len(reports) == 4
    for report in reports:
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits and report.registers <= 168 and not report.serialized_wgmma, report
        assert report.matrix_instruction == "HGMMA" and report.tma_instructions, report
        # A tile of K and V in two buffers, and the queries: 9 columns of tiles of 64 x 64, thrice.
        assert 3 * 9 * 64 * 64 * 2 < report.shared_bytes <= 227 * 1024
