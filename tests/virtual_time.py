"""An event loop whose clock jumps to the next event: programs that sleep for minutes take no time,
and their times are exact.
"""

import asyncio
import selectors


class JumpingSelector(selectors.DefaultSelector):
    """Never waits: it tells the loop's clock how long it would have."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found and timeout:
            self.now_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.selector = JumpingSelector()
        super().__init__(self.selector)

    def time(self):
        return self.selector.now_s


def run_virtual(main):
    """asyncio.run on a clock that jumps. For what waits for nothing but time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
