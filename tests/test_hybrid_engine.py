"""The engine over a model whose layers keep states: whatever happens inside, every request gets
transformers' greedy tokens, and every block and every slot comes back.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from transformers import (
    GraniteMoeHybridConfig,
    Lfm2Config,
    NemotronHConfig,
    Qwen3NextConfig,
)

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
from tests.engine_cases import assert_clean
from tests.exact_peer import exact_logits
from tests.random_families import saved_and_loaded

pytestmark = pytest.mark.usefixtures("seed")
VOCAB, LONGEST, MOST = 61, 20, 16  # MOST: tokens of an answer
DRAWN = 3  # answers to a prompt that draws
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
LFM2 = Lfm2Config(
    **SIZES, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False
)
QWEN3_NEXT = Qwen3NextConfig(
    **SIZES,
    head_dim=8,
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=10,
    num_experts=4,
    num_experts_per_tok=2,
    layer_types=["linear_attention", "full_attention"] * 2,
)
GRANITE_4 = GraniteMoeHybridConfig(
    **SIZES,
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_state=6,
    mamba_d_head=12,
    time_step_limit=(0.1, 2.0),
    embedding_multiplier=3.0,
    residual_multiplier=0.7,
    attention_multiplier=0.4,
    logits_scaling=0.5,
    shared_intermediate_size=10,
    num_local_experts=4,
    num_experts_per_tok=2,
    position_embedding_type="nope",
    layer_types=["linear_attention", "full_attention"] * 2,
)
NEMOTRON_H = NemotronHConfig(
    **{key: size for key, size in SIZES.items() if key != "num_hidden_layers"},
    head_dim=8,
    mamba_num_heads=4,
    mamba_head_dim=5,
    n_groups=2,
    ssm_state_size=6,
    time_step_min=1e-30,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    moe_shared_expert_intermediate_size=10,
    layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
)
HYBRIDS = [QWEN3_NEXT, LFM2, GRANITE_4, NEMOTRON_H]


@pytest.fixture(scope="module", params=HYBRIDS, ids=lambda config: config.model_type)
def models(request, tmp_path_factory):
    """transformers' model and ours, both in float64."""
    return saved_and_loaded(request.param, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def model(models):
    return models[1]


class Known(NamedTuple):
    """A prompt, transformers' greedy answer to it, and what the naive rung draws by seeds 0, 1
    and 2.
    """

    prompt: list[int]
    greedy: list[int]
    drawn: list[list[int]]


@pytest.fixture(scope="module")
def known(models) -> list[Known]:
    (theirs, ours), found = models, []
    rows = [RowParams(1.0, seed=seed) for seed in range(DRAWN)]
    for length in (1, 1, 2, 5, 8, 13, 17, LONGEST):
        prompt = torch.randint(VOCAB, (length,)).tolist()
        tokens = list(prompt)
        for _ in range(MOST):
            tokens.append(int(exact_logits(theirs, torch.tensor(tokens))[-1].argmax()))
        found.append(Known(prompt, tokens[length:], alone(ours, [prompt] * DRAWN, MOST, rows)))
    assert len({token for one in found for token in one.greedy}) > 10
    assert all(len(set(map(tuple, one.drawn))) > 1 for one in found)
    return found


def new_engine(model, **how):
    """An engine whose pools hold NaN wherever nothing was written."""
    house = dict(block_size=4, max_num_seqs=4, max_model_len=64, num_gpu_blocks_override=64)
    engine = engine_over(model, None, EngineArgs(device="cpu", **house | how))
    pool = engine.runner.pool
    for tensor in (*pool.tensors, pool.states.windows, pool.states.matrices):
        tensor.fill_(torch.nan)
    return engine


def assert_all_returned(engine) -> None:
    assert_clean(engine)
    slots = engine.scheduler.blocks.slots
    assert slots.num_free == slots.num_blocks and not any(slots.owners)


def serve(engine, asked, most_steps: int = 3000) -> Counter:
    """asked: (what is known of a prompt, params, before which step it comes, before which its
    client gives up). Every answer must be the known one; what was seen is returned.
    """
    outputs, seen, step = {}, Counter(), 0
    while step == 0 or engine.has_unfinished_requests or step <= max(one[2] for one in asked):
        for at, (one, params, arrives, aborts) in enumerate(asked):
            if arrives == step:
                engine.add_request(str(at), one.prompt, params)
            if aborts == step and engine.abort_request(str(at)) is not None:
                seen["aborted"] += 1
        outputs |= {out.request_id: out for out in engine.step()}
        step += 1
        assert step < most_steps, "the engine makes no progress"
    for at, (one, params, *_) in enumerate(asked):
        if (out := outputs.get(str(at))) is None:
            continue
        wanted = [one.greedy] if params.temperature == 0 else one.drawn
        for answer, want in zip(out.outputs, (ended(each, params) for each in wanted)):
            got = answer.token_ids
            assert got == (want if out.finished else want[: len(got)]), at
        if out.finished:
            seen["finished"] += 1
            seen["preempted"] += out.metrics.preemptions
            seen["answers"] += len(out.outputs) > 1
    assert_all_returned(engine)
    return seen


def ended(answer: list[int], params: SamplingParams) -> list[int]:
    """What a request gets of an answer: up to its limit, or to its first stop token."""
    answer = answer[: params.max_tokens]
    ends = [at for at, token in enumerate(answer) if token in params.stop_token_ids]
    return answer[: ends[0] + 1] if ends else answer


def a_history(known) -> tuple[dict, list]:
    """The arguments of an engine, and what is asked of it."""
    places, tokens = random.choice([(1, 1), (3, 3), (4, 7), (4, 16), (6, 40)])
    house = dict(
        block_size=random.choice([1, 3, 4, 16]),
        max_num_seqs=places,
        max_num_batched_tokens=tokens,
        async_scheduling=random.random() < 0.3,
    )
    # from a pool that holds one request to one for all
    longest = -(-(LONGEST + MOST) // house["block_size"])
    house["num_gpu_blocks_override"] = random.choice([longest, longest + 2, 2 * longest, 400])
    asked = []
    for _ in range(random.randint(3, 9)):
        one = random.choice(known)
        # often what one of several answers begins with, so that it ends while the others go on
        stop = random.choice([(), (), (random.choice(one.drawn)[random.randint(0, 2)],)])
        count = min(places, random.choice([1, 1, 1, 2, DRAWN]))
        params = SamplingParams(
            n=count,
            temperature=float(count > 1),
            seed=0,
            max_tokens=random.randint(1, MOST),
            stop_token_ids=list(stop),
            detokenize=False,
        )
        aborts = random.choice([None, None, None, random.randint(0, 30)])
        asked.append((one, params, random.randint(0, 15), aborts))
    print(
        house,
        [(len(one.prompt), s.n, s.max_tokens, s.stop_token_ids, *rest) for one, s, *rest in asked],
    )
    return house, asked


def test_random_histories(model, known, request):
    """Tokens under preemption, chunks, forks, aborts, and with a loop one step ahead."""
    seen = Counter()
    for _ in range(200 if request.config.getoption("--all") else 20):
        house, asked = a_history(known)
        seen += serve(new_engine(model, **house), asked)
    print(seen)
    assert min(seen[name] for name in ("finished", "preempted", "answers", "aborted")) > 0


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
    return sequence not in self.tables


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


step_of = states.new_state_step
SLIPS = {
    "never copied": (states.StatePool, "copy", never_copied),
    "shared slots are written": (SlotBlocks, "lacks_slot", lacks_if_new),
    "no state begins": (pool_module, "new_state_step", always_before),
    "one token is a decode": (pool_module, "new_state_step", ones_decode),
    "a slot is kept": (SlotBlocks, "free", kept_slot),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_slip_is_found(slip, model, known, monkeypatch):
    monkeypatch.setattr(*SLIPS[slip])
    with pytest.raises(
        (AssertionError, KeyError, ValueError, IndexError, RuntimeError, OutOfBlocks)
    ):
        for _ in range(40):
            house, asked = a_history(known)
            serve(new_engine(model, **house), asked)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "how, reason",
    [
        (dict(enable_prefix_caching=True), "no state is kept where a block ends"),
        (dict(preemption_mode="swap"), "blocks travel, and states do not"),
        (dict(kv_offloading_size=0.01), "blocks travel, and states do not"),
        (dict(enable_lora=True), "adapters have the rows and names of a checkpoint's layers"),
        (dict(batch_invariant=True), "each adds in an order of its own"),
        (
            dict(speculative_config=dict(method="ngram", num_speculative_tokens=2)),
            "a state holds a refused draft, too",
        ),
        (dict(kv_events_config=dict(enable_kv_cache_events=True)), "no state is kept"),
    ],
)
def test_what_does_not_work_with_states_is_said_in_one_line(how, reason, model):
    with pytest.raises(ValueError) as refused:
        new_engine(model, **how)
    said = str(refused.value)
    assert said.startswith(f"{next(iter(how))}: got ") and reason in said and "\n" not in said


def test_a_draft_with_states_is_refused(model):
    """The target may be any other model; what a draft refuses would stay in its states."""
    from reference.features.states.room import hold_states

    args = EngineArgs(speculative_config=dict(method="ngram", num_speculative_tokens=2))
    with pytest.raises(ValueError, match=r"speculative_config: got .* with states, "):
        hold_states(new_engine(model).runner, args)
