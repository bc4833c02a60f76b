"""How a long training is asked to end."""

import signal


class Stop:
    """Whether this program was asked to end, by Ctrl-C or by a time limit's SIGTERM: a training
    looks after each step, so it is never left in the middle of one. Asked twice, it ends at once.
    """

    def __init__(self):
        self.is_asked = False

    def listen(self) -> "Stop":
        """From now on the two signals ask."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)
        return self

    def ask(self, number: int, frame) -> None:
        """One of the signals has come. Raises KeyboardInterrupt the second time."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
