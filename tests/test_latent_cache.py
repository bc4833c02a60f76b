"""The engine over DeepSeek's latents in FP8 rows: whatever the scheduler does, every request gets
the tokens of naive generation whose latents are rounded in the same way.

In float64, as in test_quantized_cache.py.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, whole_sequence
from lessons.l02_naive_attention.naive import generate as alone
from lessons.l03_kv_cache.batch import new_batch
from lessons.l06_mla.deepseek import absorbed
from lessons.l12_paged_kv.lab.testing import CONFIG, DEVICE, new_deepseek, new_model
from lessons.l12_paged_kv.naive import attend
from lessons.l12_paged_kv.runner import new_pool, paged_rung_of
from lessons.l19_kv_quantization.kernels.latents import naive
from lessons.l19_kv_quantization.kernels.latents import pool as pools
from lessons.l19_kv_quantization.kernels.latents.naive import rows_of
from lessons.l19_kv_quantization.kernels.latents.pool import RowKernelPool, RowPool
from lessons.toolbox.proof.planted import with_bug
from reference import SamplingParams
from reference.engine.assembly import engine_over
from reference.engine.cache_arguments import read_by_kernels
from reference.engine.cache_memory import blocks_that_fit, bytes_per_token
from reference.engine.engine_args import EngineArgs
from tests.engine_cases import run

LIMITS = [9, 12, 5, 11, 8]
NAME = "fp8_ds_mla"
SMALL = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=60, max_model_len=64)


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    model = new_deepseek()
    for layer in model.layers:  # sharp attention, so that a code that differs changes a token
        layer.self_attn.q_b_proj.weight.mul_(3)
        layer.self_attn.o_proj.weight.mul_(3)
    return model


def prompts() -> list[list[int]]:
    """Three begin alike, so that a prefix cache finds something; one is long."""
    rng = random.Random(29)
    head = rng.choices(range(CONFIG.vocab_size), k=13)
    own = [rng.choices(range(CONFIG.vocab_size), k=length) for length in (3, 5, 1, 2, 21)]
    return [head + tokens if index < 3 else tokens for index, tokens in enumerate(own)]


@torch.inference_mode()
def naive_answers(model: Decoder, rows) -> list[list[int]]:
    """One request at a time, everything computed again for each token, over latents that were rows
    of codes: in the absorbed form a key is the latent, and its first values are the value.
    """
    twin = absorbed(model)

    def over_rows(q, k, v, *arguments, **options):
        k = rows.dequantize(rows.quantize(k))
        return attention(q, k, k[..., : rows.rank], *arguments, **options)

    answers = []
    for prompt, limit in zip(prompts(), LIMITS):
        tokens = list(prompt)
        for _ in range(limit):
            attend = whole_sequence(twin, len(tokens), over_rows)
            tokens.append(int(twin.logits(twin(torch.tensor(tokens), attend)[-1:]).argmax()))
            if tokens[-1] in model.config.eos_token_ids:
                break
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.fixture(scope="module")
def expected(model):
    """The answers. They differ from those over latents that are not rounded, so it would show."""
    found = naive_answers(model, rows_of(model.config, model.dtype))
    assert found != alone(model, prompts(), LIMITS)
    return found


def new_engine(model, drafter=None, **arguments):
    args = EngineArgs(kv_cache_dtype=NAME, **SMALL | arguments)
    engine = engine_over(model, None, args, drafter)
    for each in (engine.runner.pool,):
        each.k_slots.fill_(0xFF)  # no row may be read that was not written
    return engine


def answers_of(engine) -> list[list[int]]:
    params = [
        SamplingParams(temperature=1, top_k=1, max_tokens=limit, detokenize=False)
        for limit in LIMITS
    ]
    found = run(engine, prompts(), params, [0, 0, 1, 3, 3])
    return [found[str(index)][0] for index in range(len(LIMITS))]


HOUSES = {
    "pages of 1": dict(block_size=1, num_gpu_blocks_override=200),
    "pages of 3, chunks of 5": dict(block_size=3, max_num_batched_tokens=5),
    "one page": dict(block_size=64, enable_prefix_caching=False),
    "computes again": dict(num_gpu_blocks_override=9, enable_prefix_caching=False),
    "swaps": dict(num_gpu_blocks_override=9, enable_prefix_caching=False, preemption_mode="swap"),
    "a prefix cache on the host": dict(
        num_gpu_blocks_override=12, kv_offloading_size=0.001, kv_offloading_folder="memory://rows"
    ),
    "sends and receives": dict(
        num_gpu_blocks_override=12,
        kv_transfer_config=dict(
            kv_connector="TcpConnector", kv_role="kv_both", kv_port=0, kv_buffer_size=1e6
        ),
    ),
    "guesses": dict(speculative_config=dict(method="ngram", num_speculative_tokens=3)),
}


@pytest.mark.parametrize("house", HOUSES)
def test_no_tokens_depend_on_the_scheduler(model, expected, house):
    engine = new_engine(model, **HOUSES[house])
    assert type(engine.runner.pool) is RowPool
    assert answers_of(engine) == expected
    if house == "swaps":
        assert engine.scheduler.host.swap.swapped_bytes > 0


def test_a_draft_without_latents_is_in_fp8(model, expected):
    """A small model of heads drafts: its own cache has a format that heads have."""
    config = dict(method="draft_model", model="made here", num_speculative_tokens=2)
    drafter = new_model().cpu().double()
    engine = new_engine(model, drafter, speculative_config=config)
    (drafts,) = engine.speculation.proposer.pools
    assert drafts.format.name == "fp8" and answers_of(engine) == expected


# ---------------------------------------------------------------- by the kernels


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_kernels_serve_the_same_model(block_size, seed):
    """Two single queries in front of two prompts, over rows that kernels write and read."""
    model = new_deepseek().float().to(DEVICE)
    torch.manual_seed(seed)
    texts = [torch.randint(0, CONFIG.vocab_size, (count,)).tolist() for count in (9, 6, 11, 3)]
    rung = paged_rung_of(model)
    prepared = rung.prepare(model)
    tables = [[9, 2, 11], [0, 7], [4, 13, 15], [8]]

    def of(kind):
        pool = new_pool(prepared, 16, block_size, 64, replace(rung, cache=kind))
        if kind is RowPool:
            pool.ops = pool.ops._replace(decode=attend)
        pool.k_slots.fill_(0xFF)
        for held, end in (((0, 0, 0, 0), (8, 5, 4, 0)), ((8, 5, 4, 0), (9, 6, 11, 3))):
            chunks = [(text[a:b], a) for text, a, b in zip(texts, held, end) if b > a]
            owned = [table for table, a, b in zip(tables, held, end) if b > a]
            # as on a GPU, without the list of work of PyTorch's operations
            batch = new_batch(chunks, block_size, DEVICE, owned)
            logits = prepared.logits(prepared(batch.tokens, pool.attending(batch)))
        return logits, pool.format.parts(pool.k_slots[0, :-1])

    (got, rows), (want, same) = of(RowKernelPool), of(RowPool)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for own, others in zip(rows, same):  # of layer 0, which no attention has changed
        assert torch.equal(own.float().nan_to_num(9.0), others.float().nan_to_num(9.0))


def test_which_pool_serves(model):
    """Kernels read rows of at least 32 codes on a GPU, and float64 nowhere."""
    assert pools.row_pool_of(model.cpu()) is RowPool
    args = EngineArgs(kv_cache_dtype=NAME)
    assert not read_by_kernels(args, model, None)


# ---------------------------------------------------------------- sizes and refusals


def test_a_row_of_deepseek_takes_656_bytes():
    config = new_deepseek().config
    v3 = replace(config.mla, kv_lora_rank=512, qk_rope_head_dim=64)
    config = replace(config, mla=v3, num_hidden_layers=61)
    assert bytes_per_token(config, NAME, 2) == 61 * 656
    assert bytes_per_token(config, "auto", 2) == 61 * 1152
    assert bytes_per_token(config, "fp8", 2) == 61 * 578  # a scale of 16 bits for all values


def test_the_same_memory_has_room_for_more_blocks(model):
    """float64: 32 codes, a scale and 16 rotary values, 176 bytes in the place of 384."""
    how = dict(kv_cache_memory_bytes=2**20, max_num_seqs=10_000, max_model_len=64)
    plain, small = (
        blocks_that_fit(EngineArgs(kv_cache_dtype=dtype, **how), model, 64)
        for dtype in ("auto", NAME)
    )
    assert abs(plain / small - 176 / 384) < 1e-2
    engine = engine_over(model, None, EngineArgs(kv_cache_dtype=NAME, **how))
    assert engine.runner.pool.num_blocks == small
    assert engine.runner.pool.allocated_bytes <= 2**20 + engine.runner.pool.bytes_per_token


def test_a_model_without_latents_is_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype: got 'fp8_ds_mla'; accepted: another"):
        engine_over(new_model().cpu(), None, EngineArgs(kv_cache_dtype=NAME, **SMALL))


# ---------------------------------------------------------------- wrong versions

SLIPS = {
    "rotary values are rounded": (
        "rotary.copy_(k_pe)",
        "rotary.copy_(k_pe.round())",
    ),
    "half of the rank is a group": ("min(GROUP, self.rank)", "min(GROUP, self.rank // 2)"),
    "a scale is used twice": ("groups * scales[..., None]", "groups * scales[..., None] ** 2"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_wrong_pool_is_found(model, expected, name, tmp_path, monkeypatch):
    buggy = with_bug(naive, tmp_path, *SLIPS[name])
    monkeypatch.setattr(pools, "rows_of", buggy.rows_of)
    assert answers_of(new_engine(model)) != expected
