"""The engine over a model whose layers keep states: whatever happens inside, every request gets
transformers' greedy tokens, and every block and every slot comes back.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from lessons.l12_paged_kv.blocks import BlockManager, OutOfBlocks
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.sampling_params import SamplingParams
from reference.features.states import layers as states
from reference.features.states import pool as pool_module
from reference.features.states.generate import generate as alone
from reference.features.states.generate import generate_held
from reference.features.states.room import with_states
from reference.features.states.slots import SlotBlocks
from reference.features.states.snapshots import CachingSlotBlocks
from tests.hybrid_cases import (
    DRAWN,
    HYBRIDS,
    MOST,
    Known,
    a_history,
    known_of,
    new_engine,
    serve,
)
from tests.random_families import saved_and_loaded

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module", params=HYBRIDS, ids=lambda config: config.model_type)
def models(request, tmp_path_factory):
    """transformers' model and ours, both in float64."""
    return saved_and_loaded(request.param, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def model(models):
    return models[1]


@pytest.fixture(scope="module")
def known(models):
    return known_of(models)


def test_random_histories(model, known, request):
    """Tokens under preemption, chunks, forks, aborts, and with a loop one step ahead. As many
    histories as it takes until each was seen, 20 at least.
    """
    names = ["finished", "preempted", "answers", "aborted", "cached", "swapped"]
    names += ["accepted", "rejected"]
    names += [f"snapshots {name}" for name in ("taken", "hits", "evicted", "missed_tokens")]
    seen, least = Counter(), 200 if request.config.getoption("--all") else 20
    for count in range(1, 10 * least):
        house, asked = a_history(known)
        seen += serve(new_engine(model, **house), asked)
        if count >= least and min(seen[name] for name in names) > 0:
            break
    assert min(seen[name] for name in names) > 0, seen


def test_in_float32(model):
    """What a GPU computes in: the tokens are those of one at a time in float32."""
    single = deepcopy(model).float()
    prompts = [torch.randint(61, (length,)).tolist() for length in (1, 2, 5, 8, 13, 17, 20)]
    answers = alone(single, prompts, MOST)
    known = [Known(prompt, answer, [answer] * 3) for prompt, answer in zip(prompts, answers)]
    for _ in range(4):
        house, asked = a_history(known)
        asked = [
            (one, replace(params, n=1, temperature=0.0), *when) for one, params, *when in asked
        ]
        serve(new_engine(single, **house), asked)


def test_the_rungs_give_the_same_tokens(model, known):
    prompts, answers = [one.prompt for one in known], [one.greedy for one in known]
    assert alone(model, prompts, MOST) == answers
    assert generate_held(model, prompts, MOST) == answers
    rows = [RowParams(1.0, seed=seed) for seed in range(DRAWN)]
    for prompt, _, drawn in known:
        assert generate_held(model, [prompt] * DRAWN, MOST, rows) == drawn


# ---------------------------------------------------------------- slots


def test_a_fork_copies_the_state_when_it_is_written():
    copies = []
    blocks = SlotBlocks(8, 4, 3, lambda *pair: copies.append(pair))
    blocks.grow(0, 0, 6)
    blocks.fork(0, 1)
    assert blocks.tables[0].slot == blocks.tables[1].slot and blocks.slots.num_free == 2
    assert blocks.grow(0, 6, 7) and copies == [(0, 1)]  # its block is copied by the runner
    assert not blocks.grow(1, 6, 7) and len(copies) == 1  # it is the only owner now
    assert {blocks.tables[0].slot, blocks.tables[1].slot} == {0, 1}
    blocks.fork(1, 2)
    blocks.free(2)
    assert blocks.slots.num_free == 1, "its parent still has the slot"
    blocks.free(0)
    blocks.free(1)
    assert blocks.slots.num_free == 3 and blocks.num_free == 8


def test_a_sequence_without_a_slot_does_not_fit():
    blocks = SlotBlocks(8, 4, 1, lambda *pair: None)
    blocks.grow(0, 0, 5)
    assert blocks.can_grow(0, 5, 9) and not blocks.can_grow(1, 0, 1)
    with pytest.raises(OutOfBlocks, match="a slot wanted, 0 of 1 free"):
        blocks.grow(1, 0, 1)
    assert 1 not in blocks.tables and blocks.num_free == 6
    blocks.free(0)
    assert blocks.can_grow(1, 0, 1)


# ---------------------------------------------------------------- memory


def test_states_get_their_memory_first_and_blocks_the_rest(model):
    slot, block = model.config.state.bytes_per_sequence(8), 4 * model.config.kv_bytes_per_token(8)
    args = EngineArgs(block_size=4, max_num_seqs=8, kv_cache_memory_bytes=8 * slot + 40 * block)
    found = with_states(args, model, 64)
    assert (found.max_num_seqs, found.kv_cache_memory_bytes) == (8, 40 * block)
    few = with_states(replace(args, kv_cache_memory_bytes=3 * slot + 16 * block), model, 64)
    assert (few.max_num_seqs, few.kv_cache_memory_bytes) == (3, 16 * block)
    engine = new_engine(
        model,
        max_num_seqs=8,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=3 * slot + 16 * block,
    )
    assert engine.scheduler.max_num_seqs == 3 == engine.scheduler.blocks.slots.num_blocks
    assert engine.runner.pool.num_blocks == 16
    assert engine.runner.pool.allocated_bytes - 3 * slot - 16 * block == block // 4  # the spare one


def test_too_little_memory_is_said_in_one_line(model):
    slot = model.config.state.bytes_per_sequence(8)
    for memory in (1, slot // 2, slot + 1):
        with pytest.raises(ValueError, match="max_model_len: got 64; accepted: at most") as said:
            new_engine(model, num_gpu_blocks_override=None, kv_cache_memory_bytes=memory)
        assert "\n" not in str(said.value)


def test_more_requests_than_slots_wait(model, known):
    slot, block = model.config.state.bytes_per_sequence(8), 4 * model.config.kv_bytes_per_token(8)
    memory = 2 * slot + 100 * block
    engine = new_engine(
        model, max_num_seqs=8, num_gpu_blocks_override=None, kv_cache_memory_bytes=memory,
        max_model_len=40,
    )  # fmt: skip
    places = engine.scheduler.max_num_seqs
    greedy = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    serve(engine, [(known[at % 8], greedy, 0, None) for at in range(3 * places)])


# ---------------------------------------------------------------- planted slips


def never_copied(self, source, target):
    """A fork's state is not copied."""


def lacks_if_new(self, sequence, held, tokens):
    """Who writes first into a shared slot writes for all."""
    return sequence not in self.tables or self.tables[sequence].slot is None


def always_before(lengths, held, slots, device):
    """A new sequence goes on from what its slot held before."""
    return replace(step_of(lengths, held, slots, device), has_state=torch.ones(9)[: len(slots)] > 0)


def ones_decode(lengths, held, slots, device):
    """A prompt of one token is a decode."""
    return step_of(lengths, [before or int(new == 1) for new, before in zip(lengths, held)],
                   slots, device)  # fmt: skip


def kept_slot(self, sequence):
    """A sequence that ends keeps its slot."""
    BlockManager.free(self, sequence)


def never_back(self, sequence, goes_back):
    """A state keeps the drafts that were rejected."""
    settle(self, sequence, False)


def all_again(self, rows, step):
    """Of a draft that was rejected its first tokens are forgotten, too."""


def row_behind(self, rows, step):
    """The rows of another sequence, or one too many to the right, are repeated."""
    repeat(self, (rows + 1).clamp(max=len(self.given[min(self.given)][0]) - 1), step)


def anywhere(self, sequence, tokens):
    """A snapshot is known by the last block that was full when it was taken."""
    super(CachingSlotBlocks, self).remember(sequence, tokens)
    self.take_snapshot(sequence, len(tokens))


step_of, settle, repeat = states.new_state_step, SlotBlocks.settle, states.StatePool.repeat
SLIPS = {
    "never copied": (states.StatePool, "copy", never_copied),
    "shared slots are written": (SlotBlocks, "lacks_slot", lacks_if_new),
    "no state begins": (pool_module, "new_state_step", always_before),
    "one token is a decode": (pool_module, "new_state_step", ones_decode),
    "a slot is kept": (SlotBlocks, "free", kept_slot),
    "a state does not come back": (states.StatePool, "write", lambda self, slot, state: None),
    "a rejected draft stays": (SlotBlocks, "settle", never_back),
    "an accepted draft goes": (states.StatePool, "repeat", all_again),
    "a wrong row is repeated": (states.StatePool, "repeat", row_behind),
    "a snapshot is of another length": (CachingSlotBlocks, "remember", anywhere),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_slip_is_found(slip, model, known, monkeypatch):
    monkeypatch.setattr(*SLIPS[slip])
    with pytest.raises(
        (AssertionError, KeyError, ValueError, IndexError, TypeError, RuntimeError, OutOfBlocks)
    ):
        for _ in range(40):
            house, asked = a_history(known)
            serve(new_engine(model, **house), asked)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "how, reason",
    [
        (dict(kv_offloading_size=0.01), "blocks travel, and states do not"),
        (dict(enable_lora=True), "adapters have the rows and names of a checkpoint's layers"),
        (dict(batch_invariant=True), "each adds in an order of its own"),
        (dict(kv_events_config=dict(enable_kv_cache_events=True)), "unless enable_prefix_caching"),
        (dict(mamba_block_size=6), "a multiple of block_size (4)"),
    ],
)
def test_what_does_not_work_with_states_is_said_in_one_line(how, reason, model):
    with pytest.raises(ValueError) as refused:
        new_engine(model, **how)
    said = str(refused.value)
    assert said.startswith(f"{next(iter(how))}: got ") and reason in said and "\n" not in said


def test_a_draft_with_states_is_refused(model):
    """The target may be any other model; what a draft refuses would stay in its states."""
    config = dict(method="draft", model="a model", num_speculative_tokens=2)
    args = EngineArgs(device="cpu", speculative_config=config)
    with pytest.raises(ValueError, match="speculative_config model: got 'a model'; accepted: one"):
        engine_over(model, None, args, model)
