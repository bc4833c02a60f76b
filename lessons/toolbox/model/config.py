"""The shape of a model, under the names that its config.json uses."""

import math
import reprlib
from dataclasses import dataclass

ROPE_TYPES = ("linear", "llama3", "yarn")
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")

_short = reprlib.Repr()
_short.maxstring = 80  # 30 would cut names of keys
shown = _short.repr  # a value of a file for an error, however long it is


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1 (YaRN, equation 22); 1 where the context is not stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeScaling:
    """How a checkpoint stretches RoPE beyond the context it was trained on.

    rope_type: "linear" (every wavelength times `factor`), "llama3" (only the long ones, smoothly;
    Llama 3.1) or "yarn" (a ramp over the coordinates, and q · k grow a little; Qwen, DeepSeek).
    None of the optional fields: as the published code has it. Raises ValueError for another type, a
    factor that is not positive, or factors that leave no band to blend.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    # yarn: a pair that turns more often than this within the original context stays
    beta_fast: float = 32.0
    beta_slow: float = 1.0  # yarn: one that turns less often is slowed by `factor`
    # yarn: round the ends of the ramp outwards to whole pairs
    truncate: bool = True
    attention_factor: float | None = None  # yarn: what cos and sin are multiplied with
    # yarn: DeepSeek's two factors, where it departs from the paper
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type {self.rope_type!r} is not supported; supported: default, "
                f"{', '.join(ROPE_TYPES)}"
            )
        if self.factor <= 0:
            raise ValueError(f"RoPE factor must be positive, not {self.factor}")
        # because the blend divides by their difference
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must exceed low_freq_factor "
                f"({self.low_freq_factor})"
            )
        # because the ramp runs from the fast pairs to the slow ones
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_fast ({self.beta_fast}) must exceed beta_slow ({self.beta_slow}), and both "
                f"be positive"
            )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1; lesson 6). Raises ValueError for sizes
    that do not fit.

    A head of q and k is qk_nope_head_dim coordinates without a position and qk_rope_head_dim that
    turn with it.
    """

    q_lora_rank: int | None  # None: q is projected at once (V2-Lite)
    # size of the latent from which k and v of all heads are made
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # of k one for all heads
    v_head_dim: int
    rope_interleave: bool = True  # the rotary coordinates lie in pairs (2i, 2i + 1)

    def __post_init__(self):
        if self.qk_rope_head_dim % 2:  # because RoPE rotates pairs of coordinates
            raise ValueError(f"qk_rope_head_dim must be even, not {self.qk_rope_head_dim}")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values that a token leaves in a layer's latent cache: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the MLP of some layers (lesson 6, moe.py; lesson 20). Raises
    ValueError.

    scoring_func: "softmax" or "sigmoid" of the router's logits. topk_method: "greedy" (the best
    experts), "group_limited_greedy" (of the groups with the best expert; DeepSeek-V2) or "noaux_tc"
    (the groups with the best two; DeepSeek-V3, with a bias).
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 0  # run for every token, beside the chosen ones
    first_k_dense_replace: int = 0  # so many layers at the start have an ordinary MLP
    # of the others, those whose index divides by this have experts
    moe_layer_freq: int = 1
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: int = 1
    topk_group: int = 1  # how many groups a token may choose experts from
    norm_topk_prob: bool = False  # make the chosen experts' weights sum to one
    routed_scaling_factor: float = 1.0

    def __post_init__(self):
        if self.scoring_func not in ("softmax", "sigmoid") or self.topk_method not in TOPK_METHODS:
            raise ValueError(
                f"scoring_func {self.scoring_func!r} with topk_method {self.topk_method!r} is not "
                f"supported; "
                f"supported: softmax or sigmoid with {', '.join(TOPK_METHODS)}"
            )
        if self.n_routed_experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"n_routed_experts ({self.n_routed_experts}) must be a multiple of n_group "
                f"({self.n_group}), and "
                f"topk_group ({self.topk_group}) be 1 to n_group"
            )
        if not 1 <= self.num_experts_per_tok <= self.topk_group * self.group_size:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be 1 to "
                f"{self.topk_group * self.group_size}, the experts of topk_group "
                f"({self.topk_group}) groups"
            )
        # because a group counts as its best two experts
        if self.topk_method == "noaux_tc" and self.group_size < 2:
            raise ValueError(
                f"noaux_tc needs groups of two experts or more, n_routed_experts "
                f"({self.n_routed_experts}) in "
                f"n_group ({self.n_group}) groups are fewer"
            )

    @property
    def group_size(self) -> int:
        return self.n_routed_experts // self.n_group

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` has experts rather than one MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: Llama 2/3, Qwen2/2.5, Qwen3, Mistral; DeepSeek-V2 and V3, which
    have `mla` and `moe`.

    Every field carries the name under which config.json files hold it; `load_config` reads them.
    Raises ValueError for sizes that do not fit together.
    """

    model_type: str  # a key of families.FAMILIES
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # not always hidden_size / num_attention_heads (Qwen3)
    intermediate_size: int
    max_position_embeddings: int  # the context length, in tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2: yes
    o_bias: bool = False  # Llama with attention_bias
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k, before RoPE
    # per layer: how many keys a query sees, itself included; None: all
    sliding_windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    # 0 becomes head_dim: only MLA has heads of v narrower than those of q and k
    v_head_dim: int = 0
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None

    def __post_init__(self):
        if not self.v_head_dim:
            # the class is frozen, and v_head_dim always a width
            object.__setattr__(self, "v_head_dim", self.head_dim)
        if self.mla is None and self.v_head_dim != self.head_dim:
            raise ValueError(
                f"v_head_dim ({self.v_head_dim}) must be head_dim ({self.head_dim}) without mla; "
                f"give 0 for that"
            )
        # because each KV head serves the same number of query heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        # because RoPE rotates pairs of coordinates
        odd = type(self.head_dim) is not int or self.head_dim < 2 or self.head_dim % 2
        if self.mla is None and odd:
            raise ValueError(f"head_dim must be even, whole and positive, not {self.head_dim}")
        # because wavelengths are its powers, and YaRN divides by its logarithm
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta must be above 1, not {self.rope_theta}")
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(
                f"sliding_windows names {len(self.sliding_windows)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )

    @property
    def rope_dim(self) -> int:
        """How many coordinates of a head turn with the position."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """1 / √D of the q and k that are projected, whatever form of them attention reads; times m²
        in a stretched DeepSeek.
        """
        if self.mla is None:
            return self.head_dim**-0.5
        rope = self.rope_scaling
        # Squared, because the published code scales q and k by m each, and m = 1 where
        # mscale_all_dim is absent.
        stretch = (
            yarn_mscale(rope.factor, rope.mscale_all_dim) if rope and rope.mscale_all_dim else 1.0
        )
        return self.mla.qk_head_dim**-0.5 * stretch**2

    def sliding_window(self, layer: int) -> int | None:
        """How many keys (itself included) a query of `layer` sees, or None for all of them."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """The fewest bytes that a token adds to a cache, over all layers: layers · KV heads ·
        (head_dim + v_head_dim) · bytes.

        With MLA layers · (latent + rotary key) · bytes; a cache of the expanded k and v of all
        heads holds more.
        """
        values = (
            self.mla.latent_dim
            if self.mla
            else self.num_key_value_heads * (self.head_dim + self.v_head_dim)
        )
        return self.num_hidden_layers * values * bytes_per_value
