"""A producer of two ranks and a consumer of one: each rank sends its heads, and the tokens are
those of one engine.
"""

import os
import signal

import pytest
import torch

from lessons.l20_parallelism.processes.launch import RankError
from lessons.l26_kv_transfer.lab.testing import pool_of
from lessons.l26_kv_transfer.pages import Pages
from reference import EngineArgs
from reference.features.kv_transfer.heads import HeadPages, weights_name
from reference.features.kv_transfer.rounded import RoundedPages
from reference.features.kv_transfer.transfers import pages_and_name
from tests.parallel_cases import (
    assert_all_gone,
    parallel_engine,
    small_args,
    whole_engine,
    workers_of,
    write_checkpoint,
)
from tests.test_kv_rounded import as_sent, check_error
from tests.transfer_cases import (
    KINDS,
    address_of,
    answer,
    apart,
    config,
    params,
    to_be_sent,
    tokens,
)

PROMPT = [(7 * n) % 59 for n in range(41)]  # ten blocks and a token
LIMIT = 8
FP8 = {"serde": {"type": "fp8"}}
BY_TWO = {"prefill": {"tp_size": 2}}


def transfer(kind: str, role: str, **extra) -> dict:
    return config(kind, role, kv_connector_extra_config={"timeout_s": 60.0} | extra)


def producer_of(model: str, kind: str = KINDS[0], **extra):
    own = dict(tensor_parallel_size=2, kv_transfer_config=transfer(kind, "kv_producer", **extra))
    return parallel_engine(small_args(model, **own))


def consumer_of(model: str, kind: str = KINDS[0], **extra):
    own = dict(kv_transfer_config=transfer(kind, "kv_consumer", **extra))
    return whole_engine(small_args(model, **own))


# ---------------------------------------------------------------- bytes


class SomeHeads:
    """A rank's pool: some heads of another pool, copied."""

    def __init__(self, pool, heads: range):
        self.num_blocks, self.block_size, self.blocks = (
            pool.num_blocks,
            pool.block_size,
            pool.blocks,
        )
        mine = slice(heads.start, heads.stop)
        self.tensors = tuple(slots[:, :, mine].contiguous() for slots in pool.tensors)
        self.k_slots = self.tensors[0]


def plain_pool(kind: str, seed: int = 0):
    pool = pool_of(kind, 7, 5, seed)
    for slots in pool.tensors:
        slots.nan_to_num_(0.5, 1.0, 1.0)
    return pool


@pytest.mark.parametrize("how", [Pages, RoundedPages])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_parts_are_what_ranks_pack(kind, how):
    """And side by side they are the whole block."""
    source, target, other = (plain_pool(kind, seed) for seed in range(3))
    heads = source.k_slots.shape[2]
    assert heads % 2 == 0
    ranks = [SomeHeads(source, range(n * heads // 2, (n + 1) * heads // 2)) for n in range(2)]
    packed = [how([rank]) for rank in ranks]
    parts = [one.read([6, 2, 5], one.now()) for one in packed]
    whole, here = HeadPages(source, 2, how), HeadPages(target, 2, how)
    assert whole.read([6, 2, 5], whole.now()).equal(torch.cat(parts, dim=1))
    assert packed[0].block_bytes == here.part_bytes
    here.write([0, 3, 1], torch.cat(parts, dim=1), here.now())
    plain = how([other])
    plain.write([0, 3, 1], how([source]).read([6, 2, 5], plain.now()), plain.now())
    for a, b in zip(as_sent(target, [0, 3, 1]), as_sent(other, [0, 3, 1])):
        assert a.equal(b)
    swapped = torch.cat(parts[::-1], dim=1)
    here.write([0, 3, 1], swapped, here.now())
    assert not as_sent(target, [0, 3, 1])[0].equal(as_sent(other, [0, 3, 1])[0])


# ---------------------------------------------------------------- engines


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_one_engine(kind, tmp_path, seed):
    model = write_checkpoint(tmp_path, "llama", seed)
    alone = whole_engine(small_args(model))
    right = [tokens(answer(alone, prompt, params(LIMIT))) for prompt in (PROMPT, PROMPT[::-1])]
    producer, consumer = producer_of(model, kind), consumer_of(model, kind, **BY_TWO)
    try:
        for prompt, expected in zip((PROMPT, PROMPT[::-1]), right):
            handed_over, got = apart(producer, consumer, prompt, LIMIT)
            assert handed_over["tp_size"] == 2 and len(handed_over["remote_block_ids"]) == 10
            assert tokens(got) == expected and got.num_cached_tokens == 40
        assert not producer.scheduler.blocks.connector.faults
    finally:
        producer.close()
        consumer.close()


def test_in_8_bits_too(tmp_path, seed):
    """Each rank rounds its own heads, and the numbers are near to those of one engine."""
    model = write_checkpoint(tmp_path, "llama", seed)
    alone = whole_engine(small_args(model))
    answer(alone, PROMPT, params(1))
    producer, consumer = producer_of(model, **FP8), consumer_of(model, **FP8, **BY_TWO)
    try:
        handed_over, got = apart(producer, consumer, PROMPT, LIMIT)
        assert len(handed_over["remote_block_ids"]) == 10 and got.num_cached_tokens == 40
        exact, come = (e.scheduler.blocks.cache.block_of for e in (alone, consumer))
        assert len(exact.keys() & come.keys()) == 10
        for name in exact.keys() & come.keys():
            x = as_sent(alone.runner.pool, [exact[name]])
            y = as_sent(consumer.runner.pool, [come[name]])
            check_error(x, y, torch.float32, slack=1e-5)  # because ranks add in another order
    finally:
        producer.close()
        consumer.close()


def test_other_engines_are_refused_and_compute(tmp_path, seed):
    """With other weights, and a consumer that waits for the blocks of one rank."""
    model = write_checkpoint(tmp_path / "one", "llama", seed)
    other = write_checkpoint(tmp_path / "two", "llama", seed + 1)
    alone = whole_engine(small_args(model))
    right = tokens(answer(alone, PROMPT, params(LIMIT)))
    right_of_other = tokens(answer(whole_engine(small_args(other)), PROMPT, params(LIMIT)))
    producer = producer_of(model)
    try:
        for consumer, expected in (
            (consumer_of(model), right),
            (consumer_of(other, **BY_TWO), right_of_other),
        ):
            handed_over, got = apart(producer, consumer, PROMPT, LIMIT)
            assert handed_over is None and tokens(got) == expected
            assert got.num_cached_tokens == 0
            consumer.close()
        assert producer.scheduler.blocks.connector.faults == {"refused": 4}  # two by each rank
    finally:
        producer.close()


def test_a_rank_that_is_killed_ends_its_engine_alone(tmp_path, seed):
    model = write_checkpoint(tmp_path, "llama", seed)
    right = tokens(answer(whole_engine(small_args(model)), PROMPT, params(LIMIT)))
    producer, consumer = producer_of(model), consumer_of(model, **BY_TWO)
    pids = [process.pid for process in workers_of(producer)]
    wish = params(1, to_be_sent(address_of(consumer)))
    producer.add_request("one", list(PROMPT), wish)
    producer.step()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankError):
        while producer.has_unfinished_requests:
            producer.step()
    producer.close()
    assert_all_gone(pids)
    got = answer(consumer, PROMPT, params(LIMIT))
    assert tokens(got) == right
    consumer.close()


def test_the_name_is_that_of_all_weights(tmp_path, seed):
    model = write_checkpoint(tmp_path, "llama", seed)
    args = small_args(model)
    name = weights_name(args, torch.float32)
    assert name == weights_name(args, torch.float32) != weights_name(args, torch.bfloat16)
    assert name != weights_name(small_args(model, block_size=8), torch.float32)
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert name != weights_name(args, torch.float32)
    with pytest.raises(ValueError, match=r"model: got .*; accepted: a folder of safetensors"):
        weights_name(small_args(str(tmp_path / "nothing")), torch.float32)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "role, own, extra",
    [
        ("kv_both", {}, {}),
        ("kv_consumer", {}, {}),
        ("kv_producer", dict(pipeline_parallel_size=2), {}),
        ("kv_producer", dict(data_parallel_size=2), {}),
        ("kv_producer", dict(kv_cache_dtype="int8"), {}),
        ("kv_producer", {}, {"use_layerwise": True}),
    ],
)
def test_what_ranks_cannot_send(role, own, extra):
    with pytest.raises(ValueError, match=r"kv_transfer_config: got .*each process holds its own"):
        EngineArgs(
            "models/tiny",
            tensor_parallel_size=2,
            kv_transfer_config=transfer(KINDS[0], role, **extra),
            **own,
        )


@pytest.mark.parametrize(
    "role, extra",
    [
        ("kv_both", BY_TWO),
        ("kv_producer", BY_TWO),
        ("kv_consumer", BY_TWO | {"use_layerwise": True}),
        ("kv_consumer", {"prefill": {"tp_size": 0}}),
        ("kv_consumer", {"prefill": {"dp_size": 2}}),
        ("kv_consumer", {"prefill": 2}),
    ],
)
def test_a_consumer_of_parts_that_cannot_be(role, extra):
    with pytest.raises(ValueError, match=r"kv_connector_extra_config: got .*prefill"):
        EngineArgs("models/tiny", kv_transfer_config=transfer(KINDS[0], role, **extra))


@pytest.mark.parametrize("extra", [BY_TWO, {"use_layerwise": True}])
def test_a_drafts_blocks_travel_whole(extra):
    own = transfer(KINDS[0], "kv_consumer", **extra)
    args = EngineArgs("models/tiny", kv_transfer_config=own)
    with pytest.raises(ValueError, match=r"got (2|True); accepted: none with a draft that has K"):
        pages_and_name(args, None, ["the draft's pool"])


def test_heads_that_cannot_be_shared(tmp_path, seed):
    dense = write_checkpoint(tmp_path / "llama", "llama", seed)  # two KV heads
    latents = write_checkpoint(tmp_path / "mla", "deepseek_v3", seed)
    four = {"prefill": {"tp_size": 4}}
    with pytest.raises(
        ValueError, match=r"tp_size: got 4; accepted: 1, or what divides the model's"
    ):
        consumer_of(dense, **four)
    with pytest.raises(ValueError, match=r"tp_size: got 2; accepted: 1 for a model with latents"):
        consumer_of(latents, **BY_TWO)
    own = dict(kv_transfer_config=transfer(KINDS[0], "kv_producer"))
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size: got 4; accepted: 1, or what divides"
    ):
        parallel_engine(small_args(dense, tensor_parallel_size=4, **own))
