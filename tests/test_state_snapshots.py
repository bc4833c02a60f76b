"""Snapshots of states: where they are taken, which prompts begin from one, which leave first; and
states that wait on the host.
"""

from copy import deepcopy

import pytest
import torch

from lessons.l12_paged_kv.blocks import OutOfBlocks
from lessons.l13_prefix_caching.naive import HashBlocks
from reference.engine.engine_args import EngineArgs
from reference.engine.sampling_params import SamplingParams
from reference.engine.stats import StatsCounter
from reference.features.states import swap
from reference.features.states.generate import generate as alone
from reference.features.states.generate import whole_sequence
from reference.features.states.room import slot_bytes, with_states, worth_tokens
from reference.features.states.snapshots import CachingSlotBlocks
from tests.hybrid_cases import HYBRIDS, assert_all_returned, new_engine
from tests.random_families import saved_and_loaded

pytestmark = pytest.mark.usefixtures("seed")
FIVE, OTHER = list(range(20)), list(range(12)) + [40] * 8
GREEDY = dict(temperature=0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=HYBRIDS, ids=lambda config: config.model_type)
def model(request, tmp_path_factory):
    return saved_and_loaded(request.param, tmp_path_factory.mktemp("snapshots"))[1]


class Cases:
    """Blocks of 4 tokens and a list of the states in their slots: (sequence, tokens of it)."""

    def __init__(self, num_slots=4, num_blocks=30, every=4, worth_tokens=9):
        self.slots: list = [None] * num_slots
        self.blocks = CachingSlotBlocks(
            num_blocks, 4, num_slots, self.copy, HashBlocks(4), every, worth_tokens
        )

    def copy(self, source, target):
        self.slots[target] = self.slots[source]

    def begin(self, sequence, tokens) -> int:
        """How many tokens a prompt begins with. The state must be the one after them."""
        held = self.blocks.reuse(sequence, tokens)
        if held:
            assert self.slots[self.blocks.tables[sequence].slot] == tuple(tokens[:held])
        return held

    def run(self, sequence, tokens, held, count):
        """Its next tokens."""
        self.blocks.grow(sequence, held, held + count)
        table, known = self.blocks.tables[sequence], tuple(tokens[: held + count])
        assert not held or self.slots[table.slot] == known[:held], "the state of another prefix"
        self.slots[table.slot] = known
        if (held + count) // 4 > held // 4:
            self.blocks.remember(sequence, known)

    def serve(self, sequence, tokens) -> tuple[int, list[int]]:
        """A whole prompt, then the sequence ends: what it began with, and its chunks."""
        first = held = self.begin(sequence, tokens)
        chunks = []
        while held < len(tokens):
            left = len(tokens) - held
            chunks.append(self.blocks.chunk_of(sequence, held, left, len(tokens)))
            self.run(sequence, tokens, held, chunks[-1])
            held += chunks[-1]
        self.blocks.free(sequence)
        return first, chunks

    @property
    def kept(self) -> list[int]:
        """Lengths of the snapshots, and each must be in its slot."""
        return sorted(len(self.slots[slot]) for slot in self.blocks.snapshots.key_of)


# ---------------------------------------------------------------- where they are


def test_a_prompt_stops_where_two_part_and_the_third_begins_there():
    cases = Cases()
    assert cases.serve(0, FIVE[:19]) == (0, [19])  # its end is no block's end: nothing is kept
    assert cases.kept == []
    assert cases.serve(1, OTHER[:19]) == (0, [12, 7])
    assert cases.kept == [12]
    assert cases.serve(2, FIVE[:19]) == (12, [4, 3])  # blocks were known up to 16
    assert cases.serve(3, FIVE[:19]) == (16, [3])
    assert cases.blocks.snapshots.counts.missed_tokens == 12 + 4
    assert cases.blocks.snapshots.counts.hits == 2


def test_the_newest_state_of_a_sequence_takes_the_place_of_the_one_before():
    """Blocks end at 4, 8 … 20; a snapshot is worth 9 tokens, so 4 and 8 go, and 12 may stay."""
    cases = Cases(num_slots=6)
    cases.begin(0, FIVE)
    seen = []
    for held in range(20):
        cases.run(0, FIVE, held, 1)
        seen.append(cases.kept)
    assert seen[3] == [4] and seen[7] == [8] and seen[19] == [20]
    assert cases.blocks.snapshots.counts.replaced == 4
    cases.blocks.free(0)
    far = Cases(num_slots=6, worth_tokens=8)
    far.begin(0, FIVE)
    for held, count in ((0, 4), (4, 8), (12, 8)):
        far.run(0, FIVE, held, count)
    assert far.kept == [4, 12, 20]


def test_a_snapshot_where_prompts_part_stays():
    cases = Cases(num_slots=6, worth_tokens=99)
    cases.serve(0, FIVE[:19])
    cases.serve(1, [*OTHER[:16], *FIVE])
    assert cases.kept == [12, 36]


def test_a_snapshot_that_has_served_stays():
    cases = Cases(num_slots=6)
    cases.begin(0, FIVE)
    cases.run(0, FIVE, 0, 8)
    assert cases.begin(1, OTHER) == 8
    cases.run(0, FIVE, 8, 4)
    assert cases.kept == [8, 12]


def test_a_chunk_that_the_budget_cuts_ends_at_a_blocks_end():
    blocks = Cases().blocks
    assert [blocks.chunk_of(0, 0, count, 20) for count in (3, 4, 7, 11, 20)] == [3, 4, 4, 8, 20]
    assert [blocks.chunk_of(0, 3, count, 20) for count in (1, 4, 17)] == [1, 1, 17]
    assert [Cases(every=8).blocks.chunk_of(0, 0, count, 20) for count in (7, 9)] == [7, 8]


def test_snapshots_are_after_multiples_only():
    cases = Cases(every=8)
    cases.serve(0, FIVE)
    assert cases.serve(1, [*FIVE[:14], 50, 51]) == (0, [8, 8]) and cases.kept == [8, 16]


# ---------------------------------------------------------------- whose slot it is


def test_who_begins_from_a_snapshot_copies_it_before_it_writes():
    cases = Cases(num_slots=3)
    cases.serve(0, FIVE[:8])
    assert cases.kept == [8]
    assert cases.begin(1, FIVE) == cases.begin(2, OTHER) == 8
    assert cases.blocks.tables[1].slot == cases.blocks.tables[2].slot
    cases.run(1, FIVE, 8, 3)
    cases.run(2, OTHER, 8, 3)
    assert cases.kept == [8], "one of two has written into it"


def test_without_another_slot_it_writes_into_the_snapshot():
    cases = Cases(num_slots=1)
    cases.begin(0, FIVE)
    cases.run(0, FIVE, 0, 8)
    assert cases.kept == [], "no slot was free for a copy"
    cases.blocks.free(0)
    two = Cases(num_slots=2)
    two.serve(0, FIVE[:8])
    two.begin(1, [9, 9, 9])
    two.run(1, [9, 9, 9], 0, 3)
    assert two.begin(2, FIVE) == 8 and not two.blocks.slots.num_free
    two.run(2, FIVE, 8, 3)
    assert two.kept == [] and two.blocks.tables[1].slot != two.blocks.tables[2].slot


def test_the_least_recently_used_leaves_first():
    cases = Cases(num_slots=3, worth_tokens=1)
    prompts = [[at] * 5 for at in range(4)]
    for at in (0, 1, 0, 2):
        cases.serve(at, prompts[at][:4])
        cases.serve(at, prompts[at])  # used
    assert cases.begin(10, prompts[0]) == 4 and cases.begin(11, prompts[2]) == 4
    assert cases.begin(12, prompts[1]) == 0
    assert cases.blocks.snapshots.counts.evicted >= 1


def test_what_is_proven_leaves_after_what_is_not():
    """Requests that decode leave a snapshot each, and none takes the place of a shared prefix."""
    cases = Cases(num_slots=8)
    cases.serve(0, FIVE[:19])
    cases.serve(1, OTHER[:19])
    for at in range(2, 12):
        cases.serve(at, [at] * 8)
    assert 12 in cases.kept and cases.begin(20, OTHER) >= 12
    cases.blocks.free(20)
    for at in range(30, 34):  # at most two are proven: the newest
        cases.serve(at, [at] * 8)
        cases.serve(at, [at] * 9)
    assert len(cases.blocks.snapshots.proven) == 2
    for at in range(50, 58):
        cases.serve(at, [at] * 8)
    assert cases.begin(60, FIVE) == 0 and cases.begin(61, [33] * 9) == 8


def test_a_snapshot_leaves_with_its_blocks():
    cases = Cases(num_blocks=3)
    cases.serve(0, FIVE[:8])
    assert cases.kept == [8]
    cases.begin(1, [50] * 12)
    cases.run(1, [50] * 12, 0, 12)
    cases.blocks.free(1)
    assert 8 not in cases.kept and cases.begin(2, FIVE) == 0


def test_a_prompt_that_does_not_fit_gives_the_snapshot_back():
    cases = Cases(num_slots=2, num_blocks=4)
    cases.serve(0, FIVE[:8])
    assert cases.begin(1, FIVE) == 8
    with pytest.raises(OutOfBlocks):
        cases.blocks.grow(1, 8, 20)
    cases.blocks.free(1)
    assert cases.kept == [8] and cases.blocks.slots.num_free == 2 and cases.blocks.num_free == 4


# ---------------------------------------------------------------- in the engine


def test_the_engine_counts_what_it_finds(model):
    """Three questions about one text, one after the other, and a conversation's next turn."""
    engine = new_engine(model, enable_prefix_caching=True, mamba_block_size=4)
    counter, head, cached, answer = StatsCounter(engine), torch.randint(61, (9,)).tolist(), [], []
    prompts = [[*head, *torch.randint(61, (4,)).tolist()] for _ in range(3)]
    for at in range(4):
        prompt = prompts[at] if at < 3 else [*prompts[2], *answer, 7]
        engine.add_request(str(at), prompt, SamplingParams(max_tokens=6, **GREEDY))
        while engine.has_unfinished_requests:
            outputs = engine.step()
        answer = outputs[0].outputs[0].token_ids
        assert answer == alone(model, [prompt], 6)[0]
        cached.append(outputs[0].num_cached_tokens)
    assert cached == [0, 0, 8, 16]  # 13 tokens and 5 of the answer have run: 4 blocks
    assert_all_returned(engine)
    counts = counter.stats().snapshots
    assert counts.hits == 2 and counts.missed_tokens == 8
    assert StatsCounter(new_engine(model)).stats().snapshots is None


def test_a_step_of_drafts_ends_where_a_snapshot_may_be(model):
    """Else a sequence whose drafts are right would pass by most of them."""
    config = dict(method="ngram", num_speculative_tokens=3)
    engine = new_engine(
        model, enable_prefix_caching=True, mamba_block_size=4, speculative_config=config
    )
    (answer,), taken, blocks = alone(model, [[5, 6, 7]], 12), [], engine.scheduler.blocks
    take_snapshot = blocks.take_snapshot

    def noted(sequence, tokens):
        taken.append(tokens)
        take_snapshot(sequence, tokens)

    def lookup(sequence, count):
        return answer[len(sequence.output) :][:count]

    blocks.take_snapshot, engine.speculation.proposer.lookup = noted, lookup
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=12, **GREEDY))
    while engine.has_unfinished_requests:
        (output,) = engine.step()
    assert output.outputs[0].token_ids == answer and taken == [4, 8, 12]
    assert engine.speculation.counts.accepted >= 6
    assert_all_returned(engine)


def test_a_place_has_a_second_slot_for_a_snapshot(model):
    slot, block = model.config.state.bytes_per_sequence(8), 4 * model.config.kv_bytes_per_token(8)
    memory = 8 * slot + 20 * block
    args = EngineArgs(block_size=4, kv_cache_memory_bytes=memory, enable_prefix_caching=True)
    found = with_states(args, model, 64)
    places = found.max_num_seqs
    assert places == (memory - 16 * block) // (2 * slot)
    assert found.kv_cache_memory_bytes == memory - places * 2 * slot
    engine = new_engine(model, max_num_seqs=3, enable_prefix_caching=True)
    assert engine.scheduler.blocks.slots.num_blocks == 6
    config = dict(method="ngram", num_speculative_tokens=2)
    engine = new_engine(model, max_num_seqs=3, speculative_config=config)
    assert engine.scheduler.blocks.slots.num_blocks == 6, "one that a rejected draft brings back"


# ---------------------------------------------------------------- on the host


def swapped_out(model):
    """An engine whose second request waits on the host."""
    engine = new_engine(
        model, preemption_mode="swap", max_num_seqs=2, num_gpu_blocks_override=9, max_model_len=32
    )
    for at in range(2):
        engine.add_request(str(at), [5, at, 7, 8, 9] * 3, SamplingParams(max_tokens=9, **GREEDY))
    while not (host := engine.scheduler.host.swap).away:
        engine.step()
    return engine, host


def test_a_state_travels_with_its_blocks(model):
    engine, host = swapped_out(model)
    assert host.states.keys() == host.away.keys()
    engine.runner.pool.states.windows.fill_(torch.nan)  # what waits is a copy
    engine.abort_request("0")
    outputs = []
    while engine.has_unfinished_requests:
        outputs = engine.step()
    want = alone(model, [[5, 1, 7, 8, 9] * 3], 9)
    assert [out.outputs[0].token_ids for out in outputs] == want
    assert_all_returned(engine)


def test_a_view_on_the_host_is_found(model, monkeypatch):
    monkeypatch.setattr(swap, "on_host", lambda x: x)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        test_a_state_travels_with_its_blocks(model)


def test_a_request_that_ends_on_the_host_leaves_nothing_there(model):
    engine, host = swapped_out(model)
    for name in ("0", "1"):
        engine.abort_request(name)
    assert not host.states and not host.away
    assert_all_returned(engine)


def test_states_take_room_on_the_host(model):
    engine, host = swapped_out(model)
    slot_bytes = model.config.state.bytes_per_sequence(8)
    place = engine.scheduler.host
    assert place.state_blocks == -(-slot_bytes // (4 * model.config.kv_bytes_per_token(8)))
    used = sum(map(host.blocks_of, host.away)) + 2 * place.state_blocks
    place.host_blocks = used + 3
    assert place.has_room(3) and not place.has_room(4)


def test_worth_tokens_are_the_models_own(model):
    config = model.config
    found = worth_tokens(EngineArgs(), config, 8)
    assert found == config.state.bytes_per_sequence(8) / config.kv_bytes_per_token(8)
    assert worth_tokens(EngineArgs(kv_cache_dtype="int8"), config, 8) > found


# ---------------------------------------------------------------- in 16 bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_of_another_dtype(model, dtype):
    """As many bytes as it has; logits near those of float32; and whatever happens in the engine, as
    the slots are as wide as they are.
    """
    single, how = deepcopy(model).float(), dict(mamba_ssm_cache_dtype=dtype)
    engine = new_engine(single, max_num_seqs=3, **how)
    states = engine.runner.pool.states
    assert states.matrices.dtype == getattr(torch, dtype)
    args = EngineArgs(**how)
    assert states.nbytes == 3 * slot_bytes(args, model.config, 4)
    prompts = [torch.randint(61, (length,)).tolist() for length in (9, 1, 17)]
    params = SamplingParams(max_tokens=5, logprobs=1, **GREEDY)
    for at, prompt in enumerate(prompts):
        engine.add_request(str(at), prompt, params)
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {out.request_id: out.outputs[0] for out in engine.step()}
    assert_all_returned(engine)
    off = []
    for at, prompt in enumerate(prompts):
        answer = outputs[str(at)]
        tokens = torch.tensor(prompt + answer.token_ids[:-1])
        hidden = single(tokens, whole_sequence(single, len(tokens)))
        want = single.logits(hidden[len(prompt) - 1 :]).log_softmax(-1)
        for row, token, found in zip(want, answer.token_ids, answer.logprobs):
            off.append(abs(float(row[token]) - found[token].logprob))
    # the median, because a router may choose another expert for a token
    assert sorted(off)[len(off) // 2] < (1e-4 if dtype == "float32" else 0.2)


def test_the_host_and_snapshots_take_states_as_they_are(model):
    """In bfloat16 they are copied bit by bit, so a request that waits or begins from a snapshot
    goes on as it would have.
    """
    states = new_engine(model, mamba_ssm_cache_dtype="bfloat16").runner.pool.states
    for tensor in states.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    kept = [swap.on_host(x) for x in states.read(1)]
    states.copy(1, 3)
    states.write(2, kept)
    for tensor in states.tensors:
        assert torch.equal(tensor[:, 1], tensor[:, 2]) and torch.equal(tensor[:, 1], tensor[:, 3])
