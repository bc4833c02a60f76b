"""Positions inside `attend`: every way to rotate and store gives the same keys, outputs, tokens."""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import naive as lesson2
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.rope import rotation
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import Rung, generate
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l04_positions import optimized, stand_ins
from lessons.l04_positions.alibi import ALIBI
from lessons.l04_positions.optimized import ROTATED_ON_THE_WAY
from lessons.l04_positions.stand_ins import LESSON_04_TORCH
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig, RopeScaling
from lessons.toolbox.proof.numerics import attention_inputs, poison_

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
CONFIG = ModelConfig(
    "llama",
    vocab_size=29,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=16,
    max_position_embeddings=96,
    sliding_windows=(None, 5),
)
WITH_KERNEL = LESSON_04_TORCH._replace(write=optimized.write)
OPS = {
    "rotate, then write": LESSON_03_TORCH,
    "in place": LESSON_04_TORCH,
    "one kernel": WITH_KERNEL,
}


def new_model(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(config).to(DEVICE, dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return model


def new_pool(ops, capacity: int, config: ModelConfig = CONFIG) -> KVPool:
    """An empty pool for one sequence, NaN wherever nothing was written."""
    pool = KVPool(config, 1, capacity, ops, device=DEVICE)
    poison_(pool.k_slots)
    poison_(pool.v_slots)
    return pool


@pytest.mark.parametrize("steps", [[1] * 6, [7, 1, 1], [3, 4, 1, 2], [1, 66, 1]], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_cached_rotation_equals_rotating_everything(name, steps, seed):
    """Decode, prefill, chunks: against attention over all tokens rotated at once."""
    total = sum(steps)
    streams = [
        attention_inputs("normal", total, total, 6, 2, 8, seed=seed + layer, device=DEVICE)
        for layer in range(2)
    ]
    pool, start = new_pool(OPS[name], total + 3), 0
    outputs = [[], []]
    for step in steps:
        attend = pool.attending(new_batch([([0] * step, start)], pool.block_size, DEVICE))
        for layer, qkv in enumerate(streams):
            new = (x[start : start + step].clone() for x in qkv)
            outputs[layer].append(attend(layer, *new))
        start += step
    rotate = rotation(CONFIG, torch.arange(total, device=DEVICE), torch.float32)
    for layer, (q, k, v) in enumerate(streams):
        want = attention(rotate(q), rotate(k), v, window=CONFIG.sliding_window(layer))
        torch.testing.assert_close(torch.cat(outputs[layer]), want, atol=1e-5, rtol=1e-5)
        keys, values = pool.k_slots[layer, :total], pool.v_slots[layer, :total]
        torch.testing.assert_close(keys, rotate(k), atol=1e-6, rtol=0)
        assert torch.equal(values, v)  # V carries no position
    assert pool.k_slots[:, total:].isnan().all(), "rows after the sequence stay untouched"
    assert pool.written_bytes == total * CONFIG.kv_bytes_per_token(4)


@pytest.mark.parametrize("name", OPS)
def test_a_position_beyond_the_table_is_an_error(name):
    """The table is as long as a block: a token that does not fit into it has no rotation either."""
    # PyTorch on the CPU: on a GPU an index is checked later, and the process could use it no more.
    device = DEVICE if OPS[name] is WITH_KERNEL else "cpu"
    pool = KVPool(CONFIG, 1, 4, OPS[name], device=device)
    attend = pool.attending(new_batch([([0] * 5, 0)], 9, device))
    x = [torch.zeros(5, heads, 8, device=device) for heads in (6, 2, 2)]
    with pytest.raises((ValueError, IndexError)):
        attend(0, *x)


@pytest.mark.parametrize("write", [stand_ins.write, optimized.write], ids=["PyTorch", "kernels"])
@pytest.mark.parametrize("v_width", [8, 5])
def test_heads_of_which_a_part_turns(write, v_width, seed):
    """DeepSeek's: the last 4 coordinates of 12 turn, V has another width and other strides than K,
    and a token at slot -1 is stored nowhere.
    """
    torch.manual_seed(seed)
    q, k = torch.randn(5, 3, 12, device=DEVICE), torch.randn(5, 3, 12, device=DEVICE)
    v = torch.randn(5, 2 * 3, v_width, device=DEVICE)[:, :3]
    config = replace(CONFIG, num_attention_heads=3, num_key_value_heads=3, head_dim=4, v_head_dim=4)
    pool = KVPool(config, 1, 8, LESSON_03_TORCH, device=DEVICE)
    table = pool.cos_sin_cache
    batch = new_batch([([0] * 5, 2)], 8, DEVICE)
    batch = replace(batch, slot_mapping=torch.tensor([2, -1, 7, 0, 4], device=DEVICE))
    k_slots = torch.full((9, 3, 12), torch.nan, device=DEVICE)
    v_slots = torch.full((9, 3, v_width), torch.nan, device=DEVICE)
    rotate = rotation(config, batch.positions, torch.float32)
    want_q, want_k = rotate(q), rotate(k)
    got = write(q.clone(), k.clone(), v, k_slots, v_slots, batch, table)
    torch.testing.assert_close(got, want_q, atol=1e-6, rtol=0)
    kept = [0, 2, 3, 4]
    slots = batch.slot_mapping[kept]
    torch.testing.assert_close(k_slots[slots], want_k[kept], atol=1e-6, rtol=0)
    assert torch.equal(v_slots[slots], v[kept])
    untouched = [1, 3, 5, 6]
    assert k_slots[untouched].isnan().all() and v_slots[untouched].isnan().all()


def test_every_way_gives_the_tokens_of_recomputation(seed):
    """In float64, with YaRN's stretched context: the same greedy tokens."""
    torch.manual_seed(seed)
    yarn = RopeScaling("yarn", 8.0, original_max_position_embeddings=32)
    model = new_model(replace(CONFIG, rope_scaling=yarn), torch.float64)
    prompts = [random.choices(range(29), k=n) for n in (1, 9, 40)]
    want = lesson2.generate(model, prompts, 20)
    in_pytorch = Rung("in PyTorch", LESSON_04_TORCH, LESSON_04_TORCH)
    for rung in (PREALLOCATED, in_pytorch):
        if DEVICE.type == "cpu" or rung is in_pytorch:  # lesson 3's kernels refuse float64
            assert generate(model, prompts, 20, rung=rung) == want


def test_generate_with_the_kernel(seed):
    """Few tokens, because the interpreter takes seconds a token."""
    torch.manual_seed(seed)
    model = new_model()
    prompts = [random.choices(range(29), k=n) for n in (1, 6)]
    want = lesson2.generate(model, prompts, 3)
    for rung in (Rung("kernel", WITH_KERNEL, WITH_KERNEL), ROTATED_ON_THE_WAY):
        assert generate(model, prompts, 3, rung=rung) == want


def test_a_cache_with_alibi_holds_no_positions(seed):
    """Steps equal one pass over everything, and the cached keys are what the projections gave."""
    torch.manual_seed(seed)
    model, tokens = Decoder(CONFIG).double(), random.choices(range(29), k=12)
    config = replace(CONFIG, sliding_windows=())

    def run(ops, *lengths):
        pool, start, outputs = KVPool(config, 1, 12, ops, torch.float64), 0, []
        for length in lengths:
            batch = new_batch([(tokens[start : start + length], start)], 12)
            outputs.append(model(batch.tokens, pool.attending(batch)))
            start += length
        return torch.cat(outputs)

    want = run(ALIBI, 12)
    torch.testing.assert_close(run(ALIBI, 5, 1, 4, 1, 1), want, atol=1e-10, rtol=0)
    assert (run(LESSON_03_TORCH, 12) - want).abs().max() > 1e-3
