"""Blocks that wait in host memory and in files: what leaves first, what a fault costs, and that a
block is never another one's.
"""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH
from lessons.l13_prefix_caching.naive import FIRST, HashBlocks
from lessons.l15_chunked_prefill.lab.virtual import new_request
from lessons.l21_multi_lora.lab.testing import random_adapter
from lessons.l26_kv_transfer.blocks import Elsewhere, TieredBlockManager, plain
from lessons.l26_kv_transfer.connector import TierConnector
from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import OLDEST_PART_S, FolderTier, HostTier, UsedAgainLast
from lessons.toolbox.profile import time_model
from reference import LLM, SamplingParams
from reference.engine.engine_args import EngineArgs
from reference.features.offload import digest_of, salt_of
from tests.engine_cases import CONFIG

SIZE = 64
CASES = (("a", 1), ("b", 1), ("a", 2))  # names and seeds of adapters
MODEL = "models/tiny"


def block(number: int) -> torch.Tensor:
    return torch.full((SIZE,), number, dtype=torch.uint8)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def held(tier, count: int = 10) -> list[int]:
    """Which of the first keys it has. Asks for their bytes, too."""
    found = [number for number in range(count) if tier.has(key(number))]
    for number in found:
        assert tier.get(key(number)).tolist() == [number] * SIZE
    return found


# ---------------------------------------------------------------- host memory


def test_the_least_recently_used_block_goes_down():
    below = HostTier(10, SIZE)
    tier = HostTier(2, SIZE, below)
    tier.put(key(0), block(0))
    tier.put(key(1), block(1))
    tier.get(key(0))
    tier.put(key(2), block(2))
    assert held(below) == [1] and sorted(tier.rows) == [key(0), key(2)]


def test_a_block_that_is_wanted_comes_up_again():
    tier = HostTier(1, SIZE, HostTier(10, SIZE))
    for number in range(3):
        tier.put(key(number), block(number))
    assert tier.get(key(0)).tolist() == [0] * SIZE
    assert list(tier.rows) == [key(0)] and held(tier) == [0, 1, 2]


def test_blocks_that_were_used_again_stay_longer():
    tier = HostTier(2, SIZE, order=UsedAgainLast())
    tier.put(key(0), block(0))
    tier.get(key(0))
    for number in range(1, 5):
        tier.put(key(number), block(number))
        assert sorted(tier.rows) == [key(0), key(number)]


def test_a_host_without_room_hands_everything_down():
    below = HostTier(10, SIZE)
    tier = HostTier(0, SIZE, below)
    tier.put(key(3), block(3))
    assert held(below) == [3] and tier.get(key(3)) is not None


def test_what_was_got_does_not_change_when_its_place_is_given_away():
    tier = HostTier(1, SIZE)
    tier.put(key(0), block(0))
    got = tier.get(key(0))
    tier.put(key(1), block(1))
    assert got.tolist() == [0] * SIZE and tier.get(key(0)) is None


# ---------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path) -> FolderTier:
    return FolderTier(str(tmp_path), SIZE, quota=10**6)


def test_files_outlive_their_writer(folder, tmp_path):
    folder.put(key(1), block(1))
    assert held(FolderTier(str(tmp_path), SIZE, quota=10**6)) == [1]


def test_files_of_another_model_are_not_found(folder, tmp_path):
    folder.put(key(1), block(1))
    assert held(FolderTier(str(tmp_path), SIZE, quota=10**6, of="another")) == []


def torn(data: bytes) -> list[bytes]:
    """A file of which something is wrong: cut, longer, a bit changed, another layout."""
    changed = bytearray(data)
    changed[-1] ^= 1
    return [data[:-1], data[:10], b"", data + b"0", bytes(changed), b"X" + data[1:]]


@pytest.mark.parametrize("how", range(6))
def test_a_torn_file_is_no_block(folder, how):
    folder.put(key(1), block(1))
    with open(folder.name_of(key(1)), "r+b") as file:
        data = torn(file.read())[how]
        file.seek(0)
        file.truncate()
        file.write(data)
    assert folder.get(key(1)) is None and not folder.has(key(1))
    assert sum(folder.faults.values()) == 1


def test_a_file_under_another_name_is_no_block(folder):
    folder.put(key(1), block(1))
    os.rename(folder.name_of(key(1)), folder.name_of(key(2)))
    assert folder.get(key(2)) is None


def test_a_killed_writer_leaves_nothing(folder, tmp_path):
    folder.put(key(1), block(1))
    name = folder.name_of(key(2)) + ".1.1.part"
    os.makedirs(os.path.dirname(name), exist_ok=True)
    with open(name, "wb") as file:
        file.write(b"half")
    assert not folder.has(key(2))
    assert len(list(folder.files())) == 1 and os.path.exists(name)  # it may be written just now
    long_ago = time.time() - 2 * OLDEST_PART_S
    os.utime(name, (long_ago, long_ago))
    list(FolderTier(str(tmp_path), SIZE, quota=10**6).files())
    assert not os.path.exists(name)


def test_a_full_disk_costs_blocks_and_nothing_else(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    folder.put(key(1), block(1))
    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "pipe_file", full)
        folder.put(key(2), block(2))
    assert held(folder) == [1] and folder.faults == {"put OSError": 1}
    folder.put(key(2), block(2))
    assert held(folder) == [1, 2]


def test_a_writer_that_fails_half_way_leaves_no_part(folder, monkeypatch):
    def fails(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LocalFileSystem, "mv", fails)
    folder.put(key(2), block(2))
    assert not folder.has(key(2)) and not any(folder.store.find(folder.folder))


def test_two_engines_keep_to_one_quota(tmp_path):
    each = 8 + 32 + SIZE
    ours, theirs = (FolderTier(str(tmp_path), SIZE, quota=5 * each) for _ in range(2))
    now = time.time() - 1000
    for number in range(4):
        (ours, theirs)[number % 2].put(key(number), block(number))
        os.utime(ours.name_of(key(number)), (now + number, now + number))
    ours.get(key(0))  # it was used last
    for number in range(4, 8):
        ours.put(key(number), block(number))
        os.utime(ours.name_of(key(number)), (now + number, now + number))
    assert len(list(ours.files())) <= 5
    assert ours.has(key(0)) and not ours.has(key(1)) and not theirs.has(key(1))


def test_a_file_that_another_engine_removes_is_missing_and_no_fault(folder, monkeypatch):
    folder.put(key(1), block(1))
    monkeypatch.setattr(folder.store, "exists", lambda name: True)
    os.remove(folder.name_of(key(1)))
    assert folder.get(key(1)) is None and not folder.faults


# ---------------------------------------------------------------- the connector


class Gate:
    """A tier whose `get` waits until it is opened."""

    def __init__(self, tier):
        self.tier, self.opened = tier, threading.Event()

    def has(self, key) -> bool:
        return self.tier.has(key)

    def put(self, key, block) -> None:
        self.tier.put(key, block)

    def get(self, key):
        assert self.opened.wait(20)
        return self.tier.get(key)


def new_pool(num_blocks: int = 8, block_size: int = 4) -> KVPool:
    pool = KVPool(CONFIG, num_blocks, block_size, LESSON_12_TORCH)
    for slots in pool.tensors:
        slots.normal_()
    return pool


def ended(connector) -> list:
    """Wait for the next copies to end."""
    deadline = time.monotonic() + 20
    while not (jobs := connector.finished()):
        connector.wait()
        assert time.monotonic() < deadline, "no copy ends"
    return jobs


def test_blocks_come_back_with_all_their_bits():
    pool = new_pool()
    pages = Pages([pool, new_pool()])
    connector = TierConnector(pages, HostTier(8, pages.block_bytes))
    before = pages.read(range(8), pages.now())
    job = connector.start_save([key(1), key(2)], [5, 3])
    assert ended(connector) == [job] and job.arrived == 2
    connector.start_load([key(2), key(1), key(9)], [0, 7, 6])
    (load,) = ended(connector)
    after = pages.read(range(8), pages.now())
    assert load.arrived == 2
    assert after[[0, 7]].equal(before[[3, 5]]) and after[1:7].equal(before[1:7])


def test_a_load_waits_for_the_save_that_brings_its_block():
    pages = Pages([new_pool()])
    connector = TierConnector(pages, Gate(HostTier(8, pages.block_bytes)))
    for nth in range(50):
        connector.start_save([key(nth)], [1])
        assert connector.matched([key(nth)]) == 1
        connector.start_load([key(nth)], [2])
        connector.tier.opened.set()
        jobs = []
        while len(jobs) < 2:
            jobs += ended(connector)
        assert all(job.arrived for job in jobs)


def test_a_load_that_is_given_up_never_touches_the_pool():
    """Its blocks belong to others by then."""
    pages = Pages([new_pool()])
    tier = HostTier(8, pages.block_bytes)
    connector = TierConnector(pages, Gate(tier), patience_s=0.01)
    tier.put(key(1), torch.zeros(pages.block_bytes, dtype=torch.uint8))
    before = pages.read(range(8), pages.now())
    job = connector.start_load([key(1)], [4])
    assert ended(connector) == [job] and job.arrived == 0 and connector.given_up == 1
    assert connector.matched([key(1)]) == 0, "a store that hangs is offered again at once"
    connector.tier.opened.set()
    connector.threads.shutdown()
    assert pages.read(range(8), pages.now()).equal(before) and not connector.loaded_blocks


def test_a_fault_of_the_place_is_counted_and_ends_the_copy():
    class Broken(HostTier):
        def get(self, key):
            raise OSError("gone")

    pages = Pages([new_pool()])
    connector = TierConnector(pages, Broken(8, pages.block_bytes))
    connector.start_save([key(1)], [1])
    ended(connector)
    connector.start_load([key(1)], [2])
    assert ended(connector)[0].arrived == 0 and connector.faults == {"OSError": 1}


# ---------------------------------------------------------------- whose block is it


def new_blocks(connector=None) -> TieredBlockManager:
    return TieredBlockManager(8, 4, HashBlocks(4), connector)


def test_a_key_is_that_of_all_tokens_before_it():
    """However the tokens came: at once, in pieces, or after a load."""
    saved = []

    class Notes:
        def start_save(self, keys, blocks):
            saved.extend(keys)

    tokens = list(range(100, 116))
    for pieces in ([16], [4, 8, 12, 16], [5, 7, 16]):
        saved.clear()
        blocks = new_blocks(Notes())
        blocks.announce(0, FIRST)
        blocks.grow(0, 0, 16)
        for count in pieces:
            blocks.remember(0, tokens[:count])
        assert saved == list(HashBlocks(4).hashes(tokens, 4)), pieces


def test_a_name_without_the_numbers_of_this_process():
    assert plain(7) == plain(7 + (3 << 32)) == 7
    assert plain(-5) == plain(-900) == -1


def test_the_salt_is_that_of_the_adapter_and_of_the_pictures():
    sequence = new_request(0, [1, 2, 3], 4)
    sequence.adapter, sequence.pictures = None, ()
    assert salt_of(sequence) == FIRST


def test_an_adapter_is_known_by_its_numbers():
    layers = {"layers.0.self_attn.q_proj": (48, 48)}
    one, again, other = (random_adapter(layers, name, 4, seed) for name, seed in CASES)
    assert one.serial != again.serial and digest_of(one) == digest_of(again) != digest_of(other)


def test_who_waits_for_a_block_does_not_hold_up_others():
    """Nothing is admitted before its load has ended, and then its prefix is known."""
    pages = Pages([new_pool()])
    connector = TierConnector(pages, Gate(HostTier(8, pages.block_bytes)))
    blocks = new_blocks(connector)
    host = Elsewhere(blocks)
    tokens = list(range(10))
    keys = list(HashBlocks(4).hashes(tokens, 2))
    connector.start_save(keys, [6, 7])
    ended(connector)
    sequence = new_request(3, tokens, 2)
    host.fetch(sequence)
    assert host.has(sequence) and not host.bring_back(sequence)
    host.settle()
    assert host.has(sequence) and blocks.num_free == 6
    connector.tier.opened.set()
    while host.has(sequence):
        host.wait()
        host.settle()
    assert blocks.num_free == 8 and blocks.reuse(3, tokens) == 8


# ---------------------------------------------------------------- the engine


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """Texts of 96 tokens that begin differently."""
    ids = llm.get_tokenizer().encode(Path(time_model.__file__).read_text(encoding="utf-8"))
    return [[nth + 5, *ids[: 95 - nth], *[7] * nth] for nth in range(count)]


def test_an_engine_that_starts_again_finds_its_prompts(tmp_path):
    made = dict(
        device="cpu",
        max_model_len=128,
        num_gpu_blocks_override=16,
        kv_offloading_size=0.002,
        kv_offloading_folder=str(tmp_path),
    )
    params, answers = SamplingParams(temperature=0, max_tokens=8), []
    plain_llm = LLM(MODEL, device="cpu", max_model_len=128)
    asked = prompts(plain_llm, 12)
    wanted = [out.outputs[0].token_ids for out in plain_llm.generate(asked, params, use_tqdm=False)]
    for life in range(2):
        llm = LLM(MODEL, **made)
        outputs = llm.generate(asked, params, use_tqdm=False)
        answers.append([out.outputs[0].token_ids for out in outputs])
        cached = [out.num_cached_tokens for out in outputs]
        assert (min(cached) >= 80) if life else (max(cached) == 0)
        assert (llm.engine.scheduler.host.found >= 12 * 80) == bool(life)
        llm.shutdown()
    assert answers == [wanted, wanted]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(kv_offloading_folder="/tmp/kv"), "kv_offloading_folder"),
        (dict(kv_offloading_size=1, enable_prefix_caching=False), "kv_offloading_size"),
        (dict(kv_offloading_size=1, preemption_mode="swap"), "saved already"),
        (dict(kv_offloading_size=1, tensor_parallel_size=2), "its own share"),
    ],
)
def test_what_cannot_work_is_refused(arguments, said):
    with pytest.raises(ValueError) as refused:
        EngineArgs(MODEL, **arguments)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file"), "nostore://x"):
        with pytest.raises(ValueError, match="kv_offloading_folder: got") as refused:
            LLM(MODEL, device="cpu", kv_offloading_size=0.01, kv_offloading_folder=folder)
        assert "\n" not in str(refused.value)
