"""Proves that collectives do what their names say, also for tensors that are not dense, that a
mesh puts every rank in its groups, and that ranks which raise, die or hang end all in one line.
"""

import os
import signal
import sys
import threading
import time

import pytest
import torch

from lessons.l20_parallelism.lab import faults
from lessons.l20_parallelism.processes import launch
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh, new_links

MESHES = [Mesh(), Mesh(tp=4), Mesh(tp=2, pp=3), Mesh(2, 2, 2), Mesh(pp=2, dp=3)]


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize("layout", ["dense", "transposed", "in wider rows"])
def test_collectives(layout):
    for rank, found in enumerate(run_ranks(3, faults.all_collectives, layout)):
        x = [faults.tensor_of(r) for r in range(3)]
        assert torch.equal(found["all_reduce"], x[0] + x[1] + x[2])
        assert torch.equal(found["all_gather, last"], torch.cat(x, -1))
        assert torch.equal(found["all_gather, first"], torch.cat(x, 0))
        assert torch.equal(found["reduce_scatter"], (x[0] + x[1] + x[2])[2 * rank : 2 * rank + 2])
        rows = [x[r][sum(range(rank + 1)) :][: rank + 1] for r in range(3)]
        assert torch.equal(found["all_to_all"], torch.cat(rows))
        assert torch.equal(found["broadcast"], x[1])
        assert torch.equal(found["sent along"], x[max(0, rank - 1)])
        assert torch.equal(found["exchange"], x[(rank - 1) % 3])
        assert found["is in place"]
        assert found["bytes"]["all_reduce"] == x[0].nbytes
        assert found["calls"]["send"] == 1 + (rank < 2)


def test_the_numbers_that_ranks_draw_are_their_own():
    drawn = run_ranks(2, faults.draw) + run_ranks(2, faults.draw)
    assert len(set(drawn)) == 4


# ---------------------------------------------------------------- the mesh


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_has_a_place_and_one_group_of_each_kind(mesh):
    assert [mesh.rank(*mesh.place(rank)) for rank in range(mesh.size)] == list(range(mesh.size))
    kinds = mesh.tensor_groups(), mesh.pipeline_groups(), mesh.expert_groups()
    for groups, length in zip(kinds, (mesh.tp, mesh.pp, mesh.tp * mesh.dp)):
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert all(len(group) == length for group in groups)
    for group in mesh.tensor_groups():
        assert group == list(range(group[0], group[0] + mesh.tp)), "shards are neighbours"
    for stage, group in enumerate(mesh.expert_groups()):
        assert {mesh.place(rank)[1] for rank in group} == {stage}


def test_links_of_real_ranks():
    for rank, found in enumerate(run_ranks(4, faults.members, Mesh(tp=2, pp=2))):
        first, low = rank // 2 * 2, rank % 2
        assert found == ([first, first + 1], [low, low + 2], rank < 2, rank >= 2)


def test_a_process_alone_is_a_mesh_of_one():
    links = new_links(Mesh())
    assert links.tensor.size == links.pipeline.size == 1
    assert links.is_first_stage and links.is_last_stage


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "fault, rank, words",
    [
        ("is killed", 2, "rank 2 died (signal 9)"),
        ("exits", 1, "rank 1 died (exit code 3)"),
        ("raises", 1, "rank 1 raised ValueError: x: got 3; accepted: 4"),
        ("raises two lines", 0, "rank 0 raised ValueError: x: got a b"),
    ],
)
def test_one_rank_that_fails_ends_all_in_one_line(fault, rank, words):
    """The others wait in a collective that cannot end."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(3, faults.fails, rank, fault)
    assert str(caught.value) == words and caught.value.rank == rank
    # a second or two on an idle machine, and 120 if the others were waited for
    assert time.monotonic() - start < 60


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: finds sockets in /proc")
@pytest.mark.parametrize(
    "wait_s, words",
    [(60, r"rank 1 died \(exit code 3\)"), (0, r"rank [02] raised RuntimeError.*closed")],
)
def test_an_echo_waits_for_its_cause(wait_s, words, monkeypatch):
    """And without the wait the wrong rank would be named."""
    monkeypatch.setattr(launch, "ECHO_S", wait_s)
    start = time.monotonic()
    with pytest.raises(RankError, match=words):
        run_ranks(3, faults.dies_slowly, 1, 1.0 if wait_s else 60.0)
    assert time.monotonic() - start < 50, "told as soon as it is known"


def test_a_mistake_that_sounds_like_an_echo_is_told():
    """After the wait: no process dies, and the others would wait for two minutes."""
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 raised RuntimeError: mat1 and mat2 shapes"):
        run_ranks(3, faults.raises_as_an_echo_does, 2)
    assert launch.ECHO_S <= time.monotonic() - start < 60


def test_a_rank_that_hangs_is_named_and_ended(tmp_path):
    """No process is left that would take a core or a GPU's memory."""
    for timeout_s in (1.5, 10, 60):  # longer if a busy machine has not started both by then
        told = tmp_path / f"{timeout_s} s"
        with pytest.raises(RankError) as caught:
            run_ranks(2, faults.hangs, 1, str(told), timeout_s=timeout_s)
        if caught.value.rank == 1:
            break
    assert str(caught.value) == f"rank 1 was not done within {timeout_s:g} s"
    check_gone(told)


def test_what_cannot_be_sent_is_an_error_and_no_hang():
    with pytest.raises(RankError, match=r"rank 0 raised .*pickle"):
        run_ranks(1, faults.returns_what_cannot_be_pickled)


@pytest.mark.parametrize("size", [0, -1, True, "2"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="size: got"):
        run_ranks(size, faults.draw)


def test_ctrl_c_ends_the_ranks(tmp_path):
    told = tmp_path / "processes"
    me = threading.get_ident()

    def press_when_both_run() -> None:
        while not (told.exists() and len(told.read_text().split()) == 2) and not done.wait(0.05):
            pass
        if not done.wait(0.5):  # by then we wait for their results
            signal.pthread_kill(me, signal.SIGALRM)

    done = threading.Event()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    pressing = threading.Thread(target=press_when_both_run)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, faults.hangs, 1, str(told))
    finally:
        done.set()
        pressing.join()
        signal.signal(signal.SIGALRM, before)
    check_gone(told)


def test_ranks_hear_no_ctrl_c():
    """Not from their first instruction on, so none dies with a traceback while it starts."""
    assert run_ranks(2, faults.interrupts_itself) == [0, 1]


def check_gone(told):
    pids = [int(pid) for pid in told.read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_environment_stays_as_it_was(monkeypatch):
    """Programs that are started later must not find another course than their own."""
    for before in (None, "/somewhere"):
        if before is None:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        else:
            monkeypatch.setenv("PYTHONPATH", before)
        run_ranks(1, faults.draw)
        assert os.environ.get("PYTHONPATH") == before
