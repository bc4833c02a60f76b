"""Ten minutes of mixed traffic (--all; seconds otherwise): the server's memory stays flat, no block
is left, every token is as offline, and a signal under load drains.
"""

import asyncio
import random
import sys

import httpx
import pytest

from tests.server.soak import gauges_at_rest, soak, started_server
from tests.server.test_slow import leave

MOST_GROWTH_MB = 8.0  # of several hundred; garbage comes and goes
# The engine's process also keeps what oneDNN has compiled for each number of rows that it has met,
# which packed.py holds down to a few dozen numbers; some of them come late.
MOST_NATIVE_MB = 32.0


@pytest.mark.sample(1, of="ends of the server")
@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: memory is read from /proc")
def test_mixed_traffic(request):
    is_long = request.config.getoption("--all")
    report = soak(600.0 if is_long else 6.0, num_cases=36 if is_long else 12)
    assert not report.wrong, report.wrong[:3]
    assert not any(report.left.values()), report.left
    assert min(report.counts[kind] for kind in ("whole", "stream", "left", "refused")) > 0
    assert report.exit_code == 0 and report.at_the_end.total() == 12
    late = {429, 504}  # on a machine that is busy with other things
    assert set(report.at_the_end) <= {200} | late, report.at_the_end
    if is_long:
        server, *others = report.growth_mb.values()
        assert server < MOST_GROWTH_MB and max(others) < MOST_NATIVE_MB, report.memory_mb


@pytest.mark.sample(1, of="ends of the server")
def test_clients_that_go_leave_no_block(seed, request):
    """As in test_slow, where the engine is a thread; here it has a process of its own."""
    count = 1000 if request.config.getoption("--all") else 25
    process, url = started_server()

    async def all_clients():
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            left = count
            while left:
                group = min(left, random.randint(1, 20))
                await asyncio.gather(*(leave(client, random.expovariate(8)) for _ in range(group)))
                left -= group

    try:
        asyncio.run(all_clients())
        left = gauges_at_rest(url)
        assert not any(left.values()), left
    finally:
        process.terminate()
        assert process.wait(60) == 0
