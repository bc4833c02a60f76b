"""Mamba-2 layers, whose state is a matrix that fades (lesson 27): their shape, and how the files of
Granite 4, Bamba and Nemotron-H become fields of ModelConfig.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from lessons.toolbox.model.arguments import check_kind, check_whole, is_number, named, refuse, shown
from lessons.toolbox.model.config import MoEConfig, Multipliers, RopeScaling
from lessons.toolbox.model.state_config import ATTENDS, HAS_STATE, Kinds

MLP_ALONE, EXPERTS_ALONE = "mlp", "moe"
SIZES = "mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv"
FLAGS = "mamba_conv_bias mamba_proj_bias"
NO_ROPE = RopeScaling("none", 1.0)


@dataclass(frozen=True)
class MambaConfig(Kinds):
    """Mamba-2 beside attention, under the names of Granite 4's config.json. Raises ValueError.

    layer_types: Nemotron-H has layers that are an MLP, or experts, and nothing else.
    """

    OTHERS: ClassVar[tuple[str, ...]] = (MLP_ALONE, EXPERTS_ALONE)
    mamba_n_heads: int
    mamba_d_head: int  # columns of a head's state: coordinates of x
    mamba_d_state: int  # rows of it: coordinates of B and of C
    mamba_n_groups: int  # of heads: those of a group share a B and a C
    mamba_d_conv: int  # tokens that the convolution mixes, the newest one included
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    # where the time steps dt end, both ends included
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self):
        super().__post_init__()
        check_whole(**named(self, SIZES))
        check_whole(2, mamba_d_conv=self.mamba_d_conv)
        check_kind(bool, "True or False", **named(self, FLAGS))
        if self.mamba_n_heads % self.mamba_n_groups:
            raise ValueError(
                f"mamba_n_heads ({self.mamba_n_heads}) must be a multiple of mamba_n_groups "
                f"({self.mamba_n_groups})"
            )
        limits = self.time_step_limit
        fits = isinstance(limits, tuple) and len(limits) == 2
        if not fits or not (is_number(limits[0], 0) and is_number(limits[1], limits[0], math.inf)):
            refuse("time_step_limit", limits, "two numbers, 0 <= the first <= the second")

    @property
    def heads_per_group(self) -> int:
        """Heads that share a B and a C."""
        return self.mamba_n_heads // self.mamba_n_groups

    @property
    def key_dim(self) -> int:
        """Channels of B of all groups, and of C."""
        return self.mamba_n_groups * self.mamba_d_state

    @property
    def value_dim(self) -> int:
        """Channels of x of all heads."""
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def conv_dim(self) -> int:
        """Channels that the convolution mixes: x, B and C."""
        return self.value_dim + 2 * self.key_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.conv_dim, self.mamba_d_conv - 1

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.mamba_n_heads, self.mamba_d_state, self.mamba_d_head


# ---------------------------------------------------------------- Granite 4 and Bamba


def granitemoehybrid(config) -> dict[str, Any]:
    """The fields of ModelConfig that are Granite 4's own, out of transformers' config. Raises
    ValueError.
    """
    kinds, bias = tuple(config.layer_types), config.attention_bias
    if not set(kinds) <= {HAS_STATE, ATTENDS}:
        found = shown(sorted(set(kinds)))
        raise ValueError(f"'layer_types' must list {HAS_STATE} or {ATTENDS}, not {found}")
    numbers = {key: getattr(config, key) for key in vars(Multipliers())}
    own = dict(multipliers=Multipliers(**numbers), qkv_bias=bias, o_bias=bias)
    own |= dict(intermediate_size=config.shared_intermediate_size)
    if config.position_embedding_type != "rope":
        own |= dict(rope_scaling=NO_ROPE)
    if config.num_local_experts:
        moe = MoEConfig(
            n_routed_experts=config.num_local_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.intermediate_size,
            shared_intermediate_size=config.shared_intermediate_size,
            norm_topk_prob=True,  # it takes the softmax over the chosen logits, which is the same
            are_stacked=True,
        )
        own |= dict(moe=moe)
    # Granite 4.0 Micro, a Granite 3 under other names
    is_plain = kinds == (ATTENDS,) * config.num_hidden_layers and not config.num_local_experts
    if not is_plain:
        own |= dict(state=mamba_of(config, kinds))
    return own


def bamba(config) -> dict[str, Any]:
    """The fields of ModelConfig that are Bamba's own, out of transformers' config. Raises
    ValueError.
    """
    bias, share = config.attention_bias, config.rope_parameters["partial_rotary_factor"]
    turning = getattr(config, "attn_rotary_emb", None)
    half = config.hidden_size // config.num_attention_heads // 2
    if share != 0.5 or turning not in (None, half):
        raise ValueError(
            f"half of a head must turn, 'attn_rotary_emb' be {half} or absent, not "
            f"{shown(turning)}, and 'partial_rotary_factor' 0.5, not {shown(share)}"
        )
    state = mamba_of(config, tuple(config.layers_block_type))
    own = dict(state=state, partial_rotary_factor=share, mlp_bias=config.mlp_bias)
    return own | dict(qkv_bias=bias, o_bias=bias)


def mamba_of(config, kinds: tuple[str, ...]) -> MambaConfig:
    """The shape of the Mamba-2 layers under the names that both families use."""
    sizes = {key: getattr(config, key) for key in f"{SIZES} {FLAGS}".split()}
    return MambaConfig(kinds, **sizes, time_step_limit=time_step_limit(config))


def time_step_limit(config) -> tuple[float, float]:
    """The limits of dt as a file names them; null: none."""
    return (0.0, math.inf) if config.time_step_limit is None else tuple(config.time_step_limit)


def with_infinity(raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json with an infinite time_step_limit as a number: transformers writes
    {"__float__": "Infinity"}, others the word Infinity, which Python's json reads.
    """
    raw, limits = dict(raw), raw.get("time_step_limit")
    if isinstance(limits, list):
        raw["time_step_limit"] = [
            math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits
        ]
    return raw


# ---------------------------------------------------------------- Nemotron-H

LETTERS = {"M": HAS_STATE, "*": ATTENDS, "-": MLP_ALONE, "E": EXPERTS_ALONE}
OLDER_KINDS = {"mamba": HAS_STATE, "attention": ATTENDS}


def with_listed_layers(raw: dict[str, Any]) -> dict[str, Any]:
    """A Nemotron-H's config.json with layers_block_type and num_hidden_layers, whichever of the
    three ways it tells its layers by. Raises ValueError where two of them differ.
    """
    raw = with_infinity(raw)
    pattern, listed = raw.pop("hybrid_override_pattern", None), raw.get("layers_block_type")
    if isinstance(listed, list):
        listed = [OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]
    if pattern is not None:
        if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS):
            raise ValueError(
                f"'hybrid_override_pattern' must have the letters {' '.join(LETTERS)}, not "
                f"{shown(pattern)}"
            )
        spelled = [LETTERS[letter] for letter in pattern]
        if listed not in (None, spelled):
            raise ValueError(
                f"'layers_block_type' ({shown(listed)}) must name the layers of "
                f"'hybrid_override_pattern' ({shown(pattern)}), or be absent"
            )
        listed = spelled
    if isinstance(listed, list):
        raw["layers_block_type"] = listed
        if raw.setdefault("num_hidden_layers", len(listed)) != len(listed):
            given = shown(raw["num_hidden_layers"])
            raise ValueError(f"'num_hidden_layers' must be {len(listed)}, as listed, not {given}")
    # whatever it says of RoPE, its attention has none; the reader of all families asks for one
    raw.pop("rope_scaling", None)
    raw.pop("rope_theta", None)
    return raw | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))


def nemotron_h(config) -> dict[str, Any]:
    """The fields of ModelConfig that are Nemotron-H's own, out of transformers' config. Raises
    ValueError.

    The limits of dt are time_step_limit, as in NVIDIA's code and in vLLM; time_step_min, by which
    weights were drawn, limits nothing. transformers 5.17 takes it for the lower limit, in prompts
    and not in single tokens.
    """
    if config.tie_word_embeddings:
        raise ValueError("'tie_word_embeddings' must be false, as the family's models tie nothing")
    kinds = tuple(config.layers_block_type)
    state = MambaConfig(
        kinds,
        mamba_n_heads=config.mamba_num_heads,
        mamba_d_head=config.mamba_head_dim,
        mamba_d_state=config.ssm_state_size,
        mamba_n_groups=config.n_groups,
        mamba_d_conv=config.conv_kernel,
        mamba_conv_bias=config.use_conv_bias,
        mamba_proj_bias=config.use_bias,
        time_step_limit=time_step_limit(config),
    )
    own = dict(state=state, variant="nemotron_h", mlp_bias=config.mlp_bias, rope_scaling=NO_ROPE)
    if EXPERTS_ALONE in kinds:
        own |= dict(moe=nemotron_experts(config, kinds))
    return own


def nemotron_experts(config, kinds: tuple[str, ...]) -> MoEConfig:
    """The experts of the layers that are nothing else."""
    return MoEConfig(
        n_routed_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_intermediate_size=config.moe_shared_expert_intermediate_size,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        n_group=config.n_group,
        topk_group=config.topk_group,
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
        dense_layers=tuple(i for i, kind in enumerate(kinds) if kind != EXPERTS_ALONE),
    )
