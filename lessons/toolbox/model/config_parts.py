"""The shapes of parts that few models have, under the names that their config.json uses."""

from dataclasses import dataclass

from lessons.toolbox.model.arguments import check_kind, check_positive, check_whole, named, refuse

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


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
        check_whole(**named(self, "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"))
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
    """A mixture of experts in place of the MLP of some layers (lesson 6, moe.py; lesson 23). Raises
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
    are_stacked: bool = False  # gpt-oss: one tensor holds all experts of a layer
    # layers of Qwen3-MoE that have an ordinary MLP, wherever they stand
    dense_layers: tuple[int, ...] = ()
    routed_scaling_factor: float = 1.0
    # Qwen2-MoE: the width of one shared expert, whose output a gate weighs
    shared_expert_intermediate_size: int | None = None
    shared_intermediate_size: int | None = None  # Granite 4: the width of one without a gate

    def __post_init__(self):
        check_whole(**named(self, "n_routed_experts num_experts_per_tok moe_intermediate_size"))
        check_whole(**named(self, "moe_layer_freq n_group topk_group"))
        check_whole(0, **named(self, "n_shared_experts first_k_dense_replace"))
        self._check_shared()
        check_positive(routed_scaling_factor=self.routed_scaling_factor)
        check_kind(tuple, "a tuple", dense_layers=self.dense_layers)
        check_kind(bool, "True or False", **named(self, "norm_topk_prob are_stacked"))
        if self.scoring_func not in ("softmax", "sigmoid"):
            refuse("scoring_func", self.scoring_func, "softmax, sigmoid")
        if self.topk_method not in TOPK_METHODS:
            refuse("topk_method", self.topk_method, ", ".join(TOPK_METHODS))
        if self.n_routed_experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"n_routed_experts ({self.n_routed_experts}) must be a multiple of n_group "
                f"({self.n_group}), and topk_group ({self.topk_group}) be 1 to n_group"
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
                "noaux_tc needs groups of two experts or more, n_routed_experts "
                f"({self.n_routed_experts}) in n_group ({self.n_group}) groups are fewer"
            )

    def _check_shared(self) -> None:
        """Raise ValueError unless the shared experts are told in one of the three ways."""
        counts = named(self, "shared_expert_intermediate_size shared_intermediate_size")
        counts = {name: width for name, width in counts.items() if width is not None}
        check_whole(**counts)
        if counts and self.n_shared_experts:
            refuse("n_shared_experts", self.n_shared_experts, f"0 beside {next(iter(counts))}")
        if len(counts) > 1:
            refuse("shared_intermediate_size", self.shared_intermediate_size, "None beside a gate")

    @property
    def group_size(self) -> int:
        return self.n_routed_experts // self.n_group

    @property
    def shared_width(self) -> int:
        """Inner values of the MLP that every token passes beside its experts; 0: there is none."""
        side_by_side = self.n_shared_experts * self.moe_intermediate_size
        of_one = self.shared_expert_intermediate_size or self.shared_intermediate_size
        return of_one or side_by_side

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` has experts rather than one MLP."""
        is_dense = layer < self.first_k_dense_replace or layer in self.dense_layers
        return not is_dense and layer % self.moe_layer_freq == 0


@dataclass(frozen=True)
class Multipliers:
    """What Granite multiplies with, each positive: embeddings, the output of attention and MLP,
    and scores. Logits are divided by logits_scaling. Raises ValueError.
    """

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # in the place of 1 / √D
    logits_scaling: float = 1.0

    def __post_init__(self):
        check_positive(**vars(self))
