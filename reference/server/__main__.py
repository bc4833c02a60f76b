"""An OpenAI-compatible server.

    python -m reference.server --model models/tiny --port 8000
    inference-ladder serve models/tiny --enable-lora --lora-modules sql=models/tiny-lora-sql

`flags` has the flags, `run` the process.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import sys

from lessons.toolbox.command import run_command, typed


def serve(arguments: list[str], prog: str) -> int:
    """Serve until a signal comes. Returns the exit code."""
    from reference.server import flags

    found = flags.parse(arguments, prog)
    for note in flags.notes(found):
        print(note, file=sys.stderr)
    args = flags.read_args(found)
    if args.impl is not None:
        use_exercises(args.impl)
    from reference.server.run import serve_forever

    return serve_forever(args)


def use_exercises(impl: str) -> None:
    """Put a learner's solutions in the places of the engine's parts, but not those whose checks
    fail, and say which. Raises ValueError for an unknown folder.
    """
    from rich.console import Console

    from lessons.toolbox.exercises.drop_ins import use_implementation
    from lessons.toolbox.exercises.in_use import parts_that, print_parts
    from lessons.toolbox.exercises.progress import CHANGED, FAIL

    parts = use_implementation(impl, failing=parts_that(FAIL, impl))
    console = Console(stderr=True, highlight=False)
    print_parts(parts, console, unchecked=parts_that(CHANGED, impl))


def main(arguments: list[str] | None = None) -> int:
    """python -m reference.server, or inference-ladder serve; every mistake is one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = typed("python -m reference.server")
    return run_command(name.removeprefix("python -m "), lambda: serve(arguments, name))


if __name__ == "__main__":
    sys.exit(main())
