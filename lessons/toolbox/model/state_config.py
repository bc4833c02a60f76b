"""Layers that keep a state of fixed size for each sequence, in the place of K and V (lesson 27)."""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from lessons.toolbox.model.arguments import check_kind, check_whole, named, refuse
from lessons.toolbox.model.config import ModelConfig, MoEConfig

HAS_STATE, ATTENDS, CONVOLVES = "linear_attention", "full_attention", "conv"
SIZES = """linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
    linear_conv_kernel_dim"""


@dataclass(frozen=True)
class Kinds:
    """Which layers keep a state, and which keep K and V. Raises ValueError.

    layer_types: of each layer KEEPS, which a subclass names, "full_attention", or one of OTHERS,
    that mix no tokens.
    """

    KEEPS: ClassVar[str] = HAS_STATE
    OTHERS: ClassVar[tuple[str, ...]] = ()
    layer_types: tuple[str, ...]

    def __post_init__(self):
        check_kind(tuple, "a tuple", layer_types=self.layer_types)
        both = {self.KEEPS, ATTENDS}
        if not both <= set(self.layer_types) <= both.union(self.OTHERS):
            others = " but ".join(filter(None, ["no other", ", ".join(self.OTHERS)]))
            accepted = f"both {self.KEEPS} and {ATTENDS}, and {others}"
            refuse("layer_types", self.layer_types, accepted)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that keep a state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == self.KEEPS)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep K and V."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == ATTENDS)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """What the convolution of a layer keeps of a sequence: [C, W - 1], its last inputs."""
        raise NotImplementedError

    @property
    def matrix_shape(self) -> tuple[int, int, int] | None:
        """The state of a layer's heads: [H, Dk, Dv]; None: it has a convolution alone."""
        return None

    def bytes_per_sequence(self, bytes_per_value: int, of_matrices: int | None = None) -> int:
        """What a sequence keeps in these layers, however long it is. bytes_per_value: of the
        model's dtype; of_matrices: of a number of the matrices, None: 4 bytes at least, because
        each token adds to them.
        """
        matrices = prod(self.matrix_shape or (0,)) * (of_matrices or max(4, bytes_per_value))
        return len(self.layers) * (prod(self.conv_shape) * bytes_per_value + matrices)


@dataclass(frozen=True)
class ConvConfig(Kinds):
    """Short convolutions beside attention, under the names of LFM2's config.json. Raises
    ValueError.
    """

    KEEPS: ClassVar[str] = CONVOLVES
    hidden_size: int  # of the model, each coordinate a channel
    conv_L_cache: int  # tokens that the convolution mixes, the newest one included

    def __post_init__(self):
        super().__post_init__()
        check_whole(hidden_size=self.hidden_size)
        check_whole(2, conv_L_cache=self.conv_L_cache)

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.hidden_size, self.conv_L_cache - 1


@dataclass(frozen=True)
class StateConfig(Kinds):
    """Gated DeltaNet beside attention, under the names of Qwen3-Next's config.json. Raises
    ValueError.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int  # a multiple of them: so many value heads share a q and a k
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int  # tokens that the convolution mixes, the newest one included

    def __post_init__(self):
        super().__post_init__()
        check_whole(**named(self, SIZES))
        check_whole(2, linear_conv_kernel_dim=self.linear_conv_kernel_dim)
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.linear_num_value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.linear_num_key_heads})"
            )

    @property
    def values_per_key(self) -> int:
        """Value heads that share a q and a k."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def key_dim(self) -> int:
        """Channels of q of all heads, and of k."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of v of all heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that the convolution mixes: q, k and v."""
        return 2 * self.key_dim + self.value_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.conv_dim, self.linear_conv_kernel_dim - 1

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        heads = self.linear_num_value_heads
        return heads, self.linear_key_head_dim, self.linear_value_head_dim


def qwen3_next(config) -> dict[str, Any]:
    """The fields of ModelConfig that are Qwen3-Next's own, out of transformers' config."""
    layers, step = range(config.num_hidden_layers), config.decoder_sparse_step
    mlp_only = set(config.mlp_only_layers)
    moe = MoEConfig(
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_expert_intermediate_size=config.shared_expert_intermediate_size,
        norm_topk_prob=config.norm_topk_prob,
        # + 1, because every step-th layer has experts, and layer 0 is the first
        dense_layers=tuple(i for i in layers if i in mlp_only or (i + 1) % step),
    )
    sizes = {key: getattr(config, key) for key in SIZES.split()}
    state = StateConfig(tuple(config.layer_types), **sizes)
    bias, share = config.attention_bias, config.rope_parameters["partial_rotary_factor"]
    own = dict(moe=moe, state=state, qk_norm=True, partial_rotary_factor=share)
    return own | dict(qkv_bias=bias, o_bias=bias)


def lfm2(config) -> dict[str, Any]:
    """The fields of ModelConfig that are LFM2's own, out of transformers' config."""
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:  # to a multiple of block_multiple_of
        inner = int(config.block_ffn_dim_multiplier * int(2 * inner / 3))
        inner = -(-inner // config.block_multiple_of) * config.block_multiple_of
    state = ConvConfig(tuple(config.layer_types), config.hidden_size, config.conv_L_cache)
    return dict(state=state, qk_norm=True, intermediate_size=inner)


def check_state(config: ModelConfig) -> None:
    """Raise ValueError unless `state` fits to the other fields."""
    check_kind(Kinds, "None, StateConfig, ConvConfig or MambaConfig", state=config.state)
    if (found := len(config.state.layer_types)) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types names {found} layers, num_hidden_layers is {config.num_hidden_layers}"
        )
    if config.sliding_windows or config.mla is not None:
        others = "windows" if config.sliding_windows else "latents"
        refuse("state", config.state, f"None in a model with {others}")
