"""The film of a kernel's compiled code, taken in another process, beside the interpreter's."""

import linecache

import pytest
import torch

from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.draw.film import film, film_text
from lessons.toolbox.draw.film_panels import record
from lessons.toolbox.gpu import another_process
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.film import Film
from lessons.toolbox.kernels.relaunch import compiled, launches_of
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import interpreting
from tests.toolbox.film_cases import LESSONS
from tests.toolbox.film_kernels import (
    accepted_by_the_interpreter,
    boxes,
    ignoring,
    pipelined,
    racing,
    rows,
    through_memory,
    wide,
)

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="NOT RUN: kernels are compiled here"),
    pytest.mark.sample(1, of="compiled code"),
]
HERE = "tests.toolbox.film_kernels"


def both(launch) -> tuple[Film, Film]:
    """The interpreter's film of a launch and that of its compiled code."""
    with launches_of() as launches, Film() as interpreted:
        launch()
    again = compiled(interpreted, launches)
    assert interpreted.chip is None and again.chip == 90
    return interpreted, again


def touched(recording: Film, kind: str) -> set[tuple]:
    return {
        (access.kernel, access.program, address)
        for access in recording.accesses
        if access.kind == kind
        for address in access.addresses.tolist()
    }


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.filterwarnings("ignore:divide by zero")  # log2(0) of an empty split is meant
def test_compiled_code_touches_what_the_interpreter_does(name, seed):
    """Each program of each launch: the same elements loaded, and the same stored. The
    compiled code names lines that the interpreter also ran.
    """
    interpreted, again = both(LESSONS[name])
    for kind in ("load", "store", "atomic"):
        assert touched(interpreted, kind) == touched(again, kind), kind
    assert touched(again, "load") and touched(again, "store")
    if (
        name != "04"
    ):  # there a call is an argument of another, and the interpreter names its own line
        assert {a.line for a in again.accesses} <= {a.line for a in interpreted.accesses}
    assert not any(len(access.outside) for access in again.accesses)


def test_a_vector_load_by_hand():
    """256 numbers a program, one warp, 8 a lane: two loads of 4 neighbours, and 32 sectors."""
    x, out = torch.zeros(512), torch.zeros(512)
    _, again = both(lambda: wide[(2,)](x, out, num_warps=1))
    assert [(a.kind, a.program[0]) for a in again.accesses] == [
        ("load", 0),
        ("load", 1),
        ("store", 0),
        ("store", 1),
    ]
    for access, tensor in zip(again.accesses, (x, x, out, out)):
        want = torch.zeros(512, dtype=torch.int64)
        want[256 * access.program[0] :][:256] = 1
        assert torch.equal(access.elements(tensor), want)
        assert (access.sectors, access.needed, access.together) == (32, 32, 4)
    assert again.accesses[0].line == "tl.store(out_ptr + at, tl.load(x_ptr + at) + 1)"


def test_warps_that_hold_copies_ask_again():
    """16 numbers and 4 warps: each asks for the 2 sectors. Of the store only one warp does."""
    x, out = torch.zeros(3, 16), torch.zeros(3)
    _, again = both(lambda: rows[(3,)](x, out, 16, 0, BLOCK=16))
    load, store = (a for a in again.accesses if a.program == (1, 0, 0))
    assert (load.sectors, load.needed, store.sectors, store.needed) == (8, 2, 1, 1)
    assert (load.elements(x)[1] > 0).all() and not load.elements(x)[::2].any()


def test_a_wrong_mask_shows(capsys):
    """It reads the neighbour's first column; in the last row it leaves x, and the interpreter goes
    on.
    """
    x, out = torch.zeros(3, 5), torch.zeros(3)
    figure = film(lambda: rows[(2,)](x, out, 5, 1, BLOCK=8), {"x": x}, programs=[0])
    said = " ".join(t.get_text() for t in figure.findobj() if hasattr(t, "get_text")).split()
    assert "compiled for an H100, run on a CPU" in " ".join(said)
    text = film_text(lambda: rows[(2,)](x, out, 5, 1, BLOCK=8), {"x": x}, programs=[0])
    assert "load x, 4/1 sectors" in text and text.split("\n")[3:5] == ["     RRRRR", "     R····"]
    recording, _ = record(lambda: rows[(3,)](x, out, 5, 1, BLOCK=8))
    assert recording.chip is None and recording.source.endswith("stops at an address outside")
    assert [len(a.outside) for a in recording.accesses if a.kind == "load"].count(1) == 1
    assert not capsys.readouterr().out, "compiled code was not tried"


def test_loads_ahead_of_their_use_are_accesses_of_their_own():
    """Copies of two later steps are under way (cp.async), each step once, before the store."""
    x, out = torch.ones(5, 128), torch.zeros(128)
    _, again = both(lambda: pipelined[(1,)](x, out, 5))
    *loads, store = (a for a in again.accesses if len(a.addresses))
    assert store.kind == "store" and [a.kind for a in loads] == ["load"] * 5
    for step, load in enumerate(loads):
        assert load.elements(x).sum(1).tolist() == [128 * (i == step) for i in range(5)]


def test_the_copy_engines_boxes():
    """TMA moves 8 rows of 16 columns a program: 2 sectors of each row, and no lane of a vector."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = torch.randn(16, 32), torch.zeros(16, 16)
    given = [TensorDescriptor.from_tensor(t, [8, 16]) for t in (x, out)]
    interpreted, again = both(lambda: boxes[(2,)](*given))
    for kind in ("load", "store"):
        assert touched(interpreted, kind) == touched(again, kind)
    load = next(a for a in again.accesses if a.kind == "load" and a.program == (1, 0, 0))
    want = torch.zeros(16, 32, dtype=torch.int64)
    want[8:, 16:] = 1
    assert torch.equal(load.elements(x), want)
    assert (load.sectors, load.needed, load.together) == (16, 16, 1)


CELL = """
@triton.jit
def moved(x, BY: tl.constexpr):
    return x + BY

@triton.jit
def local(x_ptr):
    at = moved(tl.program_id(0), SHIFT)
    tl.store(x_ptr + at, at)
"""


def test_a_kernel_of_a_notebook_with_what_it_uses():
    """Its source goes over, with the constants and functions that it names."""
    file = "<a notebook's cell>"
    linecache.cache[file] = len(CELL), None, CELL.splitlines(keepends=True), file
    cell = {"__name__": "__main__", "triton": triton, "tl": tl, "SHIFT": tl.constexpr(3)}
    exec(compile(CELL, file, "exec"), cell)
    x = torch.zeros(8)
    _, again = both(lambda: cell["local"][lambda meta: (2,)](x))
    assert [a.elements(x).nonzero().item() for a in again.accesses] == [3, 4]
    assert {a.line for a in again.accesses} == {"tl.store(x_ptr + at, at)"}


def test_views_of_one_storage_and_two_launches():
    """The second launch sees what the first one wrote; both tensors lie in one storage."""
    whole = torch.arange(512.0).view(2, 256)

    def launch():
        wide[(1,)](whole[0], whole[1], num_warps=1)
        wide[(1,)](whole[1], whole[0], num_warps=1)

    _, again = both(launch)
    moved = [a.elements(whole).sum(1).tolist() for a in again.accesses]
    assert moved == [[256, 0], [0, 256], [0, 256], [256, 0]]


def test_what_is_written_by_one_name_is_read_by_another():
    """Both are the same memory there too: element 5, and not 0, is stored."""
    place, out = torch.zeros(1, dtype=torch.int64), torch.zeros(8)
    _, again = both(lambda: through_memory[(1,)](place, place.view(1, 1), out, num_warps=1))
    assert again.accesses[-1].elements(out).nonzero().tolist() == [[5]]


@pytest.mark.parametrize(
    "launch, reason",
    [
        (lambda x: accepted_by_the_interpreter[(1,)](x), "Loop-carried variable best"),
        (lambda x: ignoring[(1,)](x, THIS=lambda: 0), "pickle"),
        (lambda x: racing[(3,)](x), "race in global memory: it writes bytes of out_ptr"),
    ],
)
def test_why_a_film_is_the_interpreters_is_one_line(launch, reason, capsys):
    recording, _ = record(lambda: launch(torch.zeros(4)))
    assert recording.source == "recorded in Triton's interpreter"
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and reason in said, said


def test_a_compiled_film_is_readable():
    launch = LESSONS["09"]
    figure = film(launch, programs=[(0, 0, 0), (0, 1, 0)])
    assert not texts_outside(figure) and not overlapping_texts(figure)


# ---- where kernels are compiled already


def test_a_film_where_kernels_are_compiled_ends_with_the_fault():
    source, found, fault = call(f"{HERE}:film_here", chip=80)
    assert source == "compiled for an A100, run on a CPU"
    assert found == [("load", 0, 6, 0), ("load", 1, 5, 1)]
    assert "20 of x_ptr" in fault or "40 of x_ptr" in fault


# ---- the process that forks


def test_no_call_sees_an_earlier_one():
    first = call(f"{HERE}:change_the_course", chip=90)
    parent, runs, left = call(f"{HERE}:see_the_course", chip=90)
    assert parent == call(f"{HERE}:see_the_course", chip=90)[0] != first
    assert runs and left is None


def test_an_ended_process_is_started_again():
    call(f"{HERE}:see_the_course", chip=90)
    another_process._waiting[90].kill()
    another_process._waiting[90].wait()
    assert call(f"{HERE}:see_the_course", chip=90)[1]
    with pytest.raises(RuntimeError, match=":nothing: AttributeError: module"):
        call(f"{HERE}:nothing", chip=90)
