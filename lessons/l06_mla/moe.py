"""A mixture of experts in place of an MLP: a router chooses a few MLPs for each token, and only
those run.

Nothing here depends on attention; DeepSeek, Mixtral, Qwen's mixtures and GLM-4.5 need it to be
loaded at all.
A readable loop over experts, not a fast one: each expert gathers its tokens, runs, and adds its
share. Lesson 23 runs all of them at once, and spreads them over devices.

Sources: DeepSeekMoE (Dai et al. 2024, section 3): shared experts; DeepSeek-V2 (2024, section
2.2.2): choice limited to groups; DeepSeek-V3 (2024, section 2.1.2): sigmoid scores, and a bias that
balances the load without an auxiliary loss; Mixtral of Experts (Jiang et al. 2024, section 2.1).
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Decoder, DecoderLayer
from lessons.toolbox.model.config import ModelConfig, MoEConfig


class Router(nn.Module):
    """Which experts each token goes to, and with which weights: x: [T, hidden_size] -> ([T, k],
    [T, k] int64).
    """

    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(config.n_routed_experts, hidden_size).normal_(std=hidden_size**-0.5)
        )
        if config.topk_method == "noaux_tc":
            self.e_score_correction_bias = nn.Parameter(torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config, logits = self.config, self.logits(x)
        wide = logits.dtype
        # [T, E]
        scores = logits.sigmoid() if config.scoring_func == "sigmoid" else logits.softmax(-1)
        # The bias decides who is chosen and never enters the weights: it moves load between
        # experts, not the output's size.
        merit = (
            scores + self.e_score_correction_bias.to(wide)
            if config.topk_method == "noaux_tc"
            else scores
        )
        if config.topk_method != "greedy":
            merit = merit.masked_fill(~self.in_best_groups(merit), -torch.inf)
        chosen = merit.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, chosen

    def logits(self, x: Tensor) -> Tensor:
        """How well each expert suits each token: [T, hidden_size] -> [T, E], float32 at least,
        because 16 bits would tie experts whose scores are close together.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ self.weight.to(wide).T

    def in_best_groups(self, merit: Tensor) -> Tensor:
        """Which experts belong to a token's best topk_group groups: [T, E] -> [T, E] bool.

        A group counts as its best expert in V2, as the sum of its best two in V3.
        """
        # [T, groups, E / groups]
        groups = merit.unflatten(-1, (self.config.n_group, -1))
        # [T, groups]
        best = groups.topk(2 if self.config.topk_method == "noaux_tc" else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
            -1, best.topk(self.config.topk_group, dim=-1).indices, True
        )
        return kept.repeat_interleave(self.config.group_size, dim=-1)


class WeighedMLP(MLP):
    """A shared expert whose output each token weighs by a sigmoid of its own: Qwen2-MoE's and
    Qwen3-Next's.
    """

    def __init__(self, config: ModelConfig, intermediate_size: int):
        super().__init__(config, intermediate_size)
        self.output_gate = nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return (x @ self.output_gate.T).sigmoid() * super().forward(x)


def new_shared_experts(config: ModelConfig) -> MLP | None:
    """What every token passes: the shared experts side by side, one that is weighed, or None."""
    moe = config.moe
    kind = MLP if moe.shared_expert_intermediate_size is None else WeighedMLP
    return kind(config, moe.shared_width) if moe.shared_width else None


class MoE(nn.Module):
    """Routed experts, and shared ones that every token passes. Parameters are named as in the
    checkpoints on the hub.
    """

    waits_for_values = True  # Python asks which experts were chosen, so no CUDA graph records it

    def __init__(self, config: ModelConfig):
        super().__init__()
        moe = config.moe
        self.gate = Router(config.hidden_size, moe)
        self.experts = nn.ModuleList(
            MLP(config, moe.moe_intermediate_size) for _ in range(moe.n_routed_experts)
        )
        self.shared_experts = new_shared_experts(config)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.gate(x)
        out = torch.zeros_like(x) if self.shared_experts is None else self.shared_experts(x)
        # only experts that some token chose: their weights are all that is read
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            out.index_add_(
                0,
                token,
                (self.experts[index](x[token]) * weights[token, place, None]).to(out.dtype),
            )
        return out


class MoEDecoder(Decoder):
    """Mixtral, Qwen2- and Qwen3-MoE, GLM-4.5: lesson 2's decoder, with experts in place of the MLP
    of most layers.
    """

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.moe is None or config.mla is not None or config.attention_sinks:
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one with moe, without "
                "mla and attention_sinks (others: load_decoder of lessons.l06_mla.deepseek)"
            )
        return DecoderLayer(config, mlp=MoE(config) if config.moe.has_experts(index) else None)
