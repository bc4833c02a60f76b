"""Proves that ranks together compute one process's logits and tokens, for every family and mesh,
and that they say no more to each other than the formulas allow. Each wrong version of slips.py
fails.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.sampling import GREEDY, SamplingParams
from lessons.l12_paged_kv import generate as lesson_12
from lessons.l20_parallelism import naive
from lessons.l20_parallelism.lab.slips import SLIPS
from lessons.l20_parallelism.lab.testing import (
    CONFIGS,
    LLAMA,
    links_of,
    logits_of,
    random_model,
    rank_logits,
    rank_tokens,
    rank_wire,
)
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.pipeline import split_layers
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh
from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.l20_parallelism.shards.sharding import local_config

FOUR = [Mesh(tp=4), Mesh(tp=2, pp=2), Mesh(tp=2, dp=2)]
WITH_EXPERTS = [name for name, config in CONFIGS.items() if config.moe is not None]
IN_NAIVE = ["llama", "llama, tied, mlp_bias", "qwen2", "qwen3", "phi3", "mistral"]


def random_tokens(length: int) -> list[int]:
    return torch.randint(LLAMA.vocab_size, (length,)).tolist()


def check_logits(meshes, name, seed, expert_parallel=False):
    """Of each mesh the last stage's logits against one process's, in float64; all shards have the
    same bits.
    """
    config, tokens = CONFIGS[name], random_tokens(9)
    expected = logits_of(random_model(config, seed, torch.float64), torch.tensor(tokens))
    arguments = meshes, config, seed, tokens, expert_parallel
    by_rank = run_ranks(meshes[0].size, rank_logits, *arguments)
    for mesh, found in zip(meshes, zip(*by_rank)):
        for rank, logits in enumerate(found):
            replica, stage, _ = mesh.place(rank)
            if stage < mesh.pp - 1:
                assert logits is None
                continue
            torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
            assert torch.equal(logits, found[mesh.rank(replica, stage, 0)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_four_ranks_compute_the_logits_of_one_process(name, seed):
    """The 4 query heads share 2 KV heads (Qwen3's here one), so with tp=4 ranks share a KV head.
    The vocabulary of 61 is no multiple of the ranks.
    """
    check_logits(FOUR, name, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(pp=2), Mesh(pp=3)], ids=str)
def test_two_and_three_ranks_compute_the_logits_of_one_process(mesh, name, seed):
    check_logits([mesh], name, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_whole_experts_on_each_rank_compute_the_same(name, seed):
    check_logits(FOUR, name, seed, expert_parallel=True)


@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", IN_NAIVE)
def test_lists_of_shards_compute_the_same(name, size, seed):
    config, tokens = CONFIGS[name], torch.tensor(random_tokens(7))
    model, ranks = random_model(config, seed, torch.float64), Ranks(size)
    expected = logits_of(model, tokens)
    for logits in naive.forward(model, tokens, ranks):
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    sums = 2 * config.num_hidden_layers + 1
    share = -(-config.vocab_size // size)
    assert ranks.calls == [
        *[("all_reduce", len(tokens) * config.hidden_size)] * sums,
        ("all_gather", len(tokens) * share),
    ]


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 25}, {"num_attention_heads": 6}], ids=str
)
def test_lists_refuse_what_cannot_be_cut(changes):
    """By slices of equal length a part of the values would be on no rank."""
    model = random_model(replace(CONFIGS["llama"], **changes), 0)
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name}: got {changes[name]}; accepted: [^\n]*$"):
        naive.forward(model, torch.tensor([1, 2]), Ranks(4))


# ---------------------------------------------------------------- tokens


def sampled_in_many_ways() -> list[SamplingParams]:
    warm = SamplingParams(temperature=1.0, top_p=0.9, seed=random.randrange(2**63))
    return [GREEDY, warm, SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.2, seed=3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_generate_the_tokens_of_one_process(name, seed):
    """In float32, in waves over so few blocks that requests wait on the host in between."""
    config, prompts = CONFIGS[name], [random_tokens(length) for length in (1, 5, 8)]
    sampling, options = sampled_in_many_ways(), dict(num_blocks=7, block_size=3)
    model = random_model(config, seed)
    expected = lesson_12.generate(model, prompts, 9, sampling, **options)
    arguments = FOUR, config, seed, prompts, 9, sampling, options
    for found in run_ranks(4, rank_tokens, *arguments):
        assert found == [expected] * len(FOUR)


def test_ranks_agree_on_seeds_that_no_caller_gave(seed):
    prompts, warm = [random_tokens(3)] * 2, SamplingParams(temperature=1.5)
    arguments = [Mesh(tp=2, pp=2)], LLAMA, seed, prompts, 6, warm, {}
    first, *others = run_ranks(4, rank_tokens, *arguments)
    assert all(found == first for found in others)
    assert first[0][0] != first[0][1], "two prompts without a seed are two draws"


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize("name, expert_parallel", [("llama", False), ("deepseek_v3", True)])
def test_bytes_on_the_wire_are_those_of_the_formula(name, expert_parallel, seed):
    """Two sums of [T, hidden_size] a layer and one for the embeddings, and of each row of logits a
    rank's share; between two stages [T, hidden_size] from each shard.
    """
    config, tokens = CONFIGS[name], random_tokens(random.randint(2, 9))
    by_rank = run_ranks(4, rank_wire, Mesh(tp=2, pp=2), config, tokens, expert_parallel)
    hidden = 4 * len(tokens) * config.hidden_size  # bytes, float32
    share = -(-config.vocab_size // 2)
    layers = [len(stage) for stage in split_layers(config.num_hidden_layers, 2)]
    for rank, (calls, sent, pipe_calls, pipe_sent) in enumerate(by_rank):
        is_last = rank >= 2
        sums = 2 * layers[is_last] + (not is_last)
        gathers = dict(all_gather=1) if is_last else {}
        assert calls == dict(all_reduce=sums) | gathers
        gathered = dict(all_gather=4 * share) if is_last else {}
        assert sent == dict(all_reduce=sums * hidden) | gathered
        assert pipe_calls == ({} if is_last else dict(send=1))
        assert pipe_sent == ({} if is_last else dict(send=hidden))


def test_a_rank_alone_says_nothing(seed):
    links = links_of(Mesh(), 0)
    part = shard(random_model(LLAMA, seed), links)
    logits_of(part, torch.tensor([1, 2]))
    assert not links.tensor.wire.calls and type(part.lm_head) is torch.nn.Linear


# ---------------------------------------------------------------- memory


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_parts_together_hold_the_model_once(name, seed):
    """But for what is copied: norms, routers, latents' projections, biases after sums, KV heads."""
    config = CONFIGS[name]
    model = random_model(config, seed)
    parts = [shard(model, links_of(Mesh(tp=2, pp=2), rank)) for rank in range(4)]
    held = sum(tensor.numel() for part in parts for tensor in part.state_dict().values())
    whole = sum(tensor.numel() for tensor in model.parameters())
    assert held < 1.35 * whole
    # a view would keep the whole tensor in memory
    for part in parts:
        for name, tensor in part.named_parameters():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_a_pool_of_the_local_shape_holds_a_share_of_the_cache():
    for name, size, share in [("llama", 2, 2), ("llama", 4, 2), ("qwen3", 2, 1), ("mistral", 2, 2)]:
        config = CONFIGS[name]
        whole = config.kv_bytes_per_token(4)
        assert local_config(config, 0, size).kv_bytes_per_token(4) == whole // share


# ---------------------------------------------------------------- slips

CASES = {slip: ("llama", False) for slip in SLIPS} | {
    "bias on every rank": ("qwen2", False),
    "experts' bias on every rank": ("gpt_oss", False),
    "shared experts on every rank": ("deepseek_v2", True),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("slip", CASES)
def test_a_slip_is_seen(slip, seed):
    name, expert_parallel = CASES[slip]
    config, tokens = CONFIGS[name], random_tokens(9)
    expected = logits_of(random_model(config, seed, torch.float64), torch.tensor(tokens))
    meshes = [Mesh(tp=4)]
    arguments = meshes, config, seed, tokens, expert_parallel, slip
    for (found,) in run_ranks(4, rank_logits, *arguments):
        if found.shape == expected.shape:
            assert not (found - expected).abs().max() < 1e-3
