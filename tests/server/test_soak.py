"""Ten minutes of mixed traffic (--all; seconds otherwise): memory stays flat, no block is left, every
token is as offline, and a signal under load drains.
"""

import sys

import pytest

from tests.server.soak import soak

MOST_GROWTH_MB = 8.0  # of several hundred; garbage comes and goes


@pytest.mark.sample(1, of="ends of the server")
@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: memory is read from /proc")
def test_mixed_traffic(request):
    is_long = request.config.getoption("--all")
    report = soak(600.0 if is_long else 6.0, num_cases=36 if is_long else 12)
    assert not report.wrong, report.wrong[:3]
    assert not any(report.left.values()), report.left
    assert min(report.counts[kind] for kind in ("whole", "stream", "left", "refused")) > 0
    assert report.exit_code == 0 and report.answered_at_the_end == 12
    if is_long:
        assert report.growth_mb < MOST_GROWTH_MB, report.memory_mb
