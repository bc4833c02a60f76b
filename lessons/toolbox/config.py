"""The shape of a model, under the names that its config.json uses."""
from dataclasses import dataclass

ROPE_TYPES = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How a checkpoint stretches RoPE beyond the context it was trained on.

    rope_type: "linear" (every wavelength times `factor`), "llama3" (only the long ones, smoothly; Llama 3.1) or "yarn" (a ramp
    over the coordinates, and q · k grow a little; Qwen, DeepSeek). None of the optional fields: as the published code has it.
    Raises ValueError for another type, a factor that is not positive, or factors that leave no band to blend.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0                 # yarn: a pair that turns more often than this within the original context stays
    beta_slow: float = 1.0                  # yarn: one that turns less often is slowed by `factor`
    truncate: bool = True                   # yarn: round the ends of the ramp outwards to whole pairs
    attention_factor: float | None = None   # yarn: what cos and sin are multiplied with
    mscale: float | None = None             # yarn: DeepSeek's two factors, where it departs from the paper
    mscale_all_dim: float | None = None

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {self.rope_type!r} is not supported; supported: default, {', '.join(ROPE_TYPES)}")
        if self.factor <= 0:
            raise ValueError(f"RoPE factor must be positive, not {self.factor}")
        if self.high_freq_factor <= self.low_freq_factor:  # because the blend divides by their difference
            raise ValueError(f"high_freq_factor ({self.high_freq_factor}) must exceed low_freq_factor ({self.low_freq_factor})")
        if not 0 < self.beta_slow < self.beta_fast:  # because the ramp runs from the fast pairs to the slow ones
            raise ValueError(f"beta_fast ({self.beta_fast}) must exceed beta_slow ({self.beta_slow}), and both be positive")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family: Llama 2/3, Qwen2/2.5, Qwen3, Mistral.

    Every field carries the name under which config.json files hold it; `load_config` reads them.
    Raises ValueError for sizes that do not fit together.
    """

    model_type: str                         # "llama", "mistral", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int                           # not always hidden_size / num_attention_heads (Qwen3)
    intermediate_size: int
    max_position_embeddings: int            # the context length, in tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False                  # Qwen2: yes
    o_bias: bool = False                    # Llama with attention_bias
    mlp_bias: bool = False
    qk_norm: bool = False                   # Qwen3: RMSNorm over each head of q and k, before RoPE
    sliding_windows: tuple[int | None, ...] = ()  # per layer: how many keys a query sees, itself included; None: all
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:  # because each KV head serves the same number of query heads
            raise ValueError(f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                             f"num_key_value_heads ({self.num_key_value_heads})")
        if self.head_dim % 2:  # because RoPE rotates pairs of coordinates
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(f"sliding_windows names {len(self.sliding_windows)} layers, "
                             f"num_hidden_layers is {self.num_hidden_layers}")

    @property
    def rope_dim(self) -> int:
        """How many coordinates of a head turn with the position."""
        return self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.head_dim ** -0.5

    def sliding_window(self, layer: int) -> int | None:
        """How many keys (itself included) a query of `layer` sees, or None for all of them."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of K and V that one token adds, over all layers: 2 · layers · KV heads · head_dim · bytes per value."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_value
