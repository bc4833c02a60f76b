"""A vision transformer and the projector behind it: a picture becomes rows that a decoder reads in
the place of tokens.

    Eyes(config)(pixels: [B, 3, S, S]) -> [B, N, text_size]    N: places of a picture in a prompt

Read it from the bottom up: Eyes, Projector, Tower, Block, Attention. Parameters carry the names of
Hugging Face's LLaVA checkpoints. Unlike the decoder's, this attention has no mask, because a
picture is all there at once, and no cache, because it never grows.

Sources: ViT (Dosovitskiy et al. 2021, section 3.1), CLIP (Radford et al. 2021), LLaVA 1.5 (Liu et
al. 2024: features of a late layer without the class token, a projector of two layers).
"""

import torch
from torch import Tensor, nn

from reference.vision.config import VisionConfig


class Attention(nn.Module):
    """Every patch looks at every patch."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:  # [B, P, hidden_size] -> [B, P, hidden_size]
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, P, D]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(-2))


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU. x: [..., N] -> [..., N]."""
    return x * torch.sigmoid(1.702 * x)


class MLP(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = quick_gelu if config.hidden_act == "quick_gelu" else nn.functional.gelu

    def forward(self, x: Tensor) -> Tensor:  # [B, P, hidden_size] -> [B, P, hidden_size]
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Embeddings(nn.Module):
    """A picture as a sequence: its patches, each multiplied by one matrix, behind a class token."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        self.class_embedding = nn.Parameter(torch.zeros(size))
        # A convolution whose stride is its width is a matrix product with each patch.
        self.patch_embedding = nn.Conv2d(3, size, patch, stride=patch, bias=False)
        self.position_embedding = nn.Embedding(config.num_patches + 1, size)

    def forward(
        self, pixels: Tensor
    ) -> Tensor:  # [B, 3, S, S] -> [B, 1 + num_patches, hidden_size]
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(pixels), 1, -1)
        return torch.cat([first, patches], dim=1) + self.position_embedding.weight


class Encoder(nn.Module):
    """The list of layers; a module of its own, because the checkpoints' names say so."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))


class Tower(nn.Module):
    """CLIP's vision transformer, as far as LLaVA needs it."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.pre_layrnorm = nn.LayerNorm(
            config.hidden_size, config.layer_norm_eps
        )  # as CLIP spells
        self.encoder = Encoder(config)
        # For the class token, which LLaVA does not ask; the checkpoints hold it.
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:  # [B, 3, S, S] -> [B, N, hidden_size]
        x = self.pre_layrnorm(self.embeddings(pixels))
        for layer in self.encoder.layers[: self.config.feature_layer]:
            x = layer(x)
        return x if self.config.keeps_class else x[:, 1:]


class Projector(nn.Module):
    """From the tower's width to the decoder's, patch by patch."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        size, bias = config.text_size, config.projector_bias
        self.linear_1 = nn.Linear(config.hidden_size, size, bias=bias)
        self.linear_2 = nn.Linear(size, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, N, hidden_size] -> [B, N, text_size]
        return self.linear_2(nn.functional.gelu(self.linear_1(x)))


class Eyes(nn.Module):
    """Tower and projector. config: of both."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.vision_tower = Tower(config)
        self.multi_modal_projector = Projector(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: [B, 3, S, S], normalized -> [B, N, text_size], one row a place in the prompt."""
        return self.multi_modal_projector(self.vision_tower(pixels))

    @property
    def device(self) -> torch.device:
        return self.multi_modal_projector.linear_2.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.multi_modal_projector.linear_2.weight.dtype
