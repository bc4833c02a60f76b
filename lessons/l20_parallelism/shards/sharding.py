"""Which part of each layer a rank keeps: rows or columns of its matrices.

    local_config(config, rank=1, size=4)           # the shape of rank 1's part of every layer
    slices_of(config, name, shape, rank=1, size=4) # what of a whole tensor rank 1 keeps

A layer has two kinds of matrices. Those that read the residual stream (q, k, v, gate, up) are cut
by rows of the stored [out, in] matrix, so each rank computes some heads, or some of the MLP's inner
values. Those that write to it (o, down) are cut by columns, because the rank has just these inputs.
Their outputs are then partial sums, so each such pair of matrices needs one all-reduce. The field
names a cut by the matrix of y = x W: cut by rows here is its "column parallel".

Source: Megatron-LM (Shoeybi et al. 2019), section 3.
"""

from dataclasses import replace

from lessons.toolbox.model.arguments import check_whole, is_whole, refuse
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.places import OF_ONE_EXPERT

VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")
# cut by rows, so that a rank has whole heads, or some of an MLP's inner values with their biases
HEADS = ("q_proj", "q_b_proj", "kv_b_proj", "sinks")
INNER = ("gate_proj", "up_proj")
# cut by columns
SUMMED = ("o_proj", "down_proj")
# gpt-oss: [E, in, out] for all experts of a layer -> the dimension of the inner values
STACKED = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}


# ---------------------------------------------------------------- shapes


def local_config(
    config: ModelConfig, rank: int, size: int, expert_parallel: bool = False
) -> ModelConfig:
    """The shape of a rank's part of every layer: fewer heads, a narrower MLP. An ordinary decoder
    and an ordinary KVPool of this shape are the rank's.

    vocab_size stays the whole one, because every rank gets whole logits. KV heads that are fewer
    than the ranks are copied: rank r holds KV head r · Hkv // size. expert_parallel: routed experts
    keep their width, because a rank has whole ones. Raises ValueError, one line, for what cannot be
    cut.
    """
    check_rank(rank, size)
    vocabulary_rows(config.vocab_size, rank, size)
    heads = _share("num_attention_heads", config.num_attention_heads, size)
    moe = config.moe
    if moe is not None and moe.shared_expert_intermediate_size is not None:
        name = "shared_expert_intermediate_size"
        moe = replace(moe, **{name: _share(name, getattr(moe, name), size)})
    if moe is not None and config.mlp_bias:
        refuse("mlp_bias", True, "False in a model with experts, because no family has both")
    if expert_parallel and config.variant == "llama4":
        refuse("expert_parallel", True, "False where the input of an expert is weighed")
    if moe is not None and expert_parallel:
        _share("n_routed_experts", moe.n_routed_experts, size)
        if moe.n_shared_experts:  # they stay cut by their width
            _share("moe_intermediate_size", moe.moe_intermediate_size, size)
    elif moe is not None:
        width = _share("moe_intermediate_size", moe.moe_intermediate_size, size)
        moe = replace(moe, moe_intermediate_size=width)
    width = config.intermediate_size
    if has_dense_layers(config):
        width = _share("intermediate_size", width, size)
    kv_heads = kv_heads_of(config, rank, size)
    return replace(
        config,
        num_attention_heads=heads,
        num_key_value_heads=len(kv_heads),
        intermediate_size=width,
        moe=moe,
    )


def experts_of(num_experts: int, rank: int, size: int) -> range:
    """The experts of a rank: neighbours, and nearly as many on each. Raises ValueError for more
    ranks than experts.
    """
    if not 1 <= size <= num_experts:
        raise ValueError(
            f"ranks: got {size}; accepted: 1 to {num_experts}, the experts, so that each rank has "
            "one"
        )
    return range(num_experts * rank // size, num_experts * (rank + 1) // size)


def kv_heads_of(config: ModelConfig, rank: int, size: int) -> range:
    """The KV heads whose keys and values a rank computes and caches. Raises ValueError."""
    num_kv_heads = config.num_key_value_heads
    if num_kv_heads % size == 0:
        share = num_kv_heads // size
        return range(rank * share, (rank + 1) * share)
    if size % num_kv_heads:
        refuse(
            "num_key_value_heads",
            num_kv_heads,
            f"a multiple or a divisor of the {size} tensor ranks",
        )
    head = rank * num_kv_heads // size
    return range(head, head + 1)


def vocabulary_rows(vocab_size: int, rank: int, size: int) -> range:
    """The tokens whose embeddings and logits a rank holds. Each rank has ceil(V / size), the last
    what is left of them. Raises ValueError if that is nothing.
    """
    share = -(-vocab_size // size)
    if share * (size - 1) >= vocab_size:
        refuse("vocab_size", vocab_size, f"enough tokens for each of {size} tensor ranks")
    return range(rank * share, min((rank + 1) * share, vocab_size))


def has_dense_layers(config: ModelConfig) -> bool:
    """Whether some layer has an ordinary MLP."""
    moe, layers = config.moe, range(config.num_hidden_layers)
    return moe is None or not all(moe.has_experts(layer) for layer in layers)


def check_rank(rank: int, size: int) -> None:
    """Raise ValueError unless 0 <= rank < size."""
    check_whole(size=size)
    if not is_whole(rank, 0, size - 1):
        refuse("rank", rank, f"0 to {size - 1}")


def _share(name: str, whole: int, size: int) -> int:
    """An equal share of something. Raises ValueError."""
    if whole % size:
        refuse(name, whole, f"a multiple of the {size} tensor ranks")
    return whole // size


# ---------------------------------------------------------------- tensors


def slices_of(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...] | list[int],
    rank: int,
    size: int,
    expert_parallel: bool = False,
) -> tuple[slice, ...]:
    """What a rank keeps of a tensor of the whole model, one slice a dimension.

    name: in the decoder, such as "layers.3.self_attn.q_proj.weight"; shape: whole. Tensors that no
    rule names (norms, routers, latents' projections) are on every rank. Biases after a sum are
    too, and are added once. A rank that lacks a whole expert never asks for its tensors.
    """
    kept = [slice(0, length) for length in shape]
    part, _, kind = name.rpartition(".")
    part = part.rpartition(".")[2] if kind in ("weight", "bias") else kind
    if config.variant == "olmo":  # whose norms of q and k run over all heads
        part = dict(q_norm="q_proj", k_norm="k_proj").get(part, part)
    is_routed = ".experts." in name
    if name in VOCABULARY:
        rows = vocabulary_rows(shape[0], rank, size)
        kept[0] = slice(rows.start, rows.stop)
    elif is_routed and expert_parallel:
        if config.moe.are_stacked:
            own = experts_of(shape[0], rank, size)
            kept[0] = slice(own.start, own.stop)
    elif is_routed and config.moe.are_stacked and not OF_ONE_EXPERT.search(name):
        if part in STACKED:
            kept[STACKED[part]] = _equal_slice(shape[STACKED[part]], rank, size)
    elif part in HEADS or part in INNER:
        kept[0] = _equal_slice(shape[0], rank, size)
    elif part in ("k_proj", "v_proj"):
        heads = kv_heads_of(config, rank, size)
        kept[0] = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
    elif part in SUMMED and kind == "weight":
        kept[1] = _equal_slice(shape[1], rank, size)
    return tuple(kept)


def _equal_slice(length: int, rank: int, size: int) -> slice:
    return slice(rank * length // size, (rank + 1) * length // size)
