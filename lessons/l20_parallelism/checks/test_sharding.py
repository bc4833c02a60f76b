"""Proves that the ranks' slices make up every tensor, that they fit the decoder of the local shape,
and that what cannot be cut is refused in one line.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l06_mla.deepseek import decoder_class
from lessons.l20_parallelism.lab.testing import CONFIGS, EXPERTS, LATENTS, LLAMA, links_of
from lessons.l20_parallelism.optimized import new_part
from lessons.l20_parallelism.processes.mesh import Mesh
from lessons.l20_parallelism.shards.sharding import (
    check_rank,
    experts_of,
    kv_heads_of,
    local_config,
    slices_of,
    vocabulary_rows,
)

EVERY = [(name, ep) for name, config in CONFIGS.items() for ep in {False, config.moe is not None}]


def whole_shapes(config) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = decoder_class(config)(config)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name, expert_parallel", EVERY)
def test_slices_make_up_every_tensor_and_fit_the_local_decoder(name, expert_parallel, size):
    """Each number is on one rank, or on all (norms, biases after sums), or on the ranks that share
    a KV head: always on equally many.
    """
    config = CONFIGS[name]
    parts = [new_part(config, links_of(Mesh(tp=size), r), expert_parallel) for r in range(size)]
    for tensor_name, shape in whole_shapes(config).items():
        copies = torch.zeros(shape)
        for rank, part in enumerate(parts):
            held = part.state_dict()
            if tensor_name not in held:
                assert expert_parallel and ".experts." in tensor_name
                continue
            index = slices_of(config, tensor_name, shape, rank, size, expert_parallel)
            assert copies[index].shape == held[tensor_name].shape, tensor_name
            copies[index] += 1
        counts = set(copies.unique().tolist())
        is_kv = tensor_name.rpartition(".")[0].endswith(("k_proj", "v_proj"))
        is_kv |= config.variant == "olmo" and "k_norm" in tensor_name
        shared = max(1, size // config.num_key_value_heads)
        assert counts in ([{float(shared)}] if is_kv else [{1.0}, {float(size)}]), tensor_name
        is_matrix = len(shape) > 1 and "norm" not in tensor_name
        is_copied = (
            "gate.weight" in tensor_name or "router" in tensor_name or "_a_proj" in tensor_name
        ) or tensor_name.endswith("output_gate")
        if is_matrix and not is_copied and not is_kv and "down_proj_bias" not in tensor_name:
            assert counts == {1.0}, tensor_name


@pytest.mark.parametrize("num_kv_heads, size", [(8, 2), (8, 8), (2, 8), (1, 4), (3, 3)])
def test_each_query_head_meets_its_kv_head(num_kv_heads, size, seed):
    heads = num_kv_heads * size * random.randint(1, 3)
    config = replace(LLAMA, num_attention_heads=heads, num_key_value_heads=num_kv_heads)
    group, share = heads // num_kv_heads, heads // size
    for rank in range(size):
        own = kv_heads_of(config, rank, size)
        local = local_config(replace(config, intermediate_size=size), rank, size)
        assert len(own) == local.num_key_value_heads
        local_group = local.num_attention_heads // len(own)
        for head in range(share):  # of this rank
            assert own[head // local_group] == (rank * share + head) // group


@pytest.mark.parametrize("vocab_size, size", [(61, 4), (64, 4), (7, 3), (128256, 8), (2, 2)])
def test_every_token_is_on_one_rank(vocab_size, size):
    rows = [vocabulary_rows(vocab_size, rank, size) for rank in range(size)]
    assert [token for own in rows for token in own] == list(range(vocab_size))
    assert all(len(own) == len(rows[0]) for own in rows[:-1]) and 0 < len(rows[-1]) <= len(rows[0])


def test_what_is_local_and_what_is_not():
    local = local_config(CONFIGS["mixtral"], 1, 4)
    assert (local.num_attention_heads, local.num_key_value_heads) == (1, 1)
    assert (local.moe.moe_intermediate_size, local.moe.n_routed_experts) == (3, 8)
    same = "vocab_size hidden_size head_dim num_hidden_layers softmax_scale rope_dim"
    for name in same.split():
        assert getattr(local, name) == getattr(LLAMA, name)
    whole = local_config(CONFIGS["mixtral"], 1, 4, expert_parallel=True)
    assert whole.moe.moe_intermediate_size == 12 and list(experts_of(8, 1, 4)) == [2, 3]
    # DeepSeek caches one latent for all heads, which every rank needs
    assert local_config(LATENTS, 0, 4).kv_bytes_per_token(2) == LATENTS.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    "changes, size, words",
    [
        (
            dict(num_attention_heads=6),
            4,
            "num_attention_heads: got 6; accepted: a multiple of the 4",
        ),
        (
            dict(num_attention_heads=12, num_key_value_heads=3, intermediate_size=8),
            2,
            "num_key_value_heads: got 3; accepted: a multiple or a divisor of the 2 tensor ranks",
        ),
        (dict(intermediate_size=25), 4, "intermediate_size: got 25"),
        (dict(vocab_size=9), 4, "vocab_size: got 9; accepted: enough tokens for each of 4"),
        (dict(moe=replace(EXPERTS, moe_intermediate_size=6)), 4, "moe_intermediate_size: got 6"),
        (dict(moe=EXPERTS, mlp_bias=True), 2, "mlp_bias: got True"),
        (
            dict(moe=replace(EXPERTS, shared_expert_intermediate_size=10)),
            4,
            "shared_expert_intermediate_size: got 10; accepted: a multiple of the 4",
        ),
    ],
)
def test_shapes_that_cannot_be_cut_are_refused(changes, size, words):
    with pytest.raises(ValueError, match=words) as caught:
        local_config(replace(LLAMA, **changes), 0, size)
    assert "\n" not in str(caught.value)


def test_experts_and_ranks_that_do_not_fit_are_refused():
    config = replace(CONFIGS["mixtral"], moe=replace(EXPERTS, n_routed_experts=6))
    local_config(config, 0, 4)  # strips of experts
    with pytest.raises(ValueError, match="n_routed_experts: got 6; accepted: a multiple of the 4"):
        local_config(config, 0, 4, expert_parallel=True)
    for rank, size, words in [(2, 2, "rank: got 2; accepted: 0 to 1"), (0, 0, "size: got 0")]:
        with pytest.raises(ValueError, match=words):
            check_rank(rank, size)


def test_the_width_of_an_mlp_that_no_layer_has_does_not_matter():
    """DeepSeek's config names one, for its first layers; Mixtral's layers all have experts."""
    assert local_config(replace(CONFIGS["mixtral"], intermediate_size=25), 0, 4)
    with pytest.raises(ValueError, match="intermediate_size: got 25"):
        local_config(replace(CONFIGS["deepseek_v3"], intermediate_size=25), 0, 4)
