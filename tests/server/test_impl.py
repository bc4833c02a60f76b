"""A server on a learner's solutions: it says which it uses, and one that raises ends a request, not
the server.
"""

import asyncio
import subprocess

import httpx
import pytest
from rich.console import Console

from lessons.toolbox.exercises import drop_ins, in_use
from lessons.toolbox.exercises.drop_ins import PartFailed, put_in_place, use_implementation
from lessons.toolbox.exercises.exercise import ROOT, SOLUTIONS
from reference.engine.assembly import engine_over
from reference.engine.async_engine import AsyncEngineArgs, AsyncLLMEngine
from reference.server import flags
from reference.server.__main__ import main, use_exercises
from reference.server.app import new_service
from tests.engine_cases import greedy, new_model
from tests.server.live import Live, server_args

RAISES = '    raise IndexError("off by one")\n'


@pytest.fixture
def undone(monkeypatch):
    """What a test puts in place is taken out again."""
    replaced = []

    def noted(original, part):
        replaced.append((original, part))
        put_in_place(original, part)

    monkeypatch.setattr(drop_ins, "put_in_place", noted)
    yield
    for original, part in reversed(replaced):
        put_in_place(part, original)


@pytest.fixture
def mine(tmp_path):
    """mine(file, line, more) writes a learner's file with `more` in front of a line of it; returns
    its folder.
    """

    def write(name, line, more):
        (path,) = SOLUTIONS.glob(f"{name}_*.py")
        text = path.read_text()
        assert text.count(line) == 1
        (tmp_path / path.name).write_text(text.replace(line, more + line))
        return tmp_path

    return write


def test_the_table_says_what_is_used_and_why_not(mine, undone, monkeypatch, capsys):
    todo = '    raise NotImplementedError("Exercise 25.2: later")\n'
    mine("l25", "    answers: list[list[int]] = [[] for _ in first]\n", todo)
    mine("l24", '    found: dict[bytes, State | None] = {b"": state}\n', "")
    folder = mine("l22", "    v = now = largest_finish = 0.0\n", "")
    parts = use_implementation(str(folder), failing=["22.2"])
    console = Console(width=240, force_terminal=False)
    in_use.print_parts(parts, console, unchecked=["24.1", "25.2"])
    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "lesson 24, new_mask" in rows["24.1"] and "yours, not checked" in rows["24.1"]
    assert "its last check failed: make check LESSON=22.2" in rows["22.2"]
    assert "is missing" in rows["16.2"] and "not solved yet: 25.2" in said
    assert f"1 of {len(parts)} parts are yours" in said


def test_a_check_that_failed_keeps_a_part_out(monkeypatch):
    monkeypatch.setattr(in_use, "status_now", lambda e: "FAIL" if e.id == "16.2" else "PASS")
    assert in_use.parts_that("FAIL", "exercises") == ["16.2"]
    assert in_use.parts_that("FAIL", "solutions") == []


def test_the_stubs_serve_nothing(undone, capsys, monkeypatch):
    use_exercises("exercises")
    assert "0 of " in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, said",
    [
        (["--impl", "nowhere"], "--impl: got 'nowhere'; accepted: solutions, exercises"),
        (["--impl", "exercises", "-tp", "2"], "impl: got 'exercises'; accepted: none where"),
    ],
)
def test_what_cannot_be_is_one_line(given, said, capsys):
    assert main(given) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_make_hands_it_on():
    done = subprocess.run(
        ["make", "-n", "serve", "IMPL=exercises"], cwd=ROOT, capture_output=True, text=True
    )
    assert "-m reference.server --model models/tiny --port 8000 --impl exercises" in done.stdout
    assert flags.read_args(flags.parse(["--impl", "solutions"], "x")).impl == "solutions"


def test_a_part_that_raises_ends_its_request_alone(mine, undone, capfd):
    """The client is told the exercise and the line; other requests are served as before."""
    folder = mine("l24", '    found: dict[bytes, State | None] = {b"": state}\n', RAISES)
    use_implementation(str(folder), only="24.1")
    live = Live(new_service(server_args(impl=str(folder))))
    try:
        url, ask = f"{live.url}/v1/completions", dict(model="tiny", prompt="def", max_tokens=3)
        for _ in range(2):
            answer = httpx.post(url, json=ask | dict(guided_regex="a+"), timeout=60)
            assert answer.status_code == 500
            said = answer.json()["error"]["message"]
            assert said.startswith("exercise 24.1: ") and "IndexError: off by one" in said
            assert "l24_structured_outputs.py, line " in said
        assert httpx.post(url, json=ask, timeout=60).status_code == 200
    finally:
        live.stop()
        live.service.engine.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_a_part_that_raises_before_a_step_ends_all_that_are_there(mine, undone):
    """No request waits for ever for a scheduler that cannot schedule."""
    line = "        at = held // self.block_size  # where the next token goes\n"
    folder = mine("l12", line, "    " + RAISES)
    use_implementation(str(folder), only="12.2")
    args = AsyncEngineArgs(enable_prefix_caching=False, num_gpu_blocks_override=9, max_model_len=32)
    engine = AsyncLLMEngine(engine_over(new_model(), None, args))

    async def ask(name):
        with pytest.raises(PartFailed, match=r"exercise 12\.2: "):
            async for _ in engine.generate([1, 2, 3], greedy(4), name):
                pass

    async def both():
        await asyncio.gather(ask("a"), ask("b"))

    asyncio.run(both())
    assert engine.is_ready and not engine.waiters
    engine.shutdown()
