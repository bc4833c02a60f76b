"""The shape of a model, under the names that its config.json uses."""

from dataclasses import dataclass, field, replace
from typing import Any

from lessons.toolbox.model.arguments import (
    check_kind,
    check_positive,
    check_whole,
    is_whole,
    named,
    refuse,
)
from lessons.toolbox.model.config_parts import MLAConfig, MoEConfig, Multipliers
from lessons.toolbox.model.rope_scaling import RopeScaling, yarn_mscale

SIZES = """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size max_position_embeddings"""
FLAGS = "tie_word_embeddings qkv_bias o_bias mlp_bias qk_norm norms_after attention_sinks"
GEMMA_NUMBERS = """query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping
    rope_local_base_freq"""
# who else has parts in the variants/ of lessons 2 and 6, or in mamba/; "gemma" is Gemma 1
VARIANTS = ("cohere", "gemma", "glm4", "llama4", "nemotron_h", "olmo", "phi", "starcoder2")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: Llama 2/3, Qwen2/2.5, Qwen3, Mistral, Phi-3, SmolLM3, Gemma 2/3;
    Granite 3, which has `multipliers`; OLMo 2/3, GLM-4, StarCoder 2, Cohere 1/2, Phi and Gemma 1,
    which have a `variant`; Mixtral, Qwen2- and Qwen3-MoE and GLM-4-MoE, which have `moe`; gpt-oss,
    which has `moe` and `attention_sinks`; DeepSeek-V2, V3 and V3.2 and Kimi-K2, which have `mla`
    and `moe`; Llama 4, which has `moe` and a `variant`; Qwen3-Next, which has `moe` and `state`,
    and LFM2, which has `state`; Granite 4, Bamba and Nemotron-H, which have `state` with Mamba-2
    layers, and some of them `moe`.

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
    partial_rotary_factor: float = 1.0  # the share of a head's coordinates that turn (Phi-3)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2: yes
    o_bias: bool = False  # Llama with attention_bias
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k, before RoPE
    norms_after: bool = False  # Gemma: the parts of lesson 2's gemma.py
    query_pre_attn_scalar: float | None = None  # Gemma: scores are divided by √ of it, not √D
    attn_logit_softcapping: float | None = None  # Gemma 2: scores stay between -cap and cap
    attention_sinks: bool = False  # gpt-oss: a learnt score a head takes its share of the softmax
    final_logit_softcapping: float | None = None  # Gemma: and so do logits
    # Gemma 3: the layers that have a window rotate by this, and are not stretched
    rope_local_base_freq: float | None = None
    no_rope_layers: tuple[int, ...] = ()  # SmolLM3, Llama 4: the layers that do not rotate
    multipliers: Multipliers | None = None  # Granite: the parts of lesson 2's granite.py
    variant: str | None = None  # one of VARIANTS: whose parts its decoder has
    # per layer: how many keys a query sees, itself included; None: all
    sliding_windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    # 0 becomes head_dim: only MLA has heads of v narrower than those of q and k
    v_head_dim: int = 0
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    state: Any = None  # Kinds (state_config.py): some layers keep a state for K and V
    # as config.json holds it; None: the weights are not quantized. Lesson 18 reads it.
    quantization_config: dict | None = field(default=None, hash=False)

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
        self._check_rope()
        # because wavelengths are its powers, and YaRN divides by its logarithm
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta must be above 1, not {self.rope_theta}")
        if self.rope_local_base_freq is not None and not self.rope_local_base_freq > 1:
            refuse("rope_local_base_freq", self.rope_local_base_freq, "a number above 1")
        self._check_no_rope_layers()
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(
                f"sliding_windows names {len(self.sliding_windows)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )

    def _check_kinds(self) -> None:
        """Raise ValueError for a field of another type, or a size below 1."""
        check_whole(**named(self, SIZES))
        check_whole(0, v_head_dim=self.v_head_dim)
        check_positive(**named(self, "rms_norm_eps rope_theta partial_rotary_factor"))
        check_kind(bool, "True or False", **named(self, FLAGS))
        for name, value in named(self, GEMMA_NUMBERS).items():
            if value is not None:
                check_positive(**{name: value})
        kinds = dict(rope_scaling=RopeScaling, mla=MLAConfig, moe=MoEConfig)
        for name, kind in (kinds | dict(multipliers=Multipliers)).items():
            check_kind((kind, type(None)), f"None or {kind.__name__}", **named(self, name))
        if self.variant not in (None, *VARIANTS):
            refuse("variant", self.variant, f"None, {', '.join(VARIANTS)}")
        quantization = self.quantization_config
        if quantization is not None and not (
            isinstance(quantization, dict) and isinstance(quantization.get("quant_method"), str)
        ):
            accepted = "None, or an object with a quant_method"
            refuse("quantization_config", quantization, accepted)
        if self.state is not None:
            from lessons.toolbox.model.state_config import check_state  # here: few models have one

            check_state(self)
        check_kind(tuple, "a tuple", eos_token_ids=self.eos_token_ids)
        check_kind((tuple, type(None)), "a tuple", sliding_windows=self.sliding_windows)
        for window in self.sliding_windows or ():
            if window is not None:
                check_whole(sliding_windows=window)

    def _check_rope(self) -> None:
        """Raise ValueError where the rotary coordinates and their factors do not fit."""
        factor, dim = self.partial_rotary_factor, self.rope_dim
        if factor > 1 or dim < 2 or dim % 2:
            refuse("partial_rotary_factor", factor, f"an even share of head_dim {self.head_dim}")
        scaling = self.rope_scaling
        if scaling is not None and scaling.rope_type == "longrope":
            for name, factors in named(scaling, "short_factor long_factor").items():
                if len(factors) != dim // 2:
                    raise ValueError(
                        f"{name}: got {len(factors)} factors; accepted: {dim // 2}, one for each "
                        f"pair of rotary coordinates"
                    )

    def _check_no_rope_layers(self) -> None:
        """Raise ValueError unless they are some of the layers, in a model of one other rotation."""
        layers = self.no_rope_layers
        check_kind(tuple, "a tuple", no_rope_layers=layers)
        for layer in layers:
            if not is_whole(layer, 0, self.num_hidden_layers - 1):
                accepted = f"layers from 0 to {self.num_hidden_layers - 1}"
                refuse("no_rope_layers", layers, accepted)
        if layers and (self.rope_local_base_freq is not None or self.mla is not None):
            refuse("no_rope_layers", layers, "none beside rope_local_base_freq or mla")

    @property
    def rope_dim(self) -> int:
        """How many coordinates of a head turn with the position, its last ones."""
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def softmax_scale(self) -> float:
        """1 / √D of the q and k that are projected, whatever form of them attention reads; times m²
        in a stretched DeepSeek. Gemma's config names what stands for D, and Granite's the scale.
        """
        if self.multipliers is not None:
            return self.multipliers.attention_multiplier
        if self.mla is None:
            return (self.query_pre_attn_scalar or self.head_dim) ** -0.5
        rope = self.rope_scaling
        # Squared, because the published code scales q and k by m each, and m = 1 where
        # mscale_all_dim is absent.
        is_stretched = rope and rope.mscale_all_dim
        stretch = yarn_mscale(rope.factor, rope.mscale_all_dim) if is_stretched else 1.0
        return self.mla.qk_head_dim**-0.5 * stretch**2

    def sliding_window(self, layer: int) -> int | None:
        """How many keys (itself included) a query of `layer` sees, or None for all of them."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def is_plain(self) -> bool:
        """Whether lesson 2's decoder has all its parts: no latents, experts, states or sinks, no
        norms after attention and MLP, and nothing of its variants.
        """
        others = self.moe, self.mla, self.state, self.multipliers, self.variant
        has_others = any(part is not None for part in others)
        return not (has_others or self.norms_after or self.attention_sinks)

    @property
    def has_score_rules(self) -> bool:
        """Whether attention does more to its scores than scale and mask them."""
        return self.attn_logit_softcapping is not None or self.attention_sinks

    @property
    def has_two_ropes(self) -> bool:
        """Whether some layers rotate otherwise than the others."""
        return self.rope_local_base_freq is not None or bool(self.no_rope_layers)

    def has_local_rope(self, layer: int) -> bool:
        """Whether `layer` rotates as `local_rope` says."""
        if self.rope_local_base_freq is None:
            return layer in self.no_rope_layers
        return self.sliding_window(layer) is not None

    @property
    def local_rope(self) -> "ModelConfig":
        """This config with the rotation of the layers that have a window, or with none in a model
        of which some layers do not rotate.
        """
        if self.rope_local_base_freq is None:
            return replace(self, rope_scaling=RopeScaling("none", 1.0))
        return replace(self, rope_theta=self.rope_local_base_freq, rope_scaling=None)

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep K and V of every token."""
        return self.num_hidden_layers if self.state is None else len(self.state.attention_layers)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """The fewest bytes that a token adds to a cache, over all layers that keep K and V: layers
        · KV heads · (head_dim + v_head_dim) · bytes.

        With MLA layers · (latent + rotary key) · bytes; a cache of the expanded k and v of all
        heads holds more.
        """
        heads, mla = self.num_key_value_heads, self.mla
        values = mla.latent_dim if mla else heads * (self.head_dim + self.v_head_dim)
        return self.num_kv_layers * values * bytes_per_value
