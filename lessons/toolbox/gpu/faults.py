"""What a kernel does wrong, in one sentence with its place."""

from lessons.toolbox.proof.traps import NotEquivalent


class Fault(NotEquivalent):
    """A compiled kernel did what a GPU answers with wrong numbers, a crash or a standstill. So it
    is equal to nothing, and a test that expects a planted bug to be seen sees this one.
    """

    def __init__(self, message: str):
        super().__init__("fault", message.removeprefix("fault: "))


class UnknownInstruction(Exception):
    """The machine does not know an instruction. None is ever skipped."""
