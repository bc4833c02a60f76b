"""Decode context parallelism in the engine: shards that share the tokens of a KV head give the
tokens of one process, over the same tables; what cannot be shared is refused.
"""

import os
import random
import signal

import pytest

from lessons.l20_parallelism.lab.testing import CONFIGS
from lessons.l20_parallelism.processes.launch import RankError
from lessons.toolbox.model.checkpoint import load_config
from reference.engine.cache_memory import bytes_per_token
from reference.parallel.shared_tokens import check_share
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
from tests.test_parallel_engine import close
from tests.test_parallel_faults import GREEDY, Fast, at_run, llm_over

ONE_HEAD = dict(num_key_value_heads=1)
# because sums of shards are rounded otherwise, and in float32 that gives another code now and then
WIDE = dict(dtype="float64")
IN_PAIRS = dict(cp_kv_cache_interleave_size=2)
# which has sinks, too
WINDOWS = dict(
    sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
)
NGRAM = dict(method="ngram", num_speculative_tokens=2)
# family, its changes, (tensor, shares, stages), how
CASES = [
    ("llama", ONE_HEAD, (2, 2, 1), {}),
    ("llama", ONE_HEAD, (4, 4, 1), dict(preemption_mode="swap")),
    ("llama", ONE_HEAD, (4, 2, 1), dict(cp_kv_cache_interleave_size=2)),
    ("llama", {}, (4, 2, 1), dict(cp_kv_cache_interleave_size=2, enable_prefix_caching=False)),
    ("llama", ONE_HEAD, (2, 2, 2), {}),
    ("llama", ONE_HEAD, (2, 2, 1), dict(kv_cache_dtype="int8", **WIDE)),
    ("llama", ONE_HEAD, (2, 2, 1), dict(speculative_config=NGRAM)),
    ("llama", ONE_HEAD, (2, 2, 1), dict(async_scheduling=True)),
    ("mixtral", {}, (4, 2, 1), dict(enable_expert_parallel=True)),
    ("gpt_oss", WINDOWS, (4, 2, 1), {}),
    ("gpt_oss", WINDOWS, (4, 2, 1), dict(kv_cache_dtype="int8", **WIDE, **IN_PAIRS)),
    ("deepseek_v3", {}, (2, 2, 1), {}),
    ("deepseek_v3", {}, (4, 4, 1), dict(enable_expert_parallel=True)),
    ("deepseek_v3", {}, (4, 2, 1), dict(preemption_mode="swap", cp_kv_cache_interleave_size=2)),
    ("deepseek_v3", {}, (2, 2, 1), dict(kv_cache_dtype="fp8", **WIDE)),
    ("deepseek_v3", {}, (2, 2, 1), dict(kv_cache_dtype="fp8_ds_mla", **WIDE)),
]


def shared_args(model: str, tp: int, dcp: int, pp: int = 1, **how):
    """With blocks of 8 tokens in the tables, 8 / dcp of them on each rank that shares them."""
    sizes = dict(tensor_parallel_size=tp, decode_context_parallel_size=dcp)
    sizes |= dict(pipeline_parallel_size=pp, block_size=8 // dcp, num_gpu_blocks_override=8)
    return small_args(model, **sizes | how)


def named(case) -> str:
    family, changes, sizes, how = case
    return "-".join([family, *map(str, changes.values()), "x".join(map(str, sizes)), *how])


@pytest.mark.parametrize("family, changes, sizes, how", CASES, ids=map(named, CASES))
@pytest.mark.sample(2)
def test_tokens_are_those_of_one_process(family, changes, sizes, how, tmp_path, seed):
    """With chunks of prompts beside decoding, preemption, a prefix cache, forks, scores, and a
    client that gives up.
    """
    model = write_checkpoint(tmp_path, family, seed, **changes)
    args = shared_args(model, *sizes, **how)
    asked, abort_at = requests(seed), {9: "1"}
    want = serve(whole_engine(args), asked, abort_at)
    engine = parallel_engine(args)
    try:
        pids = [process.pid for process in workers_of(engine)]
        assert len(pids) == sizes[0] * sizes[2], "sharing takes no processes of its own"
        got = serve(engine, asked, abort_at)
    finally:
        engine.close()
    assert_all_gone(pids)
    met = [sum(out.metrics.preemptions for out in outputs.values()) for outputs in (got, want)]
    assert min(met) > 0
    assert close(got["0"].outputs[0].logprobs, want["0"].outputs[0].logprobs)
    assert close(got["3"].prompt_logprobs[1:], want["3"].prompt_logprobs[1:])
    if sizes[2] > 1:  # with stages a step is not the same step
        del got["1"], want["1"]
    else:
        assert met[0] == met[1]
    assert answers(got) == answers(want)


@pytest.mark.sample(1, of="shared tokens")
def test_random_histories(tmp_path, seed):
    """Prompts that begin alike, one after the other and at once, over a prefix cache."""
    model = write_checkpoint(tmp_path, "deepseek_v3", seed)
    args = shared_args(model, 2, 2, num_gpu_blocks_override=20, cp_kv_cache_interleave_size=2)
    alone, engine = whole_engine(args), parallel_engine(args)
    try:
        heads, found = [random.choices(range(60), k=16) for _ in range(2)], 0
        for _ in range(6):
            prompts = [
                random.choice(heads) + random.choices(range(60), k=random.randint(1, 9))
                for _ in range(random.randint(1, 4))
            ]
            asked = [(prompt, GREEDY) for prompt in prompts]
            want, got = serve(alone, asked), serve(engine, asked)
            assert answers(got) == answers(want)
            cached = [
                {id: out.num_cached_tokens for id, out in each.items()} for each in (want, got)
            ]
            assert cached[0] == cached[1]
            found += sum(cached[1].values())
        assert found, "no prompt found blocks of another"
    finally:
        engine.close()


# ---------------------------------------------------------------- what a rank holds


@pytest.mark.sample(1, of="shared tokens")
@pytest.mark.parametrize("family, changes", [("llama", ONE_HEAD), ("deepseek_v3", {})], ids=str)
def test_the_same_memory_holds_more_tokens(family, changes, tmp_path, seed):
    model, memory = write_checkpoint(tmp_path, family, seed, **changes), 30_000
    how = dict(num_gpu_blocks_override=None, kv_cache_memory_bytes=memory)
    how |= dict(max_model_len=48, max_num_seqs=12, block_size=2)
    rooms = []
    for dcp in (1, 2):
        engine = parallel_engine(shared_args(model, 2, dcp, **how))
        try:
            pool, blocks = engine.runner.pool, engine.scheduler.blocks
            assert (blocks.num_blocks, blocks.block_size) == (pool.num_blocks, 2 * dcp)
            rooms.append((pool.num_blocks * pool.block_size, pool.bytes_per_token))
            of_token = bytes_per_token(load_config(model), "auto", 4)
            held = engine.runner.held
            assert [each.bytes_per_token for each in held] == [of_token] * 2
            # and the slot that belongs to no one
            slots = pool.num_blocks * 2 + 1
            assert [each.pool_bytes for each in held] == [slots * of_token] * 2
        finally:
            engine.close()
    (tokens, of_copies), (shared, of_shares) = rooms
    assert shared == 2 * tokens and of_copies == 2 * of_shares


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.sample(1, of="shared tokens")
def test_a_rank_that_dies_ends_all_in_one_line(when, tmp_path, seed):
    """While the others wait for its queries, or for its keys."""
    engine = parallel_engine(shared_args(write_checkpoint(tmp_path, "deepseek_v3", seed), 2, 2))
    pids = [process.pid for process in workers_of(engine)]
    at_run(engine, dict(prefill=1, decode=6)[when], lambda: os.kill(pids[1], signal.SIGKILL))
    for _ in range(2):  # who comes later is told the same
        with Fast(), pytest.raises(RankError, match=r"^rank 1 died \(signal 9\)$"):
            llm_over(engine).generate([[1, 2, 3] * 9, [4]], GREEDY, use_tqdm=False)
        assert not engine.requests and engine.scheduler.is_idle
    assert_all_gone(pids)


# ---------------------------------------------------------------- what is refused

DCP = "decode_context_parallel_size: got "
TRANSFER = dict(kv_connector="TcpConnector", kv_role="kv_producer")


@pytest.mark.parametrize(
    "family, changes, sizes, how, said",
    [
        ("llama", {}, (2, 2), {}, f"{DCP}2; dcp: got 2; accepted: a divisor of 1, the"),
        ("llama", {}, (4, 4), {}, f"{DCP}4; dcp: got 4; accepted: a divisor of 2, the"),
        ("llama", {}, (4, 3), {}, f"{DCP}3; accepted: a divisor of tensor_parallel_size, 4"),
        ("llama", {}, (1, 2), {}, f"{DCP}2; accepted: a divisor of tensor_parallel_size, 1"),
        ("llama", {}, (4, 0), {}, f"{DCP}0; accepted: a whole number, 1"),
        (
            "llama",
            ONE_HEAD,
            (2, 2),
            dict(cp_kv_cache_interleave_size=3),
            "cp_kv_cache_interleave_size: got 3; accepted: a divisor of block_size, 4",
        ),
        (
            "llama",
            ONE_HEAD,
            (2, 2),
            dict(kv_transfer_config=TRANSFER),
            f"{DCP}2; accepted: 1 with kv_transfer_config",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(family, changes, sizes, how, said, tmp_path, monkeypatch):
    def fails(*arguments):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("reference.parallel.engine.new_workers", fails)
    model = write_checkpoint(tmp_path, family, 0, **changes)
    with pytest.raises(ValueError) as error:
        tp, dcp = sizes
        sizes = dict(tensor_parallel_size=tp, decode_context_parallel_size=dcp)
        parallel_engine(small_args(model, **sizes | how))
    assert str(error.value).startswith(said) and "\n" not in str(error.value), error.value


def test_a_soft_cap_is_refused():
    with pytest.raises(ValueError, match="model: got 'gemma2'; accepted: one without a soft-cap"):
        check_share(CONFIGS["gemma2"], 4, 2)


def test_one_process_that_shares_nothing_takes_any_interleave():
    args = small_args("models/tiny", cp_kv_cache_interleave_size=4)
    assert args.tokens_per_block == args.block_size and not args.has_workers
