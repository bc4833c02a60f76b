"""Create .venv from requirements.txt, once. Called by the Makefile; needs nothing but Python itself.

    python3 lessons/toolbox/install.py

A second run does nothing and needs no network. An install that was interrupted is started over, because
half-unpacked packages claim to be installed. Every failure is one line that says what to do.
This file keeps to old syntax, so that an old Python can still print the line that says it is too old.
"""

import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(
    VENV, "installed"
)  # written last: its presence means that everything before it finished
REQUIREMENTS = os.path.join(ROOT, "requirements.txt")
OLDEST = (3, 10)
NEEDED_GB = 3.0


def fail(line):
    print("setup: " + line, file=sys.stderr)
    sys.exit(1)


def wanted():
    """What an up-to-date stamp holds: the requirements' hash and the Python that they were installed for."""
    with open(REQUIREMENTS, "rb") as file:
        return "{} {}.{}\n".format(hashlib.sha256(file.read()).hexdigest(), *sys.version_info[:2])


def is_installed():
    try:
        with open(STAMP) as file:
            return file.read() == wanted() and os.path.exists(PYTHON)
    except OSError:
        return False


def check_machine():
    if sys.version_info < OLDEST:
        fail(
            "Python {}.{} is too old: 3.10 or newer is needed. Choose one: make setup PYTHON=python3.12".format(
                *sys.version_info[:2]
            )
        )
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < NEEDED_GB:
        fail(
            "{:.1f} GB free in {}, about {:.0f} GB are needed. Make room and run it again.".format(
                free_gb, ROOT, NEEDED_GB
            )
        )
    try:
        import ensurepip  # noqa: F401  (Debian ships it apart)
        import venv  # noqa: F401
    except ImportError:
        fail("this Python has no venv module. On Debian or Ubuntu: apt install python3-venv")


def run(command, doing):
    """Run a command, its output shown as it comes; on failure one line in the end, from the last lines it printed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
    )
    tail = []
    for line in process.stdout:
        if line.strip() and "already satisfied" not in line:
            print("  " + line.rstrip()[:150], flush=True)
            tail = (tail + [line.strip()])[-40:]
    if process.wait() == 0:
        return
    text = "\n".join(tail)
    if "No space left" in text or "Errno 28" in text:
        fail("the disk is full while " + doing + ". Make room and run it again; it starts over.")
    if any(
        sign in text
        for sign in (
            "NewConnectionError",
            "Connection",
            "Temporary failure",
            "timed out",
            "No matching dist",
        )
    ):
        fail(
            doing
            + " failed: a package could not be found or reached. Check the network and run it again."
        )
    fail(doing + " failed (see above). Run it again, or remove .venv first.")


def main():
    if is_installed():
        return
    check_machine()
    if os.path.isdir(VENV):
        print("setup: an older or unfinished .venv is replaced", flush=True)
        shutil.rmtree(VENV)
    print(
        "setup: creating .venv (about {:.0f} GB, some minutes, once)".format(NEEDED_GB), flush=True
    )
    run([sys.executable, "-m", "venv", VENV], "creating .venv")
    pip = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "-r",
        REQUIREMENTS,
    ]
    if os.environ.get("TORCH_INDEX"):
        pip += ["--extra-index-url", os.environ["TORCH_INDEX"]]
    run(pip, "installing requirements.txt")
    run([PYTHON, "-c", "import torch, transformers"], "a first import of torch and transformers")
    with open(STAMP + ".part", "w") as file:
        file.write(wanted())
    os.replace(STAMP + ".part", STAMP)
    print("setup: done. Try: make demo", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted. Run it again; it starts over.")
    except OSError as error:
        fail("{}. Mend that and run it again.".format(error))
