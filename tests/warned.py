"""Warnings of the course's tests. They are here and not in the tests, because a worker of xdist
tells its controller the name of a warning's class, and the controller imports no test.
"""


class AnatomyWarning(UserWarning):
    """A lesson, or a function of it, lacks a part that others have."""


class MessageWarning(UserWarning):
    """Messages without a Korean line, or with a stale one."""


class TranslationWarning(UserWarning):
    """A page, or a cell of a notebook, whose translation is missing or stale."""
