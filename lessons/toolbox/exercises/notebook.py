"""What a notebook calls to check exercises."""

from lessons.toolbox.exercises.report import run_checks


def check(which: str | int | None = None, impl: str = "exercises") -> bool:
    """Run the checks of a lesson ("02"), of one exercise ("2.1") or of all, print a summary; True
    if every one passed.
    """
    return run_checks(which, impl)
