"""The engine over several processes gives the tokens of the engine over one."""

import pytest

from tests.parallel_cases import (
    answers,
    assert_all_gone,
    parallel_engine,
    requests,
    serve,
    small_args,
    whole_engine,
    workers_of,
    write_checkpoint,
)

NAMES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
CASES = [
    ("llama", (2, 1, 1), {}),
    ("llama", (4, 1, 1), dict(preemption_mode="swap")),
    ("llama", (1, 2, 1), dict(kv_cache_dtype="int8")),
    ("llama", (1, 3, 1), dict(preemption_mode="swap")),
    ("llama", (2, 2, 1), dict(enable_prefix_caching=False)),
    ("llama", (1, 1, 2), {}),
    ("llama", (2, 1, 2), dict(preemption_mode="swap")),
    ("llama", (1, 1, 1), dict(distributed_executor_backend="mp")),
    ("mixtral", (2, 1, 1), {}),
    ("mixtral", (2, 1, 1), dict(enable_expert_parallel=True)),
    ("mixtral", (4, 1, 1), dict(enable_expert_parallel=True)),
    ("mixtral", (2, 3, 1), dict(enable_expert_parallel=True, preemption_mode="swap")),
    ("deepseek_v3", (2, 1, 1), {}),
    ("deepseek_v3", (4, 1, 1), dict(enable_expert_parallel=True)),
    ("deepseek_v3", (2, 2, 1), dict(enable_expert_parallel=True, preemption_mode="swap")),
    ("deepseek_v3", (1, 3, 1), dict(kv_cache_dtype="fp8")),
]


def named(case) -> str:
    family, sizes, how = case
    return "-".join([family, "x".join(map(str, sizes)), *map(str, how.values())])


@pytest.mark.parametrize("family, sizes, how", CASES, ids=map(named, CASES))
@pytest.mark.sample(2)
def test_tokens_are_those_of_one_process(family, sizes, how, tmp_path, seed):
    """With chunks of prompts, preemption, a prefix cache, forks, scores, and a client that gives
    up.
    """
    model = write_checkpoint(tmp_path, family, seed)
    sizes_by_name = dict(zip(NAMES, sizes))
    alone = whole_engine(small_args(model, **how, **sizes_by_name))
    asked, abort_at = requests(seed), {9: "1"}
    want = serve(alone, asked, abort_at)
    engine = parallel_engine(small_args(model, **how, **sizes_by_name))
    try:
        pids = [process.pid for process in workers_of(engine)]
        assert len(pids) == sizes[0] * sizes[1] * sizes[2]
        got = serve(engine, asked, abort_at)
        replicas = getattr(engine, "engines", [engine])
        for each in replicas:
            assert each.runner.talk.ask("num_away") == [0] * (len(pids) // len(replicas))
    finally:
        engine.close()
    assert_all_gone(pids)
    assert {id: tokens for id, tokens in answers(got).items() if id != "1"} == {
        id: tokens for id, tokens in answers(want).items() if id != "1"
    }
    assert close(got["0"].outputs[0].logprobs, want["0"].outputs[0].logprobs)
    assert close(got["3"].prompt_logprobs[1:], want["3"].prompt_logprobs[1:])
    met = [sum(out.metrics.preemptions for out in outputs.values()) for outputs in (got, want)]
    if sizes[1:] == (1, 1):  # with stages or replicas a step is not the same step
        assert answers(got)["1"] == answers(want)["1"], "who gave up got as far"
        assert met[0] == met[1] > 0
    if sizes[2] == 1:
        assert min(met) > 0


def close(got, want) -> bool:
    """Whether two lists of log-probabilities name the same tokens, and nearly the same numbers."""
    return len(got) == len(want) and all(
        a.keys() == b.keys() and all(abs(a[t].logprob - b[t].logprob) < 1e-3 for t in a)
        for a, b in zip(got, want)
    )
