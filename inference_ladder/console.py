"""The command `inference-ladder`: the course without a clone of its repository.

    pip install inference_ladder-….whl
    inference-ladder start my-ladder     the whole course, in a folder of your own
    cd my-ladder
    inference-ladder check 02            your exercises, checked

A wheel holds the course as it is in the repository, in inference_ladder/course. Commands run in the
learner's folder if they are called in one or below it, else from the wheel.
"""

# Nothing of the course is imported here: which copy of it counts is found out first.
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from inference_ladder import __version__

HERE = Path(__file__).resolve().parent
# What a wheel holds, and what `start` copies; pyproject.toml names the same. Not the rest of the
# repository, which serves its own machinery.
FOLDERS = ("lessons", "reference", "exercises", "solutions", "notebooks", "models", "results")
FOLDERS += ("tests", "book", "deploy", "ko")
FILES = (
    "README.md",
    "README.ko.md",
    "INSTALL.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CITATION.cff",
)
FILES += ("LICENSE", "Makefile", "Dockerfile", "pyproject.toml", "requirements.txt", "conftest.py")
FILES += (".gitignore", ".dockerignore")
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".hypothesis")
TYPED = "LADDER_COMMAND"  # what the reader typed, for messages; lessons/toolbox/command.py reads it


@dataclass(frozen=True)
class Command:
    """A module of the course that is run with the reader's arguments."""

    module: str
    says: str
    before: tuple[str, ...] = ()  # arguments that come first
    writes: bool = False  # into the course's own folder, so it needs the learner's


EXERCISES = "lessons.toolbox.exercises"
COMMANDS = {
    "demo": Command("reference.ladder", "climb the ladder: speed, and the same tokens"),
    "generate": Command("reference.generate", 'continue a text: generate "def quicksort("'),
    "serve": Command("reference.server", "the OpenAI-compatible server: serve models/tiny"),
    "check": Command(EXERCISES, "your exercises, checked: check 02, or 2.1", ("check",), True),
    "progress": Command(EXERCISES, "what you solved, and what is left", ("progress",), True),
    "profile": Command("lessons.toolbox.profile", "a lesson's kernels, counted line by line: 09"),
    "doctor": Command("lessons.toolbox.measure.device", "what this machine can run"),
}


def main(arguments: list[str] | None = None) -> int:
    """The exit code; 2 for a mistake, which is told in one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"inference-ladder {__version__}")
        return 0
    try:
        if name == "start":
            return start(rest)
        if name not in COMMANDS:
            raise ValueError(f"got {name!r}; accepted: start, {', '.join(COMMANDS)}")
        return run(name, rest)
    except (ValueError, OSError) as error:
        print(f"inference-ladder: {error}", file=sys.stderr)
        return 2


def overview() -> str:
    """What the commands do, a line each."""
    rows = [("start FOLDER", "the whole course, in a new folder of your own")]
    rows += [(name, command.says) for name, command in COMMANDS.items()]
    lines = [f"  inference-ladder {name:13} {says}" for name, says in rows]
    return "\n".join(["The Inference Ladder", *lines, "Each takes --help, but for start."])


# ---------------------------------------------------------------- which copy of the course


def packed() -> Path:
    """The course in the wheel; in a clone the clone itself."""
    course = HERE / "course"
    return course if course.is_dir() else HERE.parent


def is_course(folder: Path) -> bool:
    """Whether a folder is the course's."""
    return (folder / "lessons/toolbox/command.py").is_file() and (folder / "exercises").is_dir()


def learners(here: Path) -> Path | None:
    """The learner's copy of the course around a folder, or None."""
    return next((folder for folder in (here, *here.parents) if is_course(folder)), None)


# ---------------------------------------------------------------- what the commands do


def start(arguments: list[str]) -> int:
    """Copy the course into a new folder. Raises ValueError for any other folder: nothing that a
    learner wrote is ever overwritten.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        got = " ".join(arguments) or "nothing"
        raise ValueError(f"start: got {got}; accepted: one folder, which is new or empty")
    folder = Path(arguments[0]).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"start: got {folder}, which is not empty; accepted: a new folder")
    course = packed()
    folder.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        shutil.copytree(course / name, folder / name, ignore=NOT_COPIED)
    for name in FILES:
        if (course / name).is_file():
            shutil.copy2(course / name, folder / name)
    print(f"The course is in {folder}. Next:")
    print(f"  cd {folder}")
    print("  inference-ladder doctor       what this machine can run")
    print("  inference-ladder check 01     your exercises of lesson 1, in exercises/")
    print("Read README.md first. Where it says `make check LESSON=02`, type what is above.")
    return 0


def run(name: str, rest: list[str]) -> int:
    """Become the command. Raises ValueError where there is no folder of the learner's and it needs
    one.
    """
    command = COMMANDS[name]
    course = learners(Path.cwd()) or packed()
    if command.writes and course == HERE / "course":
        raise ValueError(
            f"{name}: this is no folder of yours; accepted: one that `inference-ladder start "
            "FOLDER` made, or one below it"
        )
    environment = os.environ | {TYPED: f"inference-ladder {name}"}
    # the course before all else, and nothing by chance from the folder where the reader happens
    # to be: a lesson's folder has modules with names of the standard library's
    paths = [str(course), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    words = [sys.executable, "-m", command.module, *command.before, *rest]
    sys.stdout.flush()
    # in the place of this process, so that signals and exit codes are the command's own
    os.execve(sys.executable, words, environment)


if __name__ == "__main__":
    sys.exit(main())
