"""How checkpoints stretch rotary embeddings beyond the context that they were trained on."""

import math
from dataclasses import dataclass

from lessons.toolbox.model.arguments import check_kind, check_positive, named, refuse

ROPE_TYPES = ("linear", "llama3", "yarn", "longrope", "none")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1 (YaRN, equation 22); 1 where the context is not stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeScaling:
    """How a checkpoint stretches RoPE beyond the context it was trained on.

    rope_type: "linear" (every wavelength times `factor`), "llama3" (only the long ones, smoothly;
    Llama 3.1), "yarn" (a ramp over the coordinates, and q · k grow a little; Qwen, DeepSeek),
    "longrope" (each wavelength times a factor of its own, and q · k grow a little; Phi-3) or "none"
    (nothing turns; some layers of SmolLM3). None of the optional fields: as the published code has
    it. Raises ValueError for another type, a factor that is not positive, or factors in the wrong
    order.
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
    # yarn, longrope: what cos and sin are multiplied with
    attention_factor: float | None = None
    # yarn: DeepSeek's two factors, where it departs from the paper
    mscale: float | None = None
    mscale_all_dim: float | None = None
    # longrope: what each pair's wavelength is multiplied with, in a context that is at most the
    # original one, and in a longer one
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            refuse("rope_type", self.rope_type, ", ".join(ROPE_TYPES))
        check_positive(**named(self, "factor low_freq_factor high_freq_factor beta_fast beta_slow"))
        check_positive(**named(self, "original_max_position_embeddings"))
        if self.attention_factor is not None:
            check_positive(attention_factor=self.attention_factor)
        for name, value in named(self, "mscale mscale_all_dim").items():
            # because the published code takes an mscale of 0 for none
            if value is not None and not (isinstance(value, (int, float)) and value == 0):
                check_positive(**{name: value})
        check_kind(bool, "True or False", truncate=self.truncate)
        for name, factors in named(self, "short_factor long_factor").items():
            check_kind(tuple, "a tuple", **{name: factors})
            for factor in factors:
                check_positive(**{name: factor})
            if bool(factors) != (self.rope_type == "longrope"):
                refuse(name, factors, "a factor for each pair with longrope, none without")
        # because the magnitude divides by its logarithm
        if self.rope_type == "longrope" and self.original_max_position_embeddings <= 1:
            refuse("original_max_position_embeddings", 1, "2 or more with longrope")
        # because the blend runs from one to the other; Llama 4's has no width
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must not be below low_freq_factor "
                f"({self.low_freq_factor})"
            )
        # because the ramp runs from the fast pairs to the slow ones; Kimi-K2's has no width
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast ({self.beta_fast}) must not be below beta_slow ({self.beta_slow})"
            )

    def is_long(self, context_len: int) -> bool:
        """Whether a context of so many tokens is rotated with `long_factor`."""
        longrope = self.rope_type == "longrope"
        return longrope and context_len > self.original_max_position_embeddings

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied with: 1, but for YaRN and LongRoPE, which sharpen the
        softmax as the context grows (YaRN, section 3.4).
        """
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            original = self.original_max_position_embeddings
            # 1, because a context that is not stretched has a logarithm of 0 or less
            return math.sqrt(1 + math.log(max(self.factor, 1)) / math.log(original))
        whole = yarn_mscale(self.factor)
        if self.mscale and self.mscale_all_dim:
            # DeepSeek scales all of q · k by mscale_all_dim, and only the rest here
            all_dim = yarn_mscale(self.factor, self.mscale_all_dim)
            return yarn_mscale(self.factor, self.mscale) / all_dim
        return whole
