"""Training all of the embedded models within a budget: what is stopped goes on, what is finished
stays.
"""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lessons.toolbox.proof.pack import write_pack
from models import retrain
from models import text as training_text

TOUCH = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write('x')"
WAIT = """
import time
from models.stop import Stop
stop = Stop().listen()
print("ready", flush=True)
while not stop.is_asked:
    time.sleep(0.01)
sys.exit("kept")
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """Commands that leave a mark, in place of trainings."""
    home = tmp_path / "models"
    folders = {"tiny": home / "tiny", "draft": home / "tiny-draft"}
    for folder in (
        *folders.values(),
        *(home / f"tiny-{kind}" for kind in (*retrain.KINDS, "pard")),
    ):
        folder.mkdir(parents=True)
    monkeypatch.setattr(retrain, "HERE", home)
    monkeypatch.setattr(retrain, "FOLDERS", folders)
    monkeypatch.setattr(retrain, "SHORTEST_S", -1e9)
    (tmp_path / "mark.py").write_text(TOUCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(
        retrain, "commands_of", lambda stage, _: [[["mark", str(home / stage[:4] / "mark")]]]
    )
    return home


def options(*argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["retrain", *map(str, argv)])
        patch.setattr(retrain, "retrain", lambda found: found)
        return retrain.main()


def test_what_is_finished_is_not_trained_again(course, tmp_path):
    for stage in ("loop", "draf", "acce", "head", "pard"):
        (course / stage).mkdir()
    pack = tmp_path / "trained.tar.gz"
    assert retrain.retrain(options("--pack", pack)) == 0
    assert retrain.retrain(options("--pack", pack)) == 0
    assert (course / "tiny/mark").read_text() == "x"
    shutil.unpack_archive(pack, tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere/models/tiny/mark").read_text() == "x"
    held = json.loads((tmp_path / "elsewhere/models/retraining.json").read_text())
    assert held["finished"] == list(retrain.STAGES)
    assert retrain.retrain(options("--tokens", 3)) == 0, "other settings: anew"
    assert (course / "tiny/mark").read_text() == "xx"


def test_a_stage_that_fails_or_finds_no_time_ends_the_run(course, capsys, monkeypatch):
    assert retrain.retrain(options()) == 1 and "loops: failed" in capsys.readouterr().out
    monkeypatch.setattr(retrain, "SHORTEST_S", 1e9)
    assert retrain.retrain(options()) == 1
    said = capsys.readouterr().out
    assert "tiny: finished earlier" in said and "loops: stopped" in said


def test_a_training_is_asked_to_stop_and_has_time_to_keep_what_it_needs(tmp_path, monkeypatch):
    (tmp_path / "waits.py").write_text("import sys\n" + WAIT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    start = time.monotonic()
    assert retrain.run_round([["waits"], ["waits"]], start + 1.0) == "stopped"
    assert time.monotonic() - start < retrain.TO_STOP_S
    command = [sys.executable, "-m", "waits"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[1] == "kept\n" and process.returncode == 1


def test_commands_are_those_of_the_trainings():
    asked = options("--tokens", 2, "--no-compile", "--head-minutes", 0.5)
    (tiny,) = retrain.commands_of("tiny", asked)
    assert tiny == [
        ["models.train", "tiny", "--tokens", "2.0", "--tokens-per-step", "8192", "--no-compile"]
    ]
    (acceptance,) = retrain.commands_of("acceptance", asked)
    assert acceptance[0][:4] == ["models.train", "acceptance", "--tokens", "16"]
    assert retrain.commands_of("loops", asked) == [[["models.loops", "--updates", "300"]]]
    features, heads, further = retrain.commands_of("heads", asked)
    assert [len(features), len(heads)] == [1, 3] and heads[2][1] == "eagle3"
    assert [command[1] for command in further] == ["mtp"], "after EAGLE, from which it starts"
    assert retrain.commands_of("pard", asked) == [[["models.train_pard", "--minutes", "0.5"]]]
    assert retrain.least_s("pard", asked) == retrain.least_s("heads", asked)
    assert retrain.least_s("heads", asked) == retrain.least_s("tiny", asked) + 30


def test_carried_tokens_are_the_tokens(tmp_path, seed):
    wide = np.random.default_rng(seed).integers(4096, size=1000).astype(np.uint16)
    text = dict(own=wide[:300], wide=wide, held_out=wide[::-1][:50])
    training_text.pack(text, tmp_path / "tokens.xz")
    found = training_text.unpacked(tmp_path / "tokens.xz")
    assert all(np.array_equal(found[name], text[name]) for name in text)
    assert str(found["python"]) == sys.version.split()[0]
    with pytest.raises(AssertionError, match="libraries"):
        training_text.pack(text | {"own": wide[1:300]}, tmp_path / "tokens.xz")


def test_a_pack_that_is_too_large_comes_in_parts(tmp_path, seed):
    folder = tmp_path / "tiny"
    folder.mkdir()
    data = np.random.default_rng(seed).bytes(10_000)
    (folder / "model.safetensors").write_bytes(data)
    (folder / "figure.png").write_bytes(data)
    pack = tmp_path / "pack.tar.gz"
    assert write_pack(pack, tmp_path, [folder]) == [pack]
    parts = write_pack(pack, tmp_path, [folder], part_bytes=4000)
    assert [part.name[-2:] for part in parts] == [".0", ".1", ".2"] and not pack.exists()
    pack.write_bytes(b"".join(part.read_bytes() for part in parts))
    shutil.unpack_archive(pack, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out/tiny").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out/tiny/model.safetensors").read_bytes() == data
