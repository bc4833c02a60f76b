"""Proves that a request's tokens do not depend on whom it shares its steps with: static waves and
continuous batching give those of one request at a time.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import Request
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import new_batch
from lessons.l06_mla.deepseek import DeepseekDecoder
from lessons.l11_cuda_graphs.lab.testing import CONFIG, new_model, new_prompts
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching import loop, naive
from lessons.l14_continuous_batching.loop import ModelExecutor, StepRunner, run_until_idle
from lessons.l14_continuous_batching.naive import PaddedRunner
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l14_continuous_batching.sequence import Sequence
from lessons.toolbox.model.config import MLAConfig, MoEConfig

ROOT = Path(__file__).resolve().parents[2]
WAYS = {"static": naive.generate, "continuous": loop.generate}
LIMITS = [6, 11, 1, 0, 4]
each_way = pytest.mark.parametrize("generate", WAYS.values(), ids=WAYS)
each_size = pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])


@each_way
@each_size
def test_the_tokens_of_one_at_a_time(generate, max_num_seqs, seed):
    """In float64, where nothing ties: prompts and answers of all lengths, with a window."""
    model, prompts = new_model(), new_prompts(3, 1, 18, 7, 5)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    seen = [[] for _ in prompts]

    def on_token(row, token):
        seen[row].append(token)

    got = generate(model, prompts, LIMITS, None, on_token, max_num_seqs)
    assert got == seen == expected


@pytest.mark.gpu
@each_way
def test_the_tokens_of_a_gpu(generate, seed):
    """With lesson 12's kernels, which float32 is for."""
    model = new_model(torch.float32, head_dim=16, hidden_size=64).cuda()
    prompts = new_prompts(3, 1, 18, 7, 5)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    assert generate(model, prompts, LIMITS, max_num_seqs=3) == expected


@each_way
@pytest.mark.sample(1)
def test_the_embedded_model_in_float32(generate):
    """Real prompts, real weights: the requests that all rungs of the ladder serve."""
    folder = ROOT / "models" / "tiny"
    if not (folder / "model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    from lessons.toolbox.model.checkpoint import load_tokenizer

    model, tokenizer = Decoder.from_pretrained(str(folder)), load_tokenizer(str(folder))
    requests = json.loads((ROOT / "models" / "prompts.json").read_text())[:6]
    prompts = [tokenizer(request["prompt"])["input_ids"][:70] for request in requests]
    limits = [12, 3, 9, 1, 12, 5]
    expected = one_at_a_time.generate(model, prompts, limits)
    assert generate(model, prompts, limits, max_num_seqs=3) == expected


@each_way
def test_every_stop_token_of_the_model_ends_an_answer(generate, seed):
    """Of the config and of the request, and no other: the id of EOS is nowhere written down."""
    model, prompts = new_model(), new_prompts(4, 2, 6)
    free = one_at_a_time.generate(model, prompts, 9)
    model.config = replace(model.config, eos_token_ids=(free[0][2], free[1][4]))
    stops = [(free[2][1],), (), ()]
    sampling = [SamplingParams(temperature=0, stop_token_ids=stop) for stop in stops]
    expected = one_at_a_time.generate(model, prompts, 9, sampling)
    assert len(expected[0]) <= 3
    assert generate(model, prompts, 9, sampling, max_num_seqs=2) == expected


SAMPLED = [
    SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, seed=17),
    SamplingParams(temperature=0, seed=3),
    SamplingParams(temperature=1.0, frequency_penalty=0.3, seed=0),
    SamplingParams(temperature=0.7, top_k=7, min_p=0.01, presence_penalty=0.4, seed=99),
    SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, seed=17),
]


@each_way
@each_size
@pytest.mark.sample(3)
def test_a_seeded_request_draws_the_same_in_any_batch(generate, max_num_seqs, seed):
    model, prompts, limits = new_model(), new_prompts(3, 1, 12, 7, 5), [12, 3, 9, 1, 11]
    expected = one_at_a_time.generate(model, prompts, limits, SAMPLED)
    assert generate(model, prompts, limits, SAMPLED, max_num_seqs=max_num_seqs) == expected


@each_way
def test_a_model_with_latents(generate, seed):
    config = replace(
        CONFIG,
        model_type="deepseek_v2",
        num_key_value_heads=4,
        head_dim=24,
        v_head_dim=12,
        sliding_windows=None,
        mla=MLAConfig(20, 32, 8, 16, 12),
        moe=MoEConfig(4, 2, 24, 1, first_k_dense_replace=1),
    )
    model = DeepseekDecoder(config).eval().requires_grad_(False).double()
    for weight in model.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    prompts, limits = new_prompts(3, 1, 12, 7), [6, 4, 9, 1]
    expected = one_at_a_time.generate(model, prompts, limits)
    assert generate(model, prompts, limits, max_num_seqs=2) == expected


@each_way
def test_refuses_what_lesson_2_refuses(generate, seed):
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(new_model(), [[1]], -1)
    assert generate(new_model(), [[1], [2]], 0) == [[], []]


# ---------------------------------------------------------------- a pool that is too small for all


def test_who_finds_no_blocks_waits_and_gets_the_same_tokens(seed):
    """A pool for two of five requests, blocks of every size: the others wait, and nothing leaks."""
    model, prompts, limits = new_model(), new_prompts(3, 1, 12, 7, 5), [6, 11, 1, 9, 4]
    expected = one_at_a_time.generate(model, prompts, limits)
    for block_size in (1, 3, 16):
        blocks = BlockManager(-(-24 // block_size), block_size)
        scheduler = ContinuousScheduler(blocks, max_num_seqs=4)
        sequences = loop.new_sequences(model.config, prompts, limits)
        for sequence in sequences:
            scheduler.add(sequence)
        run_until_idle(scheduler, ModelExecutor(StepRunner(model, blocks, 24)))
        assert [sequence.output for sequence in sequences] == expected
        assert blocks.num_free == blocks.num_blocks and not blocks.tables


# ---------------------------------------------------------------- wrong versions must fail


class LastColumn(PaddedRunner):
    """Padding on the right, and `logits[:, -1]`: what the guides print."""

    def run_prompts(self, step):
        padded = [(c.tokens + [0] * (step.width - c.count), 0) for c in step.chunks]
        batch = new_batch(padded, self.pool.block_size, self.model.device)
        hidden = self.model(batch.tokens, self.pool.attending(batch))
        return self.model.logits(hidden).view(len(padded), step.width, -1)[:, -1]


class SeesPadding(PaddedRunner):
    """Each row sees as many tokens as the longest, the padding after its own among them."""

    def columns(self, step):
        columns = super().columns(step)
        columns[3] = columns[3].max()
        return columns


class LiveRowsFirst(PaddedRunner):
    """Takes the first rows of the logits, as if the finished had left the rectangle."""

    def __call__(self, step):
        if step.chunks[0].sequence.computed == 0:
            return self.run_prompts(step)
        return self.decode(self.columns(step))[: len(step.chunks)]


@pytest.mark.parametrize("wrong", [LastColumn, SeesPadding, LiveRowsFirst])
def test_a_wrong_rectangle_is_found(wrong, seed, monkeypatch):
    model, prompts, limits = new_model(), new_prompts(3, 1, 12, 7, 5), [6, 11, 2, 3, 9]
    expected = one_at_a_time.generate(model, prompts, limits)
    monkeypatch.setattr(naive, "PaddedRunner", wrong)
    assert naive.generate(model, prompts, limits) != expected


class HardCodedEos(Sequence):
    """Ends at the token 2, whatever the model's config says."""

    @property
    def finished(self):
        return len(self.output) >= self.max_new_tokens or self.output[-1:] == [2]


class NewestLost(Sequence):
    """Counts a token, and does not feed it to the next step."""

    def append(self, token):
        self.output.append(token)
        self.all_tokens.append(self.all_tokens[-1])


@pytest.mark.parametrize("wrong", [HardCodedEos, NewestLost])
@each_way
def test_a_wrong_sequence_is_found(generate, wrong, seed, monkeypatch):
    model, prompts = new_model(), new_prompts(4, 2, 6)
    free = one_at_a_time.generate(model, prompts, 12)
    # not 2, at which the first of them ends rightly then
    end = next((token for token in free[0][2:] if token != 2), 3)
    model.config = replace(model.config, eos_token_ids=(end,))
    expected = one_at_a_time.generate(model, prompts, 12)
    monkeypatch.setattr(loop, "Sequence", wrong)
    assert generate(model, prompts, 12) != expected


def test_a_sequence_is_its_request():
    request = Request(3, [1, 2], 5, SamplingParams(), frozenset({7}))
    sequence = Sequence.of(request)
    assert (sequence.row, sequence.tokens, sequence.to_compute) == (3, [1, 2], 2)
    sequence.append(7)
    assert sequence.finished and sequence.tokens == [1, 2, 7]
