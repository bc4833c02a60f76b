"""The command of the simulator: mistakes in one line, a trace as it was recorded, the number of
GPUs that is the least, figures that are drawn whole, and the steps of the real engine.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lessons.l14_continuous_batching.lab import cost as measured
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from reference.simulator import __main__ as command
from reference.simulator import check, figures, plan
from reference.simulator.costs import MOST_GPUS, new_deployment
from reference.simulator.policies import POLICIES, Policy, simulate
from reference.simulator.recorded import parse_trace
from reference.simulator.routers import ROUTERS
from reference.simulator.served import Slo
from reference.simulator.traces import at_rate, bursty, poisson, rate_of

REPOSITORY = Path(__file__).parents[1]
SLO = Slo(0.5, 0.05)
LINE = {"arrival_s": 0.5, "prompt_tokens": 100, "output_tokens": 8}
SMALL = "poisson:rate=8,requests=40,prompt=300,output=20"


def run(*arguments: str, capsys) -> tuple[int, str, str]:
    """(exit code, output, errors) of the command."""
    try:
        code = command.main(list(arguments))
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    return code, said.out, said.err


# ---------------------------------------------------------------- mistakes

BAD_LINES = {
    "no JSON": "{",
    "no object": "[1, 2]",
    "no answer": '{"arrival_s": 0, "prompt_tokens": 3}',
    "time below 0": json.dumps(LINE | {"arrival_s": -1}),
    "time that is none": '{"arrival_s": NaN, "prompt_tokens": 3, "output_tokens": 3}',
    "no tokens": json.dumps(LINE | {"prompt_tokens": 0}),
    "half a token": json.dumps(LINE | {"output_tokens": 1.5}),
    "more tokens than there are": json.dumps(LINE | {"prompt_tokens": 10**12}),
    "a field that is not read": json.dumps(LINE | {"prompt": "text"}),
    "a prefix longer than its prompt": json.dumps(LINE | {"prefix": "a", "prefix_tokens": 101}),
    "a prefix that is no name": json.dumps(LINE | {"prefix": 7}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_malformed_trace_is_one_line(name, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + BAD_LINES[name] + "\n", encoding="utf-8")
    code, out, err = run("--trace", str(path), capsys=capsys)
    assert code == 2 and not out and err.count("\n") == 1
    assert "trace.jsonl, line 2: got" in err and len(err) < 310


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "gpt-9"], "known are llama-2-7b"),
        (["--gpu", "abacus"], "known are a100"),
        (["--model", "deepseek-v3", "--gpu", "t4"], "need 128 x T4"),
        (["--model", "llama-3-70b", "--gpus-per-replica", "1"], "with it: 2 or more"),
        (["--trace", "nowhere.jsonl"], "accepted: a file of JSON lines"),
        (["--trace", "poisson:rate=0"], "got 'rate=0'"),
        (["--trace", "poisson:rate=nan"], "got 'rate=nan'"),
        (["--trace", "poisson:requests=nan"], "got 'requests=nan'"),
        (["--trace", "poisson:cv=3"], "got 'cv=3'"),
        (["--trace", "bursty:requests=2.5"], "got 'requests=2.5'"),
        (["--trace", "poisson:requests=1,prompt=900000"], "what the cache of a replica holds"),
        (["--slo", "ttft=1"], "accepted: ttft=0.5,itl=0.05"),
        (["--slo", "ttft=inf,itl=1"], "accepted: ttft=0.5,itl=0.05"),
        (["--policy", "magic"], "invalid choice"),
        (["--replicas", "0"], "a whole number above 0"),
        (["--attain", "2"], "above 0, at most 1"),
        (["--failures", "3:0"], "accepted: with --replicas"),
        (["--failures", "3:0", "--replicas", "1"], "accepted: one is left"),
        (["--failures", "3:7", "--replicas", "2"], "accepted: replicas 0 to 1"),
        (["--policy", "disaggregated", "--replicas", "1"], "2 or more"),
        (["--step-cost", "nowhere.json"], "accepted: a file that lessons.l14"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, capsys):
    code, out, err = run(*arguments, capsys=capsys)
    assert code == 2 and not out and err.count("\n") == 1 and said in err, err


def test_an_empty_trace_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no request in it"):
        parse_trace(str(path))


# ---------------------------------------------------------------- traces


def test_a_recorded_trace_is_read_and_sorted(tmp_path):
    path = tmp_path / "trace.jsonl"
    later = LINE | {"arrival_s": 2, "prefix": "chat", "prompt_tokens": 120}
    lines = [later, LINE | {"prefix": "chat", "prefix_tokens": 60}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    first, second = parse_trace(str(path))
    assert (first.arrival_s, second.arrival_s) == (0.5, 2.0)
    assert (first.prefix_tokens, second.prefix_tokens) == (60, 120), "else the whole prompt"
    one, other = first.tokens(0), second.tokens(1)
    assert (len(one), len(other)) == (100, 120)
    assert one[:60] == other[:60] and not set(one[60:]) & set(other)


def test_made_traces_have_their_rate_and_their_bursts():
    steady, wild = poisson("rate=5,requests=20000"), bursty("rate=5,requests=20000,cv=3")
    for trace, variation in ((steady, 1), (wild, 3)):
        gaps = np.diff([request.arrival_s for request in trace])
        assert rate_of(trace) == pytest.approx(5, rel=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)
    assert [r.prompt_tokens for r in steady] == [r.prompt_tokens for r in wild]
    assert np.mean([r.output_tokens for r in steady]) == pytest.approx(200, rel=0.05)
    assert rate_of(at_rate(steady, 40.0)) == pytest.approx(40)


# ---------------------------------------------------------------- answers


def test_the_names_of_the_command_are_those_of_the_code():
    assert command.NAMES == POLICIES and tuple(ROUTERS) == command.ROUTER_NAMES


def test_one_gpu_less_is_not_enough():
    trace = poisson("rate=120,requests=400,prompt=500,output=60")
    deployment, policy = new_deployment(), Policy("chunked")
    needed = plan.gpus_needed(trace, deployment, policy, SLO)
    assert needed.is_enough and needed.replicas > 1
    fewer = simulate(trace, deployment, policy, needed.replicas - 1)
    assert fewer.attained(SLO) < 0.99 <= needed.served.attained(SLO)
    assert needed.served.goodput(SLO) == pytest.approx(rate_of(trace), rel=0.02)


def test_what_no_number_of_gpus_reaches_is_said(capsys):
    code, out, _ = run("--trace", SMALL, "--slo", "ttft=0.001,itl=0.05", capsys=capsys)
    assert code == 0 and "none" in out and "no number of GPUs that was tried is enough" in out


def test_every_policy_and_both_figures(tmp_path, capsys):
    out = tmp_path / "figures"
    code, said, err = run(
        "--trace", SMALL, "--policy", "all", "--most-replicas", "4", "--out", str(out),
        capsys=capsys,
    )  # fmt: skip
    assert code == 0 and all(name in said for name in POLICIES), err
    assert sorted(p.name for p in out.iterdir()) == [
        f"{name}.{kind}" for name in ("goodput", "latencies") for kind in ("png", "svg")
    ]


def test_figures_are_drawn_whole():
    trace, deployment = poisson("rate=30,requests=60,prompt=300,output=30"), new_deployment()
    policies = [Policy(name) for name in POLICIES]
    runs = plan.over_rates(trace, deployment, policies, 2, [5.0, 50.0, 100.0], SLO)
    goodput = plan.over_replicas(trace, deployment, policies, [1, 2, 3], SLO)
    for figure in (
        figures.draw_latencies([5.0, 50.0, 100.0], runs, SLO, deployment.name),
        figures.draw_goodput([1, 2, 3], goodput, 30.0, deployment.name),
    ):
        assert not texts_outside(figure) and not overlapping_texts(figure)


def test_answers_of_one_token_and_a_trace_without_a_rate(tmp_path, capsys):
    """No gaps between tokens, and no time between arrivals."""
    path = tmp_path / "[red]at once.jsonl"
    path.write_text(json.dumps(LINE | {"output_tokens": 1}), encoding="utf-8")
    code, out, _ = run("--trace", str(path), "--policy", "all", capsys=capsys)
    assert code == 0 and "1 requests, all at once" in out and "[red]" in out and " - " in out
    code, out, err = run("--trace", str(path), "--out", str(tmp_path), capsys=capsys)
    assert code == 2 and not out and "all requests arrive at once" in err
    trace = at_rate([r._replace(output_tokens=1) for r in poisson("requests=9")], 9.0)
    runs = plan.over_rates(trace, new_deployment(), [Policy()], 2, [5.0], SLO)
    assert not texts_outside(figures.draw_latencies([5.0], runs, SLO, "one token each"))


def test_measured_steps_replace_the_data_sheet(capsys):
    path = str(measured.MEASURED)
    code, out, _ = run("--trace", SMALL, "--step-cost", path, "--replicas", "1", capsys=capsys)
    assert code == 0 and "fitted to" in out
    assert new_deployment(step_cost=measured.MEASURED).num_blocks == new_deployment().num_blocks
    assert new_deployment("llama-3-405b", "b200").gpus == MOST_GPUS


def test_help_needs_no_seconds():
    """Nothing slow is imported for it."""
    code = (
        "import sys; from reference.simulator.__main__ import new_parser; "
        "new_parser().format_help()\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules), 'a slow import'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


# ---------------------------------------------------------------- the real engine


def test_the_engine_makes_the_simulated_steps():
    """On the embedded model, with chunks, preemptions and shared prefixes."""
    trace = check.check_trace(8.0, 12, seed=3)
    model = str(REPOSITORY / "models/tiny")
    real, simulated, preemptions = check.in_lockstep(trace, model)
    assert real == simulated and preemptions > 0
    assert any(len(chunks) > 1 and max(n for _, n in chunks) > 1 for chunks in real)
