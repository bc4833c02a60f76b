"""Drafts that read the target's hidden states: Medusa's heads, and EAGLE's one layer.

Read `MedusaHeads`, then `EagleDraft`, then `Eagle3Draft`. All of them end in the target's own head,
so none has a vocabulary of its own. They belong to one set of target weights: `load_heads` refuses
another target's.

A *feature* is what the target computed for a token: for Medusa and EAGLE its hidden state behind the
last norm, for EAGLE-3 what stands behind several of its layers.

Sources: Cai et al. 2024, Medusa, section 2.1; Li et al. 2024, EAGLE, section 4; Li et al. 2025,
EAGLE-3, sections 3.1 and 3.2.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder, DecoderLayer, RMSNorm
from lessons.toolbox.model.arguments import check_whole, refuse
from lessons.toolbox.model.checkpoint import REPOSITORY
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError, read_json

SAMPLED_VALUES = 4096  # of each tensor, for the fingerprint


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


class MedusaHeads(nn.Module):
    """Head i turns the newest token's hidden state into that of i + 1 tokens later, so its
    prediction lies i + 1 tokens beyond the one of the target's own head.

    The paper gives each head a vocabulary matrix of its own. Ours end in the target's, because four
    more matrices would be larger than half of the model.
    """

    kind = "medusa"
    taps = ()  # the feature is the hidden state behind the last norm
    acceptance = None  # how often each guess was right, as best_tree wants it, if it was measured

    def __init__(self, hidden_size: int, count: int = 4):
        super().__init__()
        check_whole(hidden_size=hidden_size, count=count)
        # One block for each head. `[ResidualBlock(size)] * count` would be one block, count times.
        self.heads = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(count))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [N, hidden_size] -> [count, N, hidden_size], for the target's `logits`."""
        return torch.stack([head(hidden) for head in self.heads])

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments that make such heads, as config.json keeps them."""
        return dict(hidden_size=self.heads[0].linear.in_features, count=len(self.heads))

    @classmethod
    def for_target(cls, config: ModelConfig, sizes: dict[str, int]) -> "MedusaHeads":
        """Heads of these `sizes` for a target of this shape."""
        return cls(**sizes)


# ---------------------------------------------------------------- EAGLE


def one_layer(target: ModelConfig, intermediate_size: int) -> ModelConfig:
    """The shape of a draft of one layer with the target's heads and positions."""
    return replace(
        target,
        num_hidden_layers=1,
        intermediate_size=intermediate_size,
        sliding_windows=(),
        moe=None,
    )


class FeatureDraft(nn.Module):
    """What EAGLE and EAGLE-3 share: `taps`, where they read the target; `config`, the shape of their
    one layer; and three functions, `features`, `forward` and `hidden`.
    """

    config: ModelConfig
    acceptance = None  # as in MedusaHeads

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments beside the target's shape, as config.json keeps them."""
        return dict(intermediate_size=self.config.intermediate_size)

    @classmethod
    def for_target(cls, config: ModelConfig, sizes: dict[str, int]) -> "FeatureDraft":
        """A draft of these `sizes` for a target of this shape."""
        return cls(config, **sizes)


class EagleDraft(FeatureDraft):
    """One decoder layer that continues the target's features.

    At position i it gets the feature of token i and the embedding of token i + 1, which stands one
    place further: what was sampled there is known, and the feature alone cannot know it. It returns
    the feature that the target would have at token i + 1.
    """

    kind = "eagle"
    taps = ()

    def __init__(self, target: ModelConfig, intermediate_size: int):
        super().__init__()
        size = target.hidden_size
        self.config = one_layer(target, intermediate_size)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(self.config)

    def features(self, tapped: Tensor) -> Tensor:
        """What the layer gets of the target's features, [T, hidden_size]: they are taken as they are."""
        return tapped

    def forward(self, embeddings: Tensor, features: Tensor, attend: Callable) -> Tensor:
        """embeddings, features: [T, hidden_size] -> the next features: [T, hidden_size]."""
        return self.layer(self.fc(torch.cat([embeddings, features], dim=-1)), attend)

    def hidden(self, features: Tensor) -> Tensor:
        """What the target's head reads: [T, hidden_size], as `features`."""
        return features


class Eagle3Draft(FeatureDraft):
    """EAGLE with features of three depths of the target, and free to make features of its own.

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
        """Three features side by side become one. tapped: [T, 3 · hidden_size] -> [T, hidden_size]."""
        return self.fuse(tapped)

    def forward(self, embeddings: Tensor, features: Tensor, attend: Callable) -> Tensor:
        """embeddings, features: [T, hidden_size] -> the next features: [T, hidden_size]."""
        both = [self.embedding_norm(embeddings), self.feature_norm(features)]
        x = features + self.self_attn(torch.cat(both, dim=-1), attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def hidden(self, features: Tensor) -> Tensor:
        """What the target's head reads: [T, hidden_size], as `features`."""
        return self.norm(features)


def tap_depths(num_layers: int) -> tuple[int, int, int]:
    """Behind how many layers EAGLE-3 reads: low, in the middle, and at the end."""
    return max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers


Heads = MedusaHeads | EagleDraft | Eagle3Draft
KINDS = {kind.kind: kind for kind in (MedusaHeads, EagleDraft, Eagle3Draft)}


# ---------------------------------------------------------------- features


def tapped_features(model: Decoder, tokens: Tensor, attend, taps: tuple[int, ...]):
    """Run the target and keep what stands behind some depths. tokens: [T] -> hidden: [T,
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


# ---------------------------------------------------------------- files


def fingerprint(model: Decoder) -> str:
    """Sixteen hex digits that change with the target's weights, but not with the dtype that they
    are loaded in, if it is bfloat16 or wider.

    Of each tensor name, shape and at most 4096 values count, so a large model takes no longer.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"{name}{list(tensor.shape)}".encode())
        values = tensor.detach().flatten()
        values = values[:: -(-len(values) // SAMPLED_VALUES)].to(torch.bfloat16).cpu()
        digest.update(values.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def find_heads(name_or_path: str | os.PathLike) -> str:
    """The folder of shipped heads, from any working directory. Raises CheckpointError."""
    for folder in (os.fspath(name_or_path), str(REPOSITORY / name_or_path)):
        if os.path.isfile(os.path.join(folder, "config.json")):
            return folder
    raise CheckpointError(f"heads: got {name_or_path!r}; accepted: a folder with config.json")


def load_heads(name_or_path: str | os.PathLike, target: Decoder) -> Heads:
    """Heads from a folder, on the target's device and in its dtype.

    Raises CheckpointError, one line, for files that cannot be read, heads of another kind, of another
    target, or whose sizes or tensors do not fit.
    """
    from lessons.toolbox.model.stored import open_file  # here, because training alone needs no file

    folder = find_heads(name_or_path)
    config = read_json(Path(folder, "config.json"))
    if config.get("kind") not in tuple(KINDS):
        raise CheckpointError(
            f"kind in {folder}/config.json: got {config.get('kind')!r}; accepted: {', '.join(KINDS)}"
        )
    ours = fingerprint(target)
    if config.get("target_fingerprint") != ours:
        raise CheckpointError(
            f"heads: {folder} was trained for the target {config.get('target_fingerprint')}, and "
            f"this target is {ours}; accepted: heads of these very weights"
        )
    try:
        heads = KINDS[config["kind"]].for_target(target.config, config.get("sizes"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"sizes in {folder}/config.json: {error}") from error
    with open_file(Path(folder, "model.safetensors")) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = {name: tensor.shape for name, tensor in heads.state_dict().items()}
    if {name: tensor.shape for name, tensor in stored.items()} != wanted:
        raise CheckpointError(f"{folder}/model.safetensors: its tensors are not those of its sizes")
    heads.load_state_dict(stored)
    heads.acceptance = config.get("acceptance")
    return heads.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def save_heads(folder: str | os.PathLike, heads: Heads, facts: dict) -> None:
    """Write config.json (the kind, the sizes and `facts`) and the weights in bfloat16."""
    from safetensors.torch import save_file

    if "target_fingerprint" not in facts:
        refuse("facts", sorted(facts), "target_fingerprint among them")
    os.makedirs(folder, exist_ok=True)
    tensors = {name: x.to(torch.bfloat16).contiguous() for name, x in heads.state_dict().items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    config = dict(kind=heads.kind, sizes=heads.sizes, **facts)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(config, indent=2) + "\n")
