"""One server for all tests of a process, because a model takes seconds to read."""

import time

import pytest

from tests.engine_cases import assert_clean

pytest.importorskip("fastapi", reason="NOT RUN: fastapi is not installed")


@pytest.fixture(scope="session")
def running():
    from tests.server.live import new_live

    server = new_live()
    yield server
    server.stop()
    server.service.engine.shutdown()


@pytest.fixture
def live(running):
    """The server, and after the test nothing may be left in its engine."""
    yield running
    end = time.monotonic() + 60
    while running.engine.requests and time.monotonic() < end:
        time.sleep(0.01)  # a client that has gone is heard within a step
    assert_clean(running.engine)
