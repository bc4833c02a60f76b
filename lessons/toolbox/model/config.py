"""The shape of a model, under the names that its config.json uses."""

import math
from dataclasses import dataclass

from lessons.toolbox.model.arguments import check_kind, check_positive, check_whole, refuse

ROPE_TYPES = ("linear", "llama3", "yarn")
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SIZES = """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size max_position_embeddings"""
FLAGS = "tie_word_embeddings qkv_bias o_bias mlp_bias qk_norm"


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1 (YaRN, equation 22); 1 where the context is not stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _named(config, names: str) -> dict:
    """{name: value} of some fields, for a check that names the wrong one."""
    return {name: getattr(config, name) for name in names.split()}


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
            refuse("rope_type", self.rope_type, ", ".join(ROPE_TYPES))
        check_positive(
            **_named(self, "factor low_freq_factor high_freq_factor beta_fast beta_slow")
        )
        check_positive(**_named(self, "original_max_position_embeddings"))
        if self.attention_factor is not None:
            check_positive(attention_factor=self.attention_factor)
        for name, value in _named(self, "mscale mscale_all_dim").items():
            # because the published code takes an mscale of 0 for none
            if value is not None and not (isinstance(value, (int, float)) and value == 0):
                check_positive(**{name: value})
        check_kind(bool, "True or False", truncate=self.truncate)
        # because the blend divides by their difference
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must exceed low_freq_factor "
                f"({self.low_freq_factor})"
            )
        # because the ramp runs from the fast pairs to the slow ones
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast ({self.beta_fast}) must exceed beta_slow ({self.beta_slow})"
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
        if self.q_lora_rank is not None:
            check_whole(q_lora_rank=self.q_lora_rank)
        check_whole(**_named(self, "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"))
        check_kind(bool, "True or False", rope_interleave=self.rope_interleave)
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
        check_whole(**_named(self, "n_routed_experts num_experts_per_tok moe_intermediate_size"))
        check_whole(**_named(self, "moe_layer_freq n_group topk_group"))
        check_whole(0, **_named(self, "n_shared_experts first_k_dense_replace"))
        check_positive(routed_scaling_factor=self.routed_scaling_factor)
        check_kind(bool, "True or False", norm_topk_prob=self.norm_topk_prob)
        if self.scoring_func not in ("softmax", "sigmoid"):
            refuse("scoring_func", self.scoring_func, "softmax, sigmoid")
        if self.topk_method not in TOPK_METHODS:
            refuse("topk_method", self.topk_method, ", ".join(TOPK_METHODS))
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
        self._check_kinds()
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
        if self.mla is None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        # because wavelengths are its powers, and YaRN divides by its logarithm
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta must be above 1, not {self.rope_theta}")
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(
                f"sliding_windows names {len(self.sliding_windows)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )

    def _check_kinds(self) -> None:
        """Raise ValueError for a field of another type, or a size below 1."""
        check_whole(**_named(self, SIZES))
        check_whole(0, v_head_dim=self.v_head_dim)
        check_positive(**_named(self, "rms_norm_eps rope_theta"))
        check_kind(bool, "True or False", **_named(self, FLAGS))
        for name, kind in dict(rope_scaling=RopeScaling, mla=MLAConfig, moe=MoEConfig).items():
            check_kind((kind, type(None)), f"None or {kind.__name__}", **_named(self, name))
        check_kind(tuple, "a tuple", eos_token_ids=self.eos_token_ids)
        check_kind((tuple, type(None)), "a tuple", sliding_windows=self.sliding_windows)
        for window in self.sliding_windows or ():
            if window is not None:
                check_whole(sliding_windows=window)

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
