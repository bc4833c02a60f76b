"""The Hopper kernel equals the oracle on a CPU and on a Hopper GPU; planted bugs are caught."""

import re
from functools import partial

import pytest
import torch

from lessons.l09_flash_attention.checks import gluon_cases
from lessons.l09_flash_attention.checks.gluon_cases import (
    LENGTHS,
    LONG,
    inputs,
    with_bug,
)
from lessons.l09_flash_attention.hopper import gluon_flash as hopper
from lessons.l09_flash_attention.hopper import rings
from lessons.l09_flash_attention.hopper.gluon_flash import flash_hopper_kernel
from lessons.l09_flash_attention.lab import specs
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.proof.numerics import ATTENTION_INPUTS, NotEquivalent


def proved(q, k, v, causal, kernel=hopper.flash_attention_hopper, name="normal"):
    return gluon_cases.proved(q, k, v, causal, kernel, name)


# ---------------------------------------------------------------- equal to the oracle


@pytest.mark.parametrize("length", LENGTHS + LONG)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.sample(1, of="the Hopper kernel")
def test_hopper_kernel(length, head_dim, seed, proof, hopper_or_cpu):
    for causal in (True, False):
        given = inputs(length, length + 5, 2, 1, head_dim, seed=seed)
        proof.record(flash_hopper_kernel, proved(*given, causal))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.sample(1, of="the Hopper kernel")
def test_rings_of_three_tiles(head_dim, seed, proof, hopper_or_cpu):
    """Lengths at which the rings come round, and do not end at their last tile."""
    kernel = partial(hopper.flash_attention_hopper, stages=3)
    for causal in (True, False):
        given = inputs(140, 900, 2, 1, head_dim, seed=seed)
        proof.record(flash_hopper_kernel, proved(*given, causal, kernel=kernel))


@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (1, 700), (5, 129), (200, 70), (300, 1)])
@pytest.mark.sample(1, of="the Hopper kernel")
def test_hopper_kernel_is_aligned_bottom_right(num_queries, num_keys, seed, proof, hopper_or_cpu):
    """With more queries than keys the first ones see no key: 0 and -inf, whole programs of them."""
    for causal in (True, False):
        given = inputs(num_queries, num_keys, seed=seed)
        proof.record(flash_hopper_kernel, proved(*given, causal))


@pytest.mark.parametrize("name", [name for name in ATTENTION_INPUTS if name != "non_contiguous"])
@pytest.mark.sample(1, of="the Hopper kernel")
def test_hopper_kernel_on_hard_inputs(name, seed, proof, hopper_or_cpu):
    given = inputs(150, 280, 2, 1, 64, seed=seed, name=name)
    proof.record(flash_hopper_kernel, proved(*given, True, name=name))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.sample(1, of="the Hopper kernel")
def test_hopper_kernel_with_grouped_heads(kv_heads, seed, proof, hopper_or_cpu):
    given = inputs(20, 140, 8, kv_heads, 64, seed=seed)
    proof.record(flash_hopper_kernel, proved(*given, True))


@pytest.mark.sample(1, of="the Hopper kernel")
def test_every_order_of_events_gives_the_same_bits(seed, compiled_on_cpu):
    """Programs, and the ends of copies, in four drawn orders."""
    given = inputs(200, 400, seed=seed)
    first, *others = [hopper.flash_attention_hopper(*given) for _ in range(4)]
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other))


def test_hopper_refuses_what_it_does_not_do():
    with pytest.raises(ValueError, match="64 or 128 for all"):
        hopper.flash_attention_hopper(*inputs(4, 4, head_dim=32, on="cpu"))
    q, k, v = inputs(4, 4, on="cpu")
    with pytest.raises(ValueError, match="dense"):
        hopper.flash_attention_hopper(q, k.expand(4, 1, 64)[:, :, :], v.repeat(2, 1, 1)[::2])
    with pytest.raises(ValueError, match="float32"):
        hopper.flash_attention_hopper(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="stages: got 4; accepted: 2 or 3"):
        hopper.flash_attention_hopper(q, k, v, stages=4)


# ---------------------------------------------------------------- planted bugs

# name: (the line, what it becomes, what the error says; "" where only the numbers show it)
WAIT_LOOP = (
    "            acc = warpgroup_mma_wait(0, deps=(adding,))\n            release(v, i - 1)\n"
)
# What is told first depends on the drawn order of events.
RACE = r"race in shared memory|deadlock|more arrivals|is read while"
WAITS = r"deadlock in program .* at the mbarrier of "
UNFINISHED = r"is read while a matrix product \(wgmma\) fills it"
FIRST_SCORES = "    scores = warpgroup_mma_wait(0, deps=(pending,))\n"
WAIT_SCORES = "scores = warpgroup_mma_wait(1, deps=(pending,))"
STORED = "    q_tile.store((acc / column(l_safe, OUT)).to(out_desc.dtype))\n"
FENCE = "    fence_async_shared()  # Triton's compiler would add it; in CUDA C++ you have to\n"
SENT = "    tma.async_copy_shared_to_global(out_desc, [start_m, head * HEAD_DIM], q_tile)\n"
BUGS = {
    "no wait for a tile": (
        "mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)",
        "pass",
        r"",
    ),
    "wrong phase of ready": (
        "mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)",
        "mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1 ^ 1)",
        r"",
    ),
    "phase of ready never turns": (
        "mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)",
        "mbarrier.wait(ready.index(i % STAGES), 0)",
        r"",
    ),
    "wrong phase of free": ("phase ^ 1)", "phase)", WAITS),
    "no wait for a free buffer": (
        "mbarrier.wait(free.index(stage), phase ^ 1)",
        "pass",
        RACE,
    ),
    "wait for v forgotten": (
        "            wait_for(v, i)\n",
        "",
        r"",
    ),
    "wait for q forgotten": (
        "q_tile = wait_for(q, CONSUMER)",
        "q_tile = tile_of(q, CONSUMER)",
        r"",
    ),
    "k freed before its product has ended": (
        FIRST_SCORES + "    release(k, 0)\n",
        "    release(k, 0)\n" + FIRST_SCORES,
        RACE,
    ),
    "k freed twice": (
        "            release(k, i)\n",
        "            release(k, i); release(k, i)\n",
        r"",
    ),
    "v freed before its product has ended": (
        WAIT_LOOP,
        "\n".join(reversed(WAIT_LOOP.rstrip("\n").split("\n"))) + "\n",
        RACE,
    ),
    "k never freed": ("            release(k, i)\n", "", WAITS),
    "one consumer is enough to free": (
        "count=CONSUMERS",
        "count=1",
        RACE,
    ),
    "half the bytes expected": (
        "desc.block_type.nbytes)",
        "desc.block_type.nbytes // 2)",
        RACE,
    ),
    "twice the bytes expected": (
        "desc.block_type.nbytes)",
        "desc.block_type.nbytes * 2)",
        WAITS,
    ),
    "the first buffer, always": (
        "ready.index(stage), tiles.index(stage))",
        "ready.index(stage), tiles.index(0))",
        r"",
    ),
    "p · v of the tile that is not there yet": ("tile_of(v, i - 1)", "tile_of(v, i)", r""),
    "scores used before their wait": (
        WAIT_SCORES,
        "scores = warpgroup_mma_wait(2, deps=(pending,))",
        UNFINISHED,
    ),
    "acc used before its wait": (
        "            acc = warpgroup_mma_wait(0, deps=(adding,))\n",
        "            acc = warpgroup_mma_wait(1, deps=(adding,))\n",
        UNFINISHED,
    ),
    "a ring of one buffer": ("STAGES=stages", "STAGES=1", WAITS),
    "the store starts before its tile is written": (
        STORED + FENCE + "    # TMA drops rows beyond the last\n" + SENT,
        SENT + STORED + FENCE,
        RACE,
    ),
    "the program ends before its store": (
        "    tma.store_wait(pendings=0)\n",
        "",
        r"the program ends before the copy engine has read",
    ),
    "queries that see no key visit no tile": (
        "gl.maximum(1, (end + BLOCK_N - 1) // BLOCK_N)",
        "(end + BLOCK_N - 1) // BLOCK_N",
        r"",
    ),
    "keys beyond the last are seen": ("key < num_keys,", "key < num_keys + BLOCK_N,", r""),
    "the diagonal is not seen": (
        "gl.expand_dims(key, 0) <= gl",
        "gl.expand_dims(key, 0) < gl",
        r"",
    ),
    "one tile too few is masked": (
        "num_tiles - full_end // BLOCK_N)",
        "num_tiles - full_end // BLOCK_N - 1)",
        r"",
    ),
    "acc is not rescaled": ("            acc = acc * column(alpha, OUT)\n", "", r""),
    "l is not rescaled": ("l_i * alpha + gl", "l_i + gl", r""),
    "both consumers take the first one's queries": ("    first += CONSUMER * ROWS\n", "", r""),
    "every query head has its own K and V": ("head // GROUP * HEAD_DIM", "head * HEAD_DIM", r""),
    "division by zero where no key is seen": ("gl.where(l_i == 0.0, 1.0, l_i)", "l_i", r""),
    "the log-sum-exp in base 2": (" * 0.6931471805599453", "", r""),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sample(1)
def test_a_planted_bug_is_caught(bug, tmp_path, seed, compiled_on_cpu):
    kernel = with_bug(hopper, (rings,), *BUGS[bug][:2], tmp_path).flash_attention_hopper
    with pytest.raises(NotEquivalent) as caught:
        for num_queries, num_keys, causal in [(200, 600, True), (300, 100, True), (70, 300, False)]:
            given = inputs(num_queries, num_keys, 2, 1, seed=seed)
            proved(*given, causal, kernel)
    said = BUGS[bug][2]
    assert re.search(said, str(caught.value)), caught.value
    assert not said or isinstance(caught.value, Fault)


# ---------------------------------------------------------------- the compiler


@pytest.mark.compiler
def test_the_compiler_keeps_the_overlap():
    """No spills, TMA and WGMMA; in all loops a thread's 64 exps are where p · v is in flight."""
    reports = check_all(spec for spec in specs.KERNELS if spec.name.startswith("hopper"))
    for report in reports:
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits and report.registers <= 168, report
        assert report.matrix_instruction == "HGMMA" and report.tma_instructions, report
        assert report.exp_beside_wgmma >= 4 * 64, report
