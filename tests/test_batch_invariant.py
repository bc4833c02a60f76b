"""batch_invariant: the log-probabilities of a request's tokens are the same numbers, bit by bit,
alone, in a batch, in chunks of any length, after a preemption, and on blocks that were found.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lessons.l18_weight_quantization.linear import quantized
from lessons.l18_weight_quantization.naive import round_to_nearest
from lessons.l25_one_step_ahead.same_bits import attention, linear
from lessons.toolbox.model.config import MLAConfig, MoEConfig, Multipliers
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.sampling_params import SamplingParams
from reference.features.batch_invariant import check
from tests.engine_cases import CONFIG, LONGEST, assert_clean, new_model

pytestmark = pytest.mark.usefixtures("seed")
COMPANIES = {
    "all together": dict(),
    "chunks of five": dict(max_num_batched_tokens=5, max_num_seqs=4),
    "few blocks": dict(num_gpu_blocks_override=18),
    "few blocks, swapped": dict(num_gpu_blocks_override=18, preemption_mode="swap"),
    "blocks of seven": dict(block_size=7),
    "no prefix cache": dict(enable_prefix_caching=False),
    "one step ahead": dict(async_scheduling=True),
}


def engine(model, **how):
    how = dict(num_gpu_blocks_override=200, block_size=4) | how
    return engine_over(model, None, EngineArgs(batch_invariant=True, max_model_len=LONGEST, **how))


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of which many begin alike, greedy and drawn."""
    heads = [[], random.choices(range(60), k=9), random.choices(range(60), k=22)]
    found = []
    for at in range(9):
        prompt = random.choice(heads) + random.choices(range(60), k=random.randint(1, 12))
        how = dict(temperature=0) if at % 2 else dict(temperature=0.9, seed=at, top_p=0.9)
        limit = random.randint(1, LONGEST - len(prompt))
        how |= dict(max_tokens=limit, ignore_eos=True, detokenize=False, logprobs=3)
        found.append((prompt, SamplingParams(**how)))
    return found


def answers(engine, asked, gap=0) -> list:
    """(token ids, log-probabilities) of each. gap: steps between two arrivals."""
    waiting, found, step = list(enumerate(asked)), {}, 0
    while len(found) < len(asked):
        while waiting and step >= waiting[0][0] * gap:
            at, (prompt, params) = waiting.pop(0)
            engine.add_request(str(at), prompt, params)
        for output in engine.step():
            if output.finished:
                (one,) = output.outputs
                numbers = [sorted((t, p.logprob) for t, p in row.items()) for row in one.logprobs]
                found[int(output.request_id)] = one.token_ids, numbers
        step += 1
    assert_clean(engine)
    return [found[at] for at in range(len(asked))]


def differing(model, **how) -> int:
    """How many answers have other bits in company than alone."""
    asked = requests()
    alone = [answers(engine(model), [one])[0] for one in asked]
    together = answers(engine(model, **how), asked, gap=random.choice([0, 1, 3]))
    return sum(a != b for a, b in zip(alone, together))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("company", COMPANIES)
def test_the_same_bits_in_any_company(company, dtype):
    assert differing(new_model().to(dtype), **COMPANIES[company]) == 0


def test_a_window(monkeypatch):
    model = new_model()
    monkeypatch.setattr(type(CONFIG), "sliding_window", lambda config, layer: 9)
    assert differing(model) == 0


class SplitWhereFew(linear.InTiles):
    """A product whose order of additions depends on the number of rows."""

    def forward(self, x):
        if len(x) > 3:
            return self.layer(x)
        half = x.shape[1] // 2
        front = torch.cat([x[:, :half], torch.zeros_like(x[:, half:])], 1)
        return self.layer(front) + self.layer(x - front)


def test_a_product_that_looks_at_the_batch_is_found(monkeypatch):
    monkeypatch.setattr(linear, "InTiles", SplitWhereFew)
    assert differing(new_model()) > 0


def test_a_walk_that_looks_at_the_batch_is_found(monkeypatch):
    """Tiles as long as the longest sequence in the step asks for."""
    walk = attention.walk

    def tiles_of_the_batch(q, k_cache, v_cache, table, position, *how):
        monkeypatch.setattr(attention, "KEYS", int(position.max()) // 2 + 1)
        return walk(q, k_cache, v_cache, table, position, *how)

    monkeypatch.setattr(attention, "walk", tiles_of_the_batch)
    assert differing(new_model()) > 0


@pytest.mark.parametrize(
    "how, name",
    [
        (dict(speculative_config=dict(method="ngram", num_speculative_tokens=2)), "speculative_"),
        (dict(enable_lora=True), "enable_lora"),
        (dict(kv_cache_dtype="int8"), "kv_cache_dtype int8"),
    ],
)
def test_a_feature_without_a_fixed_order_is_refused(how, name):
    with pytest.raises(ValueError) as refused:
        engine(new_model(), **how)
    assert_refused(refused, name)


@pytest.mark.parametrize(
    "changed, name",
    [
        (dict(attn_logit_softcapping=30.0), "a soft cap or sinks"),
        (dict(final_logit_softcapping=30.0), "logits that are capped or divided"),
        (dict(multipliers=Multipliers()), "logits that are capped or divided"),
        (dict(moe=MoEConfig(4, 2, 16)), "experts"),
        (dict(mla=MLAConfig(None, 8, 4, 4, 8)), "latent attention"),
    ],
)
def test_a_model_without_a_fixed_order_is_refused(changed, name):
    model = SimpleNamespace(config=replace(CONFIG, **changed), modules=list)
    with pytest.raises(ValueError) as refused:
        check(model, EngineArgs(batch_invariant=True))
    assert_refused(refused, name)


def test_quantized_weights_are_refused():
    with pytest.raises(ValueError) as refused:
        engine(
            quantized(
                new_model(),
                lambda name, layer: round_to_nearest(layer.weight, group_size=None),
                None,
            )
        )
    assert_refused(refused, "quantized weights")


def assert_refused(refused, name: str) -> None:
    said = str(refused.value)
    assert said.startswith("batch_invariant: got True; accepted: False with") and name in said, said
