"""An answer in a conversation: its text, and the calls of functions in it."""

from typing import Any

from reference.server.calls import Answer, Delta
from reference.server.protocol.chat import Tool
from reference.server.tools import CalledTool, Part, reader_for


class AnswerReader:
    """Reads one answer as it comes. parallel: whether it may make more than one call; what comes
    behind the first is dropped otherwise.
    """

    def __init__(self, parser: str, tools: list[Tool] | None, choice: Any, parallel: bool = True):
        self.reader = reader_for(parser, tools, choice)
        self.parallel = parallel
        self.num_calls = 0

    def read(self, delta: Delta | Answer) -> list[Part]:
        """What is new: text, and whole calls."""
        parts = self.reader.feed(delta.text)
        if delta.finish_reason is not None:
            parts = parts + self.reader.finish()
        kept = []
        for part in parts:
            if self.num_calls and not self.parallel:
                break
            if isinstance(part, CalledTool):
                self.num_calls += 1
            elif self.num_calls and not part.strip():
                continue  # line breaks between calls
            kept.append(part)
        return kept
