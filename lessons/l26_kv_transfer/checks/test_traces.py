"""The generated requests: their statistics are the published ones, and hits follow the rules."""

import pytest

from lessons.l26_kv_transfer.lab.traces import (
    BLOCK_SIZE,
    PUBLISHED,
    TraceRequest,
    drawn,
    hit_rate,
    main,
    statistics,
)


def test_the_statistics_are_those_that_were_published(capsys):
    """Within a tenth in the mean of three seeds; 50,000 blocks hold nearly all that comes again."""
    traces = [list(drawn(seed)) for seed in range(3)]
    found = [statistics(trace) for trace in traces]
    for name, published in PUBLISHED.items():
        mean = sum(each[name] for each in found) / len(found)
        assert mean == pytest.approx(published, rel=0.1), name
    assert hit_rate(traces[0], 10**6) - found[0]["hits at 50000"] < 0.02
    assert main() == 0 and "published 7590" in capsys.readouterr().out


def test_a_request_has_the_blocks_of_its_input():
    requests = list(drawn(7, 300))
    assert requests == list(drawn(7, 300)) != list(drawn(8, 300))
    for request in requests:
        assert len(request.hash_ids) == request.input_length // BLOCK_SIZE
        assert len(set(request.hash_ids)) == len(request.hash_ids)


def test_hits_by_hand():
    """A prefix ends at the first block that is missing, and the end of a prompt leaves first."""
    prompt, other = TraceRequest(1536, 1, (1, 2, 3)), TraceRequest(512, 1, (9,))
    assert hit_rate([prompt, prompt], 3) == 3 / 6
    assert hit_rate([prompt, other, prompt], 3) == 2 / 7  # 3 has left for 9
    assert hit_rate([prompt, TraceRequest(1024, 1, (7, 2))], 9) == 0
