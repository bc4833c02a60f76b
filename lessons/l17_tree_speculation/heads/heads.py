"""Drafts that read the target's hidden states: Medusa's heads, and one layer of EAGLE or MTP.

Read `MedusaHeads`, then `EagleDraft`, then `MTPDraft`; `Eagle3Draft` is for MORE.md. All of them
end in the target's own head, or in some of its rows (small_head.py). They belong to one set of
target weights (heads_files.py; mtp_files.py for an MTP layer that a checkpoint of a model has).

A *feature* is what the target computed for a token: its hidden state after the last norm, and for
EAGLE-3 the outputs of several of its layers.

Sources: Cai et al. 2024, Medusa, section 2.1; Li et al. 2024, EAGLE, section 4; DeepSeek-V3 (2024,
arXiv 2412.19437), section 2.2; Li et al. 2025, EAGLE-3, sections 3.1 and 3.2.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder, DecoderLayer, RMSNorm
from lessons.l17_tree_speculation.heads.small_head import SmallHead
from lessons.toolbox.model.arguments import check_whole
from lessons.toolbox.model.config import ModelConfig


class DraftHeads(nn.Module):
    """What all of them share. taps: where they read the target; (): the feature is the hidden state
    after the last norm. lm_head: None where they end in the target's. acceptance: how often each
    guess was right, as best_tree wants it; None if it was never measured.
    """

    kind: str
    taps: tuple[int, ...] = ()
    acceptance = None

    def __init__(self):
        super().__init__()
        self.lm_head: SmallHead | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments of `for_target`, as config.json keeps them."""
        small = {} if self.lm_head is None else dict(draft_vocab_size=len(self.lm_head.ids))
        return self.own_sizes | small

    @classmethod
    def for_target(cls, config: ModelConfig, sizes: dict[str, int]) -> "Heads":
        """Heads of these `sizes` for a target of this shape."""
        own = dict(sizes)
        count = own.pop("draft_vocab_size", None)
        heads = cls.of_sizes(config, own)
        if count is not None:
            heads.lm_head = SmallHead(config.vocab_size, config.hidden_size, count)
        return heads


# ---------------------------------------------------------------- Medusa


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b). Zeros at first, so that a new head begins as the target's own head."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size] -> [..., hidden_size]
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(DraftHeads):
    """Head i turns the newest token's hidden state into that of i + 1 tokens later, so its
    prediction is i + 1 tokens beyond that of the target's own head.

    The paper gives each head its own vocabulary matrix. Ours end in the target's, because four
    more matrices would be larger than half of the model.
    """

    kind = "medusa"

    def __init__(self, hidden_size: int, count: int = 4):
        super().__init__()
        check_whole(hidden_size=hidden_size, count=count)
        # One block for each head. `[ResidualBlock(size)] * count` would be one block, count times.
        self.heads = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(count))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [N, hidden_size] -> [count, N, hidden_size], for the target's `logits`."""
        return torch.stack([head(hidden) for head in self.heads])

    @property
    def own_sizes(self) -> dict[str, int]:
        """The arguments that make such heads."""
        return dict(hidden_size=self.heads[0].linear.in_features, count=len(self.heads))

    @classmethod
    def of_sizes(cls, config: ModelConfig, sizes: dict[str, int]) -> "MedusaHeads":
        """The target's shape says nothing that `sizes` do not say."""
        return cls(**sizes)


# ---------------------------------------------------------------- EAGLE


def one_layer(target: ModelConfig, intermediate_size: int) -> ModelConfig:
    """The shape of a draft of one layer with the target's heads and positions."""
    return replace(
        target,
        num_hidden_layers=1,
        intermediate_size=intermediate_size,
        tie_word_embeddings=False,  # because a draft has neither of the two matrices
        sliding_windows=(),
        no_rope_layers=(),
        moe=None,
    )


class FeatureDraft(DraftHeads):
    """What EAGLE, MTP and EAGLE-3 share: `config`, the shape of their one layer, and three
    functions, `features`, `forward` and `hidden`.
    """

    config: ModelConfig

    def features(self, tapped: Tensor) -> Tensor:
        """What `forward` gets of the target's features. tapped: [T, F] -> [T, hidden_size]. Those
        of the last norm are taken as they are.
        """
        return tapped

    def forward(self, embeddings: Tensor, features: Tensor, attend: Callable) -> Tensor:
        """embeddings, features: [T, hidden_size] -> the next features: [T, hidden_size]."""
        raise NotImplementedError

    def hidden(self, features: Tensor) -> Tensor:
        """What the target's head reads of the features that `forward` made: both [T,
        hidden_size].
        """
        return features

    @property
    def own_sizes(self) -> dict[str, int]:
        """The arguments beside the target's shape."""
        return dict(intermediate_size=self.config.intermediate_size)

    @classmethod
    def of_sizes(cls, config: ModelConfig, sizes: dict[str, int]) -> "FeatureDraft":
        """A draft for a target of this shape."""
        return cls(config, **sizes)


class EagleDraft(FeatureDraft):
    """One decoder layer that continues the target's features.

    At position i it gets the feature of token i and the embedding of token i + 1, which is one
    place further: what was sampled there is known, and the feature alone cannot know it. It returns
    the feature that the target would have at token i + 1.
    """

    kind = "eagle"

    def __init__(self, target: ModelConfig, intermediate_size: int):
        super().__init__()
        size = target.hidden_size
        self.config = one_layer(target, intermediate_size)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(self.config)

    def forward(self, embeddings: Tensor, features: Tensor, attend: Callable) -> Tensor:
        x = self.fc(torch.cat([embeddings, features], dim=-1))
        return self.layer(x, attend)


class MTPDraft(FeatureDraft):
    """DeepSeek-V3's module for multi-token prediction: EAGLE's pairs, with three norms.

    Embeddings and features differ in magnitude, so each half of the pair has a norm of its own.
    The last norm makes of the layer's output what the target's last norm makes of its own: the
    shared head reads it, and so does this module when it is applied again for a further token.

    Published modules were trained with the target, from the start. `layer` is then one more layer
    of the target (latent attention, experts), and the target's features have learned to be useful
    two tokens ahead. layer: None for a plain one, whose MLP has `intermediate_size` rows.
    """

    kind = "mtp"

    def __init__(
        self, target: ModelConfig, intermediate_size: int, layer: DecoderLayer | None = None
    ):
        super().__init__()
        size, eps = target.hidden_size, target.rms_norm_eps
        self.config = one_layer(target, intermediate_size)
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = layer or DecoderLayer(self.config)
        self.norm = RMSNorm(size, eps)

    def forward(self, embeddings: Tensor, features: Tensor, attend: Callable) -> Tensor:
        # The embedding first, as eh_proj is named and stored. The report prints it second.
        both = [self.enorm(embeddings), self.hnorm(features)]
        x = self.eh_proj(torch.cat(both, dim=-1))
        return self.norm(self.layer(x, attend))


class Eagle3Draft(FeatureDraft):
    """EAGLE with features of three depths of the target, and free to make its own features.

    EAGLE must imitate the target's features, although only the tokens count. EAGLE-3 is trained on
    tokens alone, and on its own features, so that it meets in training what it meets in drafting.
    """

    kind = "eagle3"

    def __init__(self, target: ModelConfig, intermediate_size: int):
        super().__init__()
        size, eps, count = target.hidden_size, target.rms_norm_eps, target.num_hidden_layers
        self.config = one_layer(target, intermediate_size)
        self.taps = tap_depths(count)
        self.fuse = nn.Linear(len(self.taps) * size, size, bias=False)
        self.embedding_norm = RMSNorm(size, eps)
        self.feature_norm = RMSNorm(size, eps)
        # The layer reads both, side by side, so its projections are twice as wide.
        self.self_attn = Attention(replace(self.config, hidden_size=2 * size))
        heads = self.config.num_attention_heads * self.config.head_dim
        self.self_attn.o_proj = nn.Linear(heads, size, bias=self.config.o_bias)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(self.config)
        self.norm = RMSNorm(size, eps)

    def features(self, tapped: Tensor) -> Tensor:
        """Three features side by side become one. tapped: [T, 3 · hidden_size]."""
        return self.fuse(tapped)

    def forward(self, embeddings: Tensor, features: Tensor, attend: Callable) -> Tensor:
        both = [self.embedding_norm(embeddings), self.feature_norm(features)]
        x = features + self.self_attn(torch.cat(both, dim=-1), attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def hidden(self, features: Tensor) -> Tensor:
        return self.norm(features)


def tap_depths(num_layers: int) -> tuple[int, int, int]:
    """After how many layers EAGLE-3 reads: low, in the middle, and at the end."""
    return max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers


Heads = MedusaHeads | EagleDraft | MTPDraft | Eagle3Draft
KINDS = {kind.kind: kind for kind in (MedusaHeads, EagleDraft, MTPDraft, Eagle3Draft)}


# ---------------------------------------------------------------- features


def tapped_features(model: Decoder, tokens: Tensor, attend, taps: tuple[int, ...]):
    """Run the target and keep the outputs of some depths. tokens: [T] -> hidden: [T,
    hidden_size], features: [T, F].

    taps: numbers of layers; (): the feature is `hidden` itself.
    """
    if not taps:
        hidden = model(tokens, attend)
        return hidden, hidden
    x, kept, begin = model.embed_tokens(tokens), [], 0
    for depth in taps:
        if depth > begin:  # a small model is read twice at one depth
            x = model.run_layers(x, attend, range(begin, depth))
        # A copy, because a fused decoder adds the next layers to x in place.
        kept.append(x.clone())
        begin = depth
    if begin < len(model.layers):
        x = model.run_layers(x, attend, range(begin, len(model.layers)))
    return model.norm(x), torch.cat(kept, dim=-1)
