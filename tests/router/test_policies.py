"""Who gets a request."""

import json
import random

import numpy as np
import pytest

from reference.router.policies import FEW, PREFIX_CHARS, PrefixHash, Prompt, new_policy, prefix_of

pytest.importorskip("httpx", reason="NOT RUN: httpx is not installed")
from reference.router.args import RouterArgs, read_args

NAMES = [f"http://127.0.0.1:{port}" for port in range(8001, 8006)]
PREFIXES = [f"prompt {number}" for number in range(1000)]


def ranking(names=NAMES) -> PrefixHash:
    return PrefixHash(names, 1.25)


def test_processes_agree_on_a_prefix():
    """Python's hash() would draw other homes in each process."""
    found = [ranking(NAMES[:3]).ranked(prefix)[0] for prefix in PREFIXES[:12]]
    assert found == [1, 1, 0, 1, 1, 0, 0, 2, 1, 0, 1, 1]


@pytest.mark.parametrize("gone", range(5))
def test_a_replica_that_goes_moves_only_what_it_had(gone):
    left = [name for name in NAMES if name != NAMES[gone]]
    for prefix in PREFIXES[:300]:
        before = [NAMES[at] for at in ranking().ranked(prefix)]
        after = [left[at] for at in ranking(left).ranked(prefix)]
        assert [name for name in before if name != NAMES[gone]] == after


def test_prefixes_are_spread_evenly():
    homes = np.bincount([ranking().ranked(prefix)[0] for prefix in PREFIXES], minlength=5)
    assert (abs(homes - 200) < 5 * np.sqrt(200)).all(), homes


def test_no_replica_is_far_above_the_mean(seed):
    """Whatever the loads are: the first of the ranking that is below the bound, which exists."""
    policy = ranking()
    for _ in range(500):
        loads = np.array([random.choice([0, 1, 5, 20, 21, 100, np.inf]) for _ in NAMES])
        loads[random.randrange(5)] = random.randrange(50)
        alive = loads[loads < np.inf]
        bound = max(FEW, np.ceil(1.25 * (alive.sum() + 1) / len(alive)))
        prefix = random.choice(PREFIXES)
        fitting = [at for at in policy.ranked(prefix) if loads[at] < bound]
        assert policy.choose(Prompt(prefix), loads) == fitting[0]
        assert policy.choose(Prompt(None), loads) == loads.argmin()


def test_one_prefix_alone_is_shared_by_as_many_as_it_takes():
    policy, loads, order = ranking(), np.zeros(5), []
    for _ in range(100):
        at = policy.choose(Prompt("popular"), loads)
        loads[at] += 1
        order.append(at)
    assert order[:FEW] == [order[0]] * FEW
    assert loads.max() <= 25 and (loads > 0).sum() == 4


def chat(*contents: str, **more) -> dict:
    roles = ["system", *["user", "assistant"] * 5]
    messages = [dict(role=role, content=text) for role, text in zip(roles, contents)]
    return dict(model="tiny", messages=messages) | more


def prefix(request) -> str | None:
    return prefix_of(json.dumps(request).encode())


LONG = "x" * PREFIX_CHARS


@pytest.mark.parametrize(
    "one, other",
    [
        (chat("be kind", "hi"), chat("be kind", "hi", "hello", "and now?")),
        (chat("be kind", "hi"), chat("be kind", "hi", stream=True, temperature=0.5)),
        (chat(LONG, "hi"), chat(LONG, "ho")),
        (dict(prompt=LONG + "a"), dict(prompt=LONG + "b")),
        (dict(prompt=[5] * 2000 + [1]), dict(prompt=[5] * 2000 + [2])),
        (dict(system=LONG, messages=[]), dict(system=LONG + "!", messages=[])),
        (dict(input="hi", instructions="x"), dict(instructions="x", input="hi", store=False)),
        (dict(inputs="hi", parameters={}), dict(inputs="hi", parameters=dict(seed=1))),
    ],
)
def test_what_begins_alike(one, other):
    assert prefix(one) == prefix(other) is not None


@pytest.mark.parametrize(
    "one, other",
    [
        (chat("be kind", "hi"), chat("be kind", "ho")),
        (chat("be kind", "hi"), chat("be short", "hi")),
        (chat("be kind", "hi"), chat("be kind", "hi", model="sql")),
        (chat("be kind", "hi"), chat("be kind", "hi", cache_salt="mine")),
        (dict(prompt="a"), dict(prompt="b")),
        (dict(prompt=[1, 2]), dict(prompt=[1, 3])),
        (dict(system="a", messages=[]), dict(system="b", messages=[])),
        (dict(input=[dict(role="user", content="a")]), dict(input=[dict(content="b")])),
    ],
)
def test_what_does_not(one, other):
    assert prefix(one) != prefix(other)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"{}", b'{"prompt": ""}', b"[" * 9**5, b"\xff", b"1" * 9**5]
)
def test_who_has_no_prefix(body):
    assert prefix_of(body) is None


@pytest.mark.parametrize("policy", ["least", "round-robin"])
def test_other_policies_come_from_the_simulator(policy):
    chosen = new_policy(RouterArgs(NAMES, policy))
    loads = np.array([2.0, 1.0, np.inf, 0.0, 3.0])
    order = [chosen.choose(Prompt("a"), loads) for _ in range(4)]
    assert order == {"least": [3, 3, 3, 3], "round-robin": [0, 1, 3, 4]}[policy]


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--replicas"], "replicas"),
        (["--replicas", "127.0.0.1:8001"], "replicas: got '127.0.0.1:8001'; accepted: http://"),
        (["--replicas", "http://a:99999"], "http://a:99999"),
        (["--replicas", "http://a:b"], "http://a:b"),
        (["--replicas", "http://key@a"], "http://key@a"),
        (["--replicas", "http://a/v1"], "http://a/v1"),
        (["--replicas", "http://a", "http://a/"], "each address once"),
        (["--replicas", "http://a", "--policy", "best"], "prefix, least, round-robin"),
        (["--replicas", "http://a", "--balance", "0.9"], "balance: got 0.9"),
        (["--replicas", "http://a", "--balance", "nan"], "balance: got nan"),
        (["--replicas", "http://a", "--port", "70000"], "port: got 70000"),
        (["--replicas", "http://a", "--answer-timeout", "0"], "answer_timeout: got 0.0"),
        (["--replicas", "http://a", "--health-interval", "-1"], "health_interval: got -1.0"),
        (["--replicas", "http://a", "--max-body-bytes", "0"], "max_body_bytes: got 0"),
        (["--replicas", "http://a", "--ready-path", "ready"], "ready_path: got 'ready'"),
        (["--replicas", "http://a", "--api-key", "x"], "--api-key"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, named, capsys):
    from reference.router.__main__ import main

    try:
        code = main(flags)
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2 and named in err and err.count("\n") == 1


def test_flags_reach_their_fields():
    args = read_args(["--replicas", "http://[::1]:1/", "https://b", "--balance", "2"])
    assert args.replicas == ["http://[::1]:1", "https://b"] and args.balance == 2.0
    assert args.host == "127.0.0.1"
