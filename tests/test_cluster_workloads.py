"""What arrives at the simulated cluster: conversations, and traces in the published format."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from lessons.l26_kv_transfer.costs import LINKS
from lessons.l26_kv_transfer.lab.traces import BLOCK_SIZE, drawn
from reference.simulator.__main__ import new_parser
from reference.simulator.costs import NO_TIERS, new_deployment
from reference.simulator.policies import Policy, simulate
from reference.simulator.recorded import parse_trace
from reference.simulator.report import deployment_of
from reference.simulator.tiers import HOST, NOWHERE, POOL
from reference.simulator.traces import TracedRequest, next_tokens, rate_of
from tests.test_simulator_command import run

PUBLISHED = {"timestamp": 250, "input_length": 1100, "output_length": 12, "hash_ids": [7, 9, 11]}


def test_a_published_line_is_a_request(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    later = PUBLISHED | {"timestamp": 2500, "hash_ids": [7, 10], "input_length": 1024}
    ours = {"arrival_s": 0.1, "prompt_tokens": 5, "output_tokens": 1}
    path.write_text("\n".join(map(json.dumps, (later, PUBLISHED, ours))), encoding="utf-8")
    found = parse_trace(str(path))
    assert [request.arrival_s for request in found] == [0.1, 0.25, 2.5]
    assert found[1].hash_ids == (7, 9), "the third is not full"
    one, other = found[1].tokens(1), found[2].tokens(2)
    assert (len(one), len(other)) == (1100, 1024)
    assert one[:512] == other[:512] and not set(one[512:]) & set(other[512:])
    assert max(*one, *other) < 2**63, "a hash of tokens takes 64 bits"
    assert not set(next_tokens(other[-1], 512)) & set(
        TracedRequest(0, 512, 1, hash_ids=(11,)).tokens(3)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": -1},
        {"timestamp": "0"},
        {"input_length": 0},
        {"output_length": 1.5},
        {"hash_ids": 7},
        {"hash_ids": [-1]},
        {"hash_ids": [2**60]},
        {"hash_ids": [True]},
        {"text": "a"},
    ],
)
def test_a_broken_published_line_is_refused(change, tmp_path, capsys):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(json.dumps(PUBLISHED | change), encoding="utf-8")
    code, out, err = run("--trace", str(path), capsys=capsys)
    assert code == 2 and not out and err.count("\n") == 1 and "line 1: got" in err


def test_mooncakes_statistics_run(capsys):
    """Lesson 26's requests, whole: their blocks are found as the names say."""
    trace = parse_trace("mooncake:rate=2,requests=60,seed=3")
    plain = list(drawn(3, 60))
    assert [r.hash_ids for r in trace] == [r.hash_ids for r in plain]
    assert rate_of(trace) == pytest.approx(2, rel=0.4)
    served = simulate(trace, new_deployment(), Policy())
    assert sum(served.found.values()) == sum(r.prompt_tokens for r in trace)
    seen, shared = set(), 0
    for request in trace:  # the pool holds them all
        shared += sum(1 for name in request.hash_ids if name in seen) * BLOCK_SIZE
        seen |= set(request.hash_ids)
    assert 0.8 * shared < served.found[POOL] <= shared, "but those that arrive side by side"
    tiers = ["--replicas", "1", "--host-gb", "50"]
    code, out, _ = run("--trace", "mooncake:rate=2,requests=40", *tiers, capsys=capsys)
    assert code == 0 and "were in the pool" in out and "were computed" in out


def test_chats_have_their_rate_their_turns_and_their_pauses():
    trace = parse_trace("chats:rate=5,requests=4000,turns=4,pause=30,prompt=900,turn=50,output=20")
    assert len(trace) == 4000 and rate_of(trace) == pytest.approx(5, rel=0.1)
    chats = {}
    for request in trace:
        assert request.prefix_tokens == request.prompt_tokens
        chats.setdefault(request.prefix, []).append(request)
    pauses = [b.arrival_s - a.arrival_s for own in chats.values() for a, b in pairwise(own)]
    assert np.mean(pauses) == pytest.approx(30, rel=0.1)
    assert max(map(len, chats.values())) == 4
    for own in chats.values():
        for before, after in pairwise(own):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            begin = before.tokens(0) + next_tokens(before.tokens(0)[-1], before.output_tokens)
            assert after.tokens(1)[: len(begin)] == begin, "the answer is part of the next prompt"


def test_more_chats_than_the_pool_holds():
    """They are computed again without a tier, and come back from host memory with one."""
    options = "rate=3,requests=200,turns=6,pause=40,prompt=1000,turn=100,output=50"
    trace = parse_trace(f"chats:{options}")
    small = replace(new_deployment(), num_blocks=2000)
    served = simulate(trace, small, Policy())
    with_host = simulate(trace, replace(small, tiers=NO_TIERS._replace(host_bytes=1e12)), Policy())
    assert with_host.found[HOST] > 0
    assert with_host.found[NOWHERE] < 0.8 * served.found[NOWHERE]
    assert np.median(with_host.ttft_s) < np.median(served.ttft_s)


def test_the_commands_defaults_are_lesson_26s():
    args = new_parser().parse_args([])
    deployment = deployment_of(args)
    assert deployment.tiers == NO_TIERS
    assert deployment.tiers.host_bytes_per_s == LINKS["PCIe 5.0"]
    assert deployment.link_bytes_per_s == new_deployment().link_bytes_per_s
    assert deployment.sent_in == 1
    chosen = new_parser().parse_args(
        [
            "--host-gb=2",
            "--disk-gb=3",
            "--host-link=4",
            "--disk-link=5",
            "--link=80",
            "--send=layers",
        ]
    )
    deployment = deployment_of(chosen)
    assert deployment.tiers == (2e9, 3e9, 4e9, 5e9)
    assert deployment.link_bytes_per_s == 10e9 and deployment.sent_in == 32


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--host-gb", "-1"], "a number, 0 or more"),
        (["--disk-gb", "nan"], "a number, 0 or more"),
        (["--host-link", "0"], "a number, 0.001 or more"),
        (["--link", "inf"], "a number, 0.001 or more"),
        (["--send", "later"], "invalid choice"),
        (["--prefill", "0"], "a whole number above 0"),
        (["--policy", "disaggregated", "--prefill", "2", "--replicas", "2"], "3 or more"),
        (["--trace", "chats:pause=0"], "got 'pause=0'"),
        (["--trace", "mooncake:prompt=3"], "got 'prompt=3'"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, capsys):
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 2 and not out and err.count("\n") == 1 and said in err, err
