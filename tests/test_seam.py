"""What the seam must carry for the lessons to come, without an edit of the decoder.

A batch of a decode, a chunk and a fresh prompt over pages in any order; a tree of tokens; a stage
of some layers; parts replaced by their type. For the plain and the fused decoder, and for a model
with latents.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, swap
from lessons.l02_naive_attention.naive import attention, masked_softmax, whole_sequence
from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.l03_kv_cache.cache import AttentionOps, KVPool
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH, sequences
from lessons.l03_kv_cache.stand_ins import write as rotate_and_store
from lessons.l04_positions.stand_ins import LESSON_04_TORCH
from lessons.l06_mla.deepseek import DeepseekDecoder, absorbed
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l17_tree_speculation.trees.tree import Tree
from lessons.toolbox.model.config import MLAConfig, ModelConfig

pytestmark = pytest.mark.usefixtures("seed")

LLAMA = ModelConfig("llama", 61, 48, 3, 6, 2, 8, 64, 128, qk_norm=True)
WINDOWS = replace(LLAMA, sliding_windows=(None, 5, None))
LATENTS = replace(
    LLAMA,
    model_type="deepseek_v3",
    qk_norm=False,
    num_key_value_heads=6,
    head_dim=12,
    v_head_dim=10,
    mla=MLAConfig(20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10),
)
BLOCK_SIZE, NUM_BLOCKS = 3, 40


def new_model(config: ModelConfig) -> Decoder:
    kind = Decoder if config.mla is None else DeepseekDecoder
    model = kind(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    for layer in model.layers:
        layer.input_layernorm.weight.add_(1)
    return model


MODELS = {
    "plain": lambda: new_model(LLAMA),
    "fused": lambda: fused(new_model(LLAMA)),
    "window": lambda: new_model(WINDOWS),
    "latents, expanded": lambda: new_model(LATENTS),
    "latents, absorbed and fused": lambda: fused(absorbed(new_model(LATENTS))),
}


@pytest.fixture(params=MODELS)
def model(request) -> Decoder:
    return MODELS[request.param]()


# ---------------------------------------------------------------- pages and trees, for this test


def gather(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Attention over pages: each sequence's pages are gathered first. q: [T, Hq, D]."""
    outs = []
    for b, (rows, length) in enumerate(sequences(batch)):
        pages = batch.block_table[b, : -(-length // BLOCK_SIZE)].long()
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        if batch.tree is None:
            outs.append(attention(q[rows], k, v, softmax_scale, window=window))
        else:
            outs.append(tree_attention(q[rows], k, v, softmax_scale, batch.tree[rows] > 0))
    return torch.cat(outs)


def tree_attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, tree: Tensor) -> Tensor:
    """New tokens see all old ones, and of the new ones what `tree`: [T, T] says."""
    old = torch.ones(len(q), len(k) - len(q), dtype=torch.bool)
    sees = torch.cat([old, tree], dim=1)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    return torch.einsum("hqk,khd->qhd", masked_softmax(scores, sees), v)


PAGED = AttentionOps(rotate_and_store, prefill=gather, decode=gather)


def new_pool(model: Decoder, layers: range | None = None) -> KVPool:
    """Pages that hold NaN wherever nothing was written."""
    pool = KVPool(
        model.config, NUM_BLOCKS, BLOCK_SIZE, PAGED, model.dtype, layers=layers, max_context_len=128
    )
    for slots in (pool.k_slots, pool.v_slots):
        slots.fill_(float("nan"))
    return pool


def pages_for(*lengths: int) -> list[list[int]]:
    """Distinct pages in random order, enough for sequences of these lengths."""
    free = random.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]


def run(model: Decoder, pool: KVPool, chunks, tables) -> Tensor:
    """Logits of every new token: [T, vocab_size]."""
    batch = new_batch(chunks, pool.block_size, block_tables=tables)
    return model.logits(model(batch.tokens, pool.attending(batch)))


def alone(model: Decoder, tokens: list[int]) -> Tensor:
    """Logits of a sequence that shares its steps with no other: [T, vocab_size]."""
    return model.logits(model(torch.tensor(tokens), whole_sequence(model, len(tokens))))


def random_tokens(count: int) -> list[int]:
    return random.choices(range(61), k=count)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)  # cos and sin are float32


# ---------------------------------------------------------------- the tests


def test_a_mixed_batch_over_pages_in_any_order(model):
    """One step of a decode, a chunk of a prompt and a fresh prompt gives each sequence's logits."""
    decoding, chunked, fresh = random_tokens(11), random_tokens(14), random_tokens(7)
    tables = pages_for(11, 14, 7)
    pool = new_pool(model)
    run(model, pool, [(decoding[:10], 0), (chunked[:5], 0)], tables[:2])
    logits = run(model, pool, [(decoding[10:], 10), (chunked[5:], 5), (fresh, 0)], tables)
    want = [alone(model, tokens) for tokens in (decoding, chunked, fresh)]
    assert_close(logits, torch.cat([want[0][10:], want[1][5:], want[2]]))


def test_a_page_of_another_sequence_is_noticed(model):
    """The order of full pages does not matter, because K is rotated before it is stored. Whose they
    are does.
    """
    ours, theirs, tables = random_tokens(9), random_tokens(9), pages_for(9, 9)
    pool = new_pool(model)
    run(model, pool, [(ours[:8], 0), (theirs[:8], 0)], tables)
    mine, other = tables
    wrong = run(model, pool, [(ours[8:], 8)], [[mine[0], other[1], mine[2]]])
    assert not torch.allclose(wrong, alone(model, ours)[8:], atol=1e-3)


def test_a_tree_of_tokens(model):
    """Two continuations of one prefix in one step: positions by depth, slots by order."""
    if model.config is WINDOWS:
        pytest.skip("a window in a tree counts along a path: lesson 17's business")
    prefix, (root, left, right, leaf) = random_tokens(6), random_tokens(4)
    #  root -> left -> leaf, root -> right
    shape = Tree((-1, 0, 0, 1))
    depths = torch.tensor(shape.depths)
    tables, pool = pages_for(10), new_pool(model)
    run(model, pool, [(prefix, 0)], tables)
    batch = new_batch([([root, left, right, leaf], 6)], BLOCK_SIZE, block_tables=tables)
    batch = replace(batch, positions=6 + depths, tree=shape.table)
    logits = model.logits(model(batch.tokens, pool.attending(batch)))
    assert_close(logits[[0, 1, 3]], alone(model, [*prefix, root, left, leaf])[6:])
    assert_close(logits[2], alone(model, [*prefix, root, right])[-1])


def test_a_stage_of_some_layers(model):
    """Two stages, each with its layers' pool, hand on what is between them."""
    tokens, tables = random_tokens(8), pages_for(8)
    batch = new_batch([(tokens, 0)], BLOCK_SIZE, block_tables=tables)
    x = model.embed_tokens(batch.tokens)
    for stage in (range(0, 2), range(2, 3)):
        pool = new_pool(model, stage)
        assert len(pool.k_slots) == len(stage)
        x = model.run_layers(x, pool.attending(batch), stage)
    assert_close(model.logits(model.norm(x)), alone(model, tokens))


def test_a_token_at_slot_minus_one_is_stored_nowhere(model):
    tokens, tables = random_tokens(5), pages_for(5)
    pool = new_pool(model)
    batch = new_batch([(tokens, 0)], BLOCK_SIZE, block_tables=tables)
    batch = replace(batch, slot_mapping=torch.full((5,), -1))
    model(batch.tokens, pool.attending(batch))
    assert pool.blocks(pool.k_slots).isnan().all()


@pytest.mark.parametrize("ops", [LESSON_03_TORCH, LESSON_04_TORCH], ids=["lesson 3", "lesson 4"])
def test_a_mixed_batch_in_blocks_of_their_own(ops, model):
    """The same without pages: sequence b owns block b. Lessons 3 to 11 need this."""
    decoding, chunked, fresh = random_tokens(11), random_tokens(14), random_tokens(7)
    pool = KVPool(model.config, 4, 16, ops, model.dtype)
    run(model, pool, [(decoding[:10], 0), (chunked[:5], 0)], None)
    logits = run(model, pool, [(decoding[10:], 10), (chunked[5:], 5), (fresh, 0)], None)
    want = [alone(model, tokens) for tokens in (decoding, chunked, fresh)]
    assert_close(logits, torch.cat([want[0][10:], want[1][5:], want[2]]))
    decoded = run(model, pool, [([1], 11), ([2], 14), ([3], 7)], None)
    want = [alone(model, [*t, n])[-1] for n, t in enumerate((decoding, chunked, fresh), 1)]
    assert_close(decoded, torch.stack(want))


def test_swap_replaces_parts_and_shares_weights():
    model = new_model(LLAMA)

    class Doubled(nn.Module):
        def __init__(self, linear: nn.Linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return 2 * self.linear(x)

    twin = swap(model, {nn.Linear: Doubled})
    assert type(twin.layers[0].mlp.up_proj) is Doubled and type(twin.lm_head) is Doubled
    assert type(model.layers[0].mlp.up_proj) is nn.Linear, "the original is left as it is"
    ours, theirs = (sorted(p.data_ptr() for p in m.parameters()) for m in (model, twin))
    assert ours == theirs, "no weight is copied"
    x = torch.randn(2, 48).double()
    torch.testing.assert_close(twin.logits(x), 2 * model.logits(x))
    assert swap(model, {nn.Conv1d: Doubled}) is model
