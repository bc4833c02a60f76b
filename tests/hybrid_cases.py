"""Small models whose layers keep states, an engine over one, and histories of requests."""

import random
from collections import Counter
from typing import NamedTuple

import torch
from transformers import GraniteMoeHybridConfig, Lfm2Config, NemotronHConfig, Qwen3NextConfig

from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.sampling_params import SamplingParams
from reference.features.states.generate import generate as alone
from tests.engine_cases import assert_clean
from tests.exact_peer import exact_logits

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


class Known(NamedTuple):
    """A prompt, transformers' greedy answer to it, and what the naive rung draws by seeds 0, 1
    and 2.
    """

    prompt: list[int]
    greedy: list[int]
    drawn: list[list[int]]


def known_of(models) -> list[Known]:
    """What is asked in histories. models: transformers' and ours."""
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
    swap = getattr(engine.scheduler.host, "swap", None)
    assert swap is None or not swap.states, "left on the host"


def guesses(known: list[Known]):
    """In the place of n-grams: what follows, of which a token is often wrong."""
    of_prompt = {tuple(one.prompt): one for one in known}

    def lookup(sequence, count: int) -> list[int]:
        one, at = of_prompt[tuple(sequence.prompt)], len(sequence.output)
        answer = one.drawn[sequence.index] if sequence.params.temperature else one.greedy
        found = answer[at : at + random.randint(0, count)]
        wrong = random.randint(0, count)
        return [(token + (index == wrong)) % VOCAB for index, token in enumerate(found)]

    return lookup


def serve(engine, asked, most_steps: int = 3000) -> Counter:
    """asked: (what is known of a prompt, params, before which step it comes, before which its
    client gives up). Every answer must be the known one; what was seen is returned.
    """
    outputs, seen, step = {}, Counter(), 0
    if engine.speculation is not None:
        engine.speculation.proposer.lookup = guesses([one for one, *_ in asked])
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
            seen["cached"] += out.num_cached_tokens
    if engine.speculation is not None:
        counts = engine.speculation.counts
        seen["accepted"] += counts.accepted
        seen["rejected"] += counts.drafted - counts.accepted
    seen["swapped"] += getattr(getattr(engine.scheduler.host, "swap", None), "swapped_bytes", 0)
    if (snapshots := getattr(engine.scheduler.blocks, "snapshots", None)) is not None:
        seen += Counter({f"snapshots {name}": x for name, x in vars(snapshots.counts).items()})
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
    if random.random() < 0.5:
        size = house["block_size"]
        house |= dict(enable_prefix_caching=True, mamba_block_size=size * random.choice([1, 1, 2]))
    if not house["async_scheduling"] and random.random() < 0.5:
        count = random.randint(1, 4)
        house["speculative_config"] = dict(method="ngram", num_speculative_tokens=count)
        house["max_num_batched_tokens"] = max(tokens, places * (1 + count))
    house["preemption_mode"] = random.choice(["recompute", "swap"])
    # from a pool that holds one request to one for all
    longest = -(-(LONGEST + MOST) // house["block_size"])
    house["num_gpu_blocks_override"] = random.choice([longest, longest + 2, 2 * longest, 400])
    # few prompts that come again and again, where a prefix can be known
    kinds = random.sample(known[4:], 2) if "enable_prefix_caching" in house else known
    asked = []
    for _ in range(random.randint(3, 9)):
        one = random.choice(kinds)
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
