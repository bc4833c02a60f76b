"""What every command says of a mistake and of Ctrl-C: one line, and the right exit code."""

import importlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lessons.toolbox import command
from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.draw import figure
from lessons.toolbox.draw.again import draw_again
from lessons.toolbox.model.arguments import LONGEST_LINE, one_line

REPOSITORY = Path(__file__).parents[2]
COMMANDS = {
    "exercises": ("lessons.toolbox.exercises", "check", "2.1", "--impl", "solutions"),
    "proof": ("lessons.toolbox.proof", "table"),
    "bench": ("lessons.toolbox.measure.bench", "01", "--quick", "--out", "OUT"),
    "ladder": ("reference.ladder", "--requests", "2", "--out", "OUT"),
}
LABS = (
    "l13_prefix_caching.lab.measured",
    "l13_prefix_caching.lab.pictures",
    "l14_continuous_batching.lab.cost",
    "l14_continuous_batching.lab.pictures",
    "l23_experts.lab.more_pictures",
)


def raises(error: BaseException):
    def run() -> int:
        raise error

    return run


def test_a_mistake_is_one_short_line_and_2(capsys):
    assert run_command("try", lambda: 7) == 7
    assert run_command("try", raises(ValueError("two\nlines \x1b[2J" + "x" * 10**6))) == 2
    assert run_command("try", raises(OSError(28, "No space left on device"))) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 2 and said.startswith("try: two lines \\x1b[2Jx")
    assert max(map(len, said.splitlines())) <= LONGEST_LINE
    with pytest.raises(KeyError):  # a bug is no mistake of the caller, and keeps its traceback
        run_command("try", raises(KeyError("a bug")))


def test_ctrl_c_is_one_line_and_130(capsys):
    wrapped = RuntimeError("Error calling __set_name__")
    wrapped.__cause__ = KeyboardInterrupt()
    for error in (KeyboardInterrupt(), wrapped):
        assert run_command("try", raises(error)) == 130
    assert capsys.readouterr().err == "try: interrupted\n" * 2
    with pytest.raises(RuntimeError):
        run_command("try", raises(RuntimeError("a bug")))


def test_ctrl_c_after_another_error_ends_the_process_alike():
    """As it may come while a module is imported."""
    program = """
import sys
from lessons.toolbox.command import say_interrupted
sys.excepthook = say_interrupted
try: raise KeyboardInterrupt
except BaseException as error: raise RuntimeError from error
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_arguments_are_refused_in_one_line(capsys):
    parser = OneLineParser(prog="python -m lessons.thing")
    parser.add_argument("--count", type=int)
    parser.add_argument("--share", type=float)
    for given, begins, ends in (
        (["--count", "9" * 10**4 + "x"], "--count: got '999", "; accepted: a whole number\n"),
        (["--count", "2.5\n"], "--count: got '2.5", "; accepted: a whole number\n"),
        (["--share", "half"], "--share: got 'half'", "; accepted: a number\n"),
        (["--share"], "argument --share: expected one argument", "\n"),
    ):
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args(given)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and said.count("\n") == 1 and len(said) <= 301
        assert said.startswith(f"lessons.thing: {begins}") and said.endswith(ends)


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_refuses_what_it_does_not_know_and_writes_nothing(lab, capsys):
    for arguments, code in ((["--bogus"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(f"lessons.{lab}").main(arguments)
        assert stopped.value.code == code
    assert capsys.readouterr().err == f"lessons.{lab}: unrecognized arguments: --bogus\n"


def test_pictures_are_drawn_beside_their_module(tmp_path, capsys):
    file = tmp_path / "l01_copy/lab/more_pictures.py"
    pictures = {"one": (Figure, "A figure of a test."), "two": (Figure, "Another one.")}
    assert draw_again(str(file), "What.\n\nHow.", pictures, []) == 0
    assert capsys.readouterr().out == "one.svg\ntwo.svg\n"
    written = {path.name: path.read_text(encoding="utf-8") for path in file.parent.iterdir()}
    assert sorted(written) == ["one.svg", "two.svg"] and "Another one." in written["two.svg"]
    assert draw_again(str(file), "What.", {"bad": (Figure, None)}, []) == 2
    assert capsys.readouterr().err.startswith("more_pictures: alt of bad.svg is None")


@pytest.mark.parametrize(
    "lab", ["l13_prefix_caching.lab.measured", "l14_continuous_batching.lab.cost"]
)
def test_a_lab_that_cannot_write_says_so_before_it_measures(lab, capsys):
    assert importlib.import_module(f"lessons.{lab}").main(["--out", __file__]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--out: " in said


def test_one_line_keeps_both_ends():
    assert one_line(" a\n b ") == "a b"
    short = one_line("start " + "x" * 1000 + " end")
    assert len(short) == 300 and short.startswith("start") and short.endswith("end")


@pytest.mark.parametrize("place", ["file", "file/below", "a\0b", "x" * 300])
def test_a_folder_that_cannot_be_written_is_told(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out: .*; accepted: a folder"):
        check_writable(tmp_path / place)
    check_writable(tmp_path / "new/folder")
    assert list((tmp_path / "new/folder").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    """/dev/full takes no byte."""

    def full(dir):
        return open("/dev/full", "wb", buffering=0)

    monkeypatch.setattr(command.tempfile, "TemporaryFile", full)
    with pytest.raises(ValueError, match=r"--out: .*No space left on device"):
        check_writable(tmp_path)


def test_a_figure_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def fails(self, path, **rest):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(OSError, match="No space left"):
        figure.save(Figure(), tmp_path / "bars", alt="Bars.")
    assert list(tmp_path.iterdir()) == []


def hear_interrupts() -> None:
    """A shell starts what runs in the background deaf to SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.sample(2)
def test_ctrl_c_at_any_moment(name, tmp_path, request):
    """Also while libraries are imported. Killed by SIGINT is what a shell shows as 130."""
    for attempt in range(20 if request.config.getoption("--all") else 1):
        temporary, out = tmp_path / f"tmp{attempt}", tmp_path / f"out{attempt}"
        temporary.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", *(str(out) if a == "OUT" else a for a in COMMANDS[name])],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_interrupts,
        )
        # not sooner, because until Python has found the command it has no say
        delay = random.uniform(0.5, 6.0)
        print(f"{delay:.2f} s")
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        if "cannot load module more than once" in said:
            continue  # PyTorch swallowed it: it takes an interrupted NumPy for a missing one
        assert process.returncode in (0, 130, -signal.SIGINT) and said.count("\n") <= 1, said
        left = [path.name for path in temporary.iterdir()]
        # PyTorch's own cache, which it keeps between runs
        assert [file for file in left if not file.startswith("torchinductor_")] == []
        assert not out.exists() or not [file for file in out.iterdir() if file.name[0] == "."]
