"""K and V that travel in 8 bits: how far they are from what was sent, who takes them, and how many
tokens stay the same.
"""

import random

import pytest
import torch

from lessons.l26_kv_transfer.lab.testing import DEVICE, empty_pool
from lessons.l26_kv_transfer.pages import Pages
from reference import EngineArgs
from reference.engine.assembly import new_engine
from reference.features.kv_transfer import rounded
from reference.features.kv_transfer.rounded import RoundedPages, stored
from tests.transfer_cases import (
    KINDS,
    address_of,
    answer,
    apart,
    config,
    engine_of,
    params,
    tokens,
)

FP8 = {"timeout_s": 30.0, "serde": {"type": "fp8"}}
ROUNDED = dict(kv_connector_extra_config=FP8)
POOLS = ("float32", "bfloat16", "latents")
PROMPT = [random.Random(1).randrange(60) for _ in range(41)]  # ten blocks and a token
LIMIT = 8


def filled(kind: str, dtype: torch.dtype | None = None):
    """A pool of 7 blocks of 5 slots. Each head of each block has a magnitude of its own, from 1e-4
    to 1e3; some numbers are 0.
    """
    pool = empty_pool(kind, 7, 5)
    if dtype is not None:
        pool.k_slots, pool.v_slots = pool.k_slots.to(dtype), pool.v_slots.to(dtype)
    for slots in stored(pool):
        blocks = pool.blocks(slots)  # [layers, blocks, block_size, Hkv, D], a view
        size = torch.rand(*blocks.shape[:2], 1, blocks.shape[3], 1, device=DEVICE) * 7 - 4
        values = torch.randn(blocks.shape, device=DEVICE) * 10**size
        values[torch.rand(values.shape, device=DEVICE) < 0.1] = 0
        blocks.copy_(values)
    return pool


def as_sent(pool, blocks) -> list[torch.Tensor]:
    """The numbers of these blocks in float64: [layers, blocks, block_size, Hkv, D] each."""
    return [pool.blocks(slots)[:, blocks].double() for slots in stored(pool)]


def check_error(
    sent: list[torch.Tensor], come: list[torch.Tensor], dtype: torch.dtype, slack: float = 0.0
) -> None:
    """Each number within the error that rounded.py states, to which that of the dtype is added, and
    so much of the largest number of its head.
    """
    limits = torch.finfo(dtype)
    for x, y in zip(sent, come):
        amax = x.abs().amax(dim=(2, 4), keepdim=True)  # of a head in a block
        allowed = torch.maximum(x.abs() / 17, amax / 458752) * (1 + 1e-6)
        allowed += y.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps
        allowed += slack * amax
        assert ((x - y).abs() <= allowed).all(), (x - y).abs().sub(allowed).max()


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", POOLS)
def test_the_error_is_the_one_that_is_stated(kind, dtype, seed):
    """Against float64 of what was sent; and every other block keeps its bits."""
    source, target = filled(kind, dtype), filled(kind, dtype)
    before = as_sent(target, [1, 3, 4, 6])
    there, here = RoundedPages([source]), RoundedPages([target])
    packed = there.read([6, 2, 5], there.now())
    assert list(packed.shape) == [3, there.block_bytes] and packed.dtype == torch.uint8
    here.write([0, 5, 2], packed, here.now())
    check_error(as_sent(source, [6, 2, 5]), as_sent(target, [0, 5, 2]), source.k_slots.dtype)
    assert all(map(torch.equal, before, as_sent(target, [1, 3, 4, 6])))


def test_the_middle_of_two_codes_has_the_largest_error():
    """1 becomes 448 codes; 17/448 is the middle of 16 and 18, 1/448 of 1/1024 that of 0 and 1."""
    pool = empty_pool("float32", 7, 5)
    numbers = pool.blocks(pool.k_slots)[0, 3, :, 0]  # [block_size, D], a view
    numbers[0, :3] = torch.tensor([1.0, 17 / 448, 1 / 458752])
    pages = RoundedPages([pool])
    pages.write([4], pages.read([3], pages.now()), pages.now())
    found = pool.blocks(pool.k_slots)[0, 4, 0, 0, :3]
    expected = torch.tensor([1.0, 16 / 448, 0.0])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=0)


def test_half_the_bytes_of_16_bits_and_a_scale_for_each_head():
    for kind in POOLS:
        pool = empty_pool(kind, 7, 16)
        scales = sum(slots.shape[0] * slots.shape[2] * 4 for slots in stored(pool))
        exact, itemsize = Pages([pool]).block_bytes, pool.k_slots.itemsize
        assert RoundedPages([pool]).block_bytes == exact // itemsize + scales


def test_a_nan_is_seen_where_it_was_and_nowhere_else():
    source, target = filled("float32"), filled("float32")
    source.blocks(source.k_slots)[1, 2, 3, 0, 1] = torch.nan
    there, here = RoundedPages([source]), RoundedPages([target])
    here.write([0, 1], there.read([2, 3], there.now()), here.now())
    k, v = as_sent(target, [0, 1])
    assert k[1, 0, :, 0].isnan().all() and not v.isnan().any()
    k[1, 0, :, 0] = 0
    assert not k.isnan().any()


def test_a_drafts_blocks_come_with_all_their_bits():
    pools = [filled("float32"), filled("bfloat16")]
    pages = RoundedPages(pools)
    exact = Pages(pools[1:])
    assert pages.block_bytes == RoundedPages(pools[:1]).block_bytes + exact.block_bytes
    before = exact.read([3], exact.now())
    pages.write([6], pages.read([3], pages.now()), pages.now())
    assert exact.read([6], exact.now()).equal(before)


def coarse(x):
    """A scale for all heads of a layer."""
    scales = x.abs().amax((-2, -1), keepdim=True).expand(*x.shape[:-1], 1) / 448
    return (x / scales).to(torch.float8_e4m3fn).view(torch.uint8), scales.contiguous()


class Other:
    """A format with another `quantize`."""

    def __init__(self, quantize):
        self.quantize, self.dequantize = quantize, rounded.Float8().dequantize


def narrow(x):
    """Three bits less than E4M3's largest numbers need."""
    codes, scales = rounded.Float8().quantize(x)
    return codes & 0xFE, scales


@pytest.mark.parametrize("bug", [coarse, narrow])
def test_a_planted_bug_is_found(bug, seed, monkeypatch):
    monkeypatch.setattr(rounded, "FP8", Other(bug))
    with pytest.raises(AssertionError):
        test_the_error_is_the_one_that_is_stated("float32", None, seed)


# ---------------------------------------------------------------- two engines


@pytest.fixture(scope="module")
def alone() -> list[int]:
    engine = engine_of()
    return tokens(answer(engine, PROMPT, params(LIMIT)))


def numbers_by_key(engine) -> dict[bytes, list[torch.Tensor]]:
    """What an engine's pool has under each key of its prefix cache."""
    block_of = engine.scheduler.blocks.cache.block_of
    return {key: as_sent(engine.runner.pool, [block]) for key, block in block_of.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompts_blocks_come_in_8_bits(kind):
    """The consumer decodes over numbers that are near to those of the producer."""
    producer, consumer = (engine_of(config(kind, role, **ROUNDED)) for role in ROLES)
    handed_over, got = apart(producer, consumer, PROMPT, LIMIT)
    assert len(handed_over["remote_block_ids"]) == 10 and got.num_cached_tokens == 40
    sent, come = numbers_by_key(producer), numbers_by_key(consumer)
    both = sent.keys() & come.keys()
    assert len(both) == 10
    for name in both:
        check_error(sent[name], come[name], torch.float64)
        assert not all(map(torch.equal, sent[name], come[name])), "they were sent as they are"
    for engine in (producer, consumer):
        engine.close()


ROLES = ("kv_producer", "kv_consumer")


@pytest.mark.parametrize("is_rounded", [(True, False), (False, True)], ids=str)
def test_exact_and_rounded_blocks_are_not_exchanged(is_rounded, alone):
    """Unless both ends ask for it: the other end refuses, says so, and computes."""
    extras = [ROUNDED if each else {} for each in is_rounded]
    producer, consumer = (
        engine_of(config(KINDS[0], role, **extra)) for role, extra in zip(ROLES, extras)
    )
    for engine, each in zip((producer, consumer), is_rounded):
        connector = engine.scheduler.blocks.connector
        assert connector.of.endswith(" in float8_e4m3fn") == each
        assert type(connector.pages) is (RoundedPages if each else Pages)
    handed_over, got = apart(producer, consumer, PROMPT, LIMIT)
    assert handed_over is None and tokens(got) == alone and got.num_cached_tokens == 0
    assert producer.scheduler.blocks.connector.faults == {"refused": 1}
    for engine in (producer, consumer):
        engine.close()


def tiny(role: str | None):
    """An engine of the small model that the course has trained."""
    own = None if role is None else config(KINDS[0], role, **ROUNDED, kv_buffer_size=1e8)
    sizes = dict(max_model_len=256, num_gpu_blocks_override=64, max_num_seqs=4)
    return new_engine(EngineArgs("models/tiny", device="cpu", kv_transfer_config=own, **sizes))


def test_most_tokens_stay_the_same():
    """Counted, not promised: tokens of eight answers up to the first that differs."""
    single, producer, consumer = map(tiny, (None, *ROLES))
    to = address_of(consumer)
    same = 0
    for n in range(8):
        text = "".join(f"def f{n + i}(a, b):\n    return a * {i} + b\n\n" for i in range(10))
        prompt = single.tokenizer.encode(text)[: 100 + 7 * n]
        right = tokens(answer(single, prompt, params(32)))
        wish = dict(do_remote_decode=True, remote_host=to.host, remote_port=to.port)
        handed_over = answer(producer, prompt, params(1, wish)).kv_transfer_params
        got = answer(consumer, prompt, params(32, handed_over))
        assert got.num_cached_tokens >= 80
        pairs = list(zip(tokens(got), right))
        same += next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    print(f"{same} of {8 * 32} tokens")
    assert same > 0.75 * 8 * 32
    for engine in (producer, consumer):
        engine.close()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "serde", ["fp8", {"type": "int8"}, {"type": "fp8", "fp8_dtype": "float8_e5m2"}, {}, {"x": 1}]
)
def test_a_format_that_is_not_known(serde):
    own = config(KINDS[0], "kv_both", kv_connector_extra_config={"serde": serde})
    with pytest.raises(ValueError, match=r"kv_connector_extra_config: got .*; accepted: .*fp8"):
        EngineArgs("models/tiny", kv_transfer_config=own)


@pytest.mark.parametrize(
    "own, said",
    [
        (dict(kv_cache_dtype="int8"), "None with kv_cache_dtype='int8', because codes travel"),
        (dict(batch_invariant=True), "None with batch_invariant=True, because rounded blocks"),
    ],
)
def test_arguments_that_do_not_go_together(own, said):
    with pytest.raises(ValueError, match=r"serde: got 'fp8'; accepted: ") as refused:
        EngineArgs("models/tiny", kv_transfer_config=config(KINDS[0], "kv_both", **ROUNDED), **own)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_dtype_may_be_named():
    serde = {"type": "fp8", "fp8_dtype": "float8_e4m3fn"}
    own = config(KINDS[0], "kv_both", kv_connector_extra_config={"serde": serde})
    assert EngineArgs("models/tiny", kv_transfer_config=own).kv_transfer_config.is_rounded
    own = config(KINDS[0], "kv_both", kv_connector_extra_config={"serde": None})
    assert not EngineArgs("models/tiny", kv_transfer_config=own).kv_transfer_config.is_rounded
