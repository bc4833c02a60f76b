"""Exercises of lesson 06: latent attention from its weights, a cache with absorbed weights, its
numbers, three bugs.
"""

import math

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.model.config import MLAConfig


@exercise("6.1", "Latent attention, from its weights", minutes=45, difficulty=3)
def latent_attention(
    x: Tensor,
    weights: dict[str, Tensor],
    mla: MLAConfig,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    factor: float = 1.0,
    mscale_all_dim: float = 0.0,
) -> Tensor:
    """One layer of DeepSeek-V2-Lite over a whole prompt, causal. x: [T, hidden] -> [T, hidden], of
    x's dtype.

    Sizes are fields of `mla`: rank = kv_lora_rank, nope = qk_nope_head_dim, rope =
    qk_rope_head_dim, v_dim = v_head_dim.
    weights, each [out, in] but for the norm:
        q_proj              [H · (nope + rope), hidden]   head by head: nope rows, then rope rows
        kv_a_proj_with_mqa  [rank + rope, hidden]         the latent, then the one rotary key that
                                                          all heads share
        kv_a_layernorm      [rank]                        RMSNorm of the latent: x / √(mean of x² +
                                                          1e-6) · weight
        kv_b_proj           [H · (nope + v_dim), rank]    head by head: k's nope rows, then v's rows
        o_proj              [hidden, H · v_dim]
    cos, sin: [T, rope / 2]. The rotary coordinates are in pairs: (2i, 2i + 1) turns by angle i, a →
    a cos − b sin and b → b cos + a sin.
    Scores are scaled by m² / √(nope + rope), m = 0.1 · mscale_all_dim · ln(factor) + 1 (1 for a
    factor of 1, or without mscale_all_dim). The arguments stay as they were. Errors: none to raise.
    `attention` (lesson 2, imported above) takes q, k:
    [T, H, D], v: [T, H, another D] and a softmax_scale.

    Example: hidden = rank = nope = v_dim = 1, rope = 2, H = 1, every weight 1, x = [[1], [1]],
    angles 0
        latents 1 and 1 (normed), k = [1, 1, 1] for both tokens, v = 1 and 1
            -> [[1], [1]], whatever the scale
    """
    rank, nope, rope, v_dim = (
        mla.kv_lora_rank,
        mla.qk_nope_head_dim,
        mla.qk_rope_head_dim,
        mla.v_head_dim,
    )

    # SOLUTION
    def rotated(pe: Tensor) -> Tensor:  # [T, heads, rope]
        a, b, c, s = pe[..., 0::2], pe[..., 1::2], cos[:, None], sin[:, None]
        return torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2)

    q = (x @ weights["q_proj"].T).unflatten(-1, (num_heads, nope + rope))
    q = torch.cat([q[..., :nope], rotated(q[..., nope:])], dim=-1)
    c_kv, k_pe = (x @ weights["kv_a_proj_with_mqa"].T).split([rank, rope], dim=-1)
    c_kv = (
        c_kv * torch.rsqrt(c_kv.square().mean(-1, keepdim=True) + 1e-6) * weights["kv_a_layernorm"]
    )
    k_nope, v = (
        (c_kv @ weights["kv_b_proj"].T)
        .unflatten(-1, (num_heads, nope + v_dim))
        .split([nope, v_dim], dim=-1)
    )
    k = torch.cat([k_nope, rotated(k_pe[:, None]).expand(-1, num_heads, -1)], dim=-1)
    m = 0.1 * mscale_all_dim * math.log(factor) + 1
    out = attention(q, k, v, m * m * (nope + rope) ** -0.5)
    return out.flatten(-2) @ weights["o_proj"].T
    # END


@exercise(
    "6.2",
    "A cache of latents with absorbed weights",
    minutes=45,
    difficulty=3,
    replaces="lessons.l06_mla.optimized:read_absorbed",
    through="reference.ladder.yours.latents:read_absorbed",
)
class AbsorbedCache:
    """Latents of one sequence, and attention that never expands them, whether one token comes or a
    few.

    The lesson's AbsorbedPool absorbs for a single new token only; this cache does for every pass:
    one token, a chunk, the prompt. It is smaller than the lesson's: q and k_pe come rotated, and it
    counts its own length. `model` is a DeepseekDecoder:
    model.layers[layer].self_attn.kv_b_proj.weight is W, [H · (nope + v_dim), rank], head by head
    W_UK's rows, then W_UV's; model.config.mla has the sizes, model.config.softmax_scale the scale.
    `absorb` and `project_values` of the lesson are what you write here, so they do not count as
    tools.

    Example: H = 1, nope = v_dim = rank = 1, rope = 2, W = [[2], [3]], softmax_scale = 1, cache
    empty
        attend(0, q = [[[5, 0, 0]]], k_pe = [[[7, 8]]], c_kv = [[[4]]])
        absorbed query [5 · 2, 0, 0], row [4, 7, 8], one key: its weight is 1, the latent 4,
            v = 3 · 4
            -> [[[12]]]
    """

    def __init__(self, model, capacity: int):
        self.model, self.config = model, model.config
        self.length = 0  # tokens that every layer holds, and so the next token's position
        self.rows = torch.empty(
            model.config.num_hidden_layers,
            capacity,
            model.config.mla.latent_dim,
            dtype=model.dtype,
            device=model.device,
        )

    def append(self, layer: int, k_pe: Tensor, c_kv: Tensor) -> int:
        """Write c_kv: [T, 1, rank] and k_pe: [T, 1, rope] into `rows`, [layers, capacity, rank +
        rope], the latent first.

        Returns how many rows `layer` holds now. The layers 0, 1, … of a pass append in this order,
        the same number of rows each; `length` moves once they all have. There is room: nothing has
        to grow.
        """
        # SOLUTION
        end = self.length + len(c_kv)
        self.rows[layer, self.length : end] = torch.cat([c_kv, k_pe], dim=-1)[:, 0]
        if layer == self.config.num_hidden_layers - 1:
            self.length = end
        return end
        # END

    def attend(self, layer: int, q: Tensor, k_pe: Tensor, c_kv: Tensor) -> Tensor:
        """Append, then let the T new tokens attend to all: q: [T, H, nope + rope], rotated -> [T,
        H, v_dim].

        Aim: no tensor with k or v of every head for all tokens. `attention_torch` (lesson 2,
        imported above) is bottom-right aligned and copies nothing for heads that share a KV head:
        q: [T, H, D], k: [end, 1, D], v: [end, 1, another D].
        """
        mla, weight = self.config.mla, self.model.layers[layer].self_attn.kv_b_proj.weight
        # SOLUTION
        end = self.append(layer, k_pe, c_kv)
        rows = self.rows[layer, :end, None]
        w_uk, w_uv = weight.unflatten(0, (q.shape[1], -1)).split(
            [mla.qk_nope_head_dim, mla.v_head_dim], dim=1
        )
        q_nope, q_pe = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        absorbed = torch.cat([torch.einsum("thn,hnr->thr", q_nope, w_uk), q_pe], dim=-1)
        out = attention_torch(
            absorbed, rows, rows[..., : mla.kv_lora_rank], self.config.softmax_scale
        )
        return torch.einsum("thr,hvr->thv", out, w_uv)
        # END


@exercise(
    "6.3", "Predict: bytes, intensity, and where absorbing stops paying", minutes=20, difficulty=2
)
def mla_numbers(
    num_hidden_layers: int,
    num_attention_heads: int,
    mla: MLAConfig,
    bytes_per_value: int,
    gqa_head_dim: int,
) -> tuple[float, float, float, float, float]:
    """Five numbers of a model with latent attention:

    1. KiB (1024 bytes) that a token leaves in a cache of latents, all layers.
    2. KiB that k and v of all heads would take, rotary part included.
    3. How many KV heads of gqa_head_dim a grouped-query model of as many layers could keep for the
       bytes of 1 (or a fraction).
    4. FLOPs of absorbed decode attention for each byte of latents read. A row is read once for all
       heads. Count q · row and weight · latent; a multiply and an add are two FLOPs. Leave out the
       products with W_UK and W_UV.
    5. From how many new tokens on absorbing costs more FLOPs than expanding the whole context. The
       context is so long that each new token sees nearly all of it. A fraction is fine, and so is
       the next whole number.
    Errors: none to raise.

    Example: 2 layers, 4 heads, rank 6, nope 2, rope 2, v_dim 2, 2 bytes, gqa_head_dim 2
        1: 2·(6 + 2)·2 = 32 B = 0.03125 KiB     2: 2·4·(4 + 2)·2 = 96 B = 0.09375 KiB     3: (6 + 2)
                                                / (2·2) = 2
        4: 4·2·(8 + 6) / (8·2) = 7
        5: expanding takes 6·(2 + 2) products a key, a pair 6 products or, absorbed, 14
            -> 24 / (14 − 6) = 3
    Write down your guess first: DeepSeek-V3 (61 layers, 128 heads, 512 / 128 / 64 / 128) in
    bfloat16, beside heads of 128.
    """
    # SOLUTION
    rank, nope, v_dim = mla.kv_lora_rank, mla.qk_nope_head_dim, mla.v_head_dim
    row = rank + mla.qk_rope_head_dim
    heads = num_attention_heads * (nope + mla.qk_rope_head_dim + v_dim)
    kib = num_hidden_layers * bytes_per_value / 1024
    flops_per_pair = {"expanded": nope + mla.qk_rope_head_dim + v_dim, "absorbed": row + rank}
    crossover = rank * (nope + v_dim) / (flops_per_pair["absorbed"] - flops_per_pair["expanded"])
    intensity = num_attention_heads * 2 * flops_per_pair["absorbed"] / (row * bytes_per_value)
    return row * kib, heads * kib, row / (2 * gqa_head_dim), intensity, crossover
    # END


@exercise("6.4", "Find the bugs: latents, token by token", minutes=25, difficulty=3)
def decode_tokens(
    q: Tensor, c_kv: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Absorbed attention over T tokens that come one by one, each after those before it. Returns
    [T, H, v_dim].

    Nothing is rotated yet: q: [T, H, nope + rope], k_pe: [T, rope]; c_kv: [T, rank] is normed.
    w_uk: [H, nope, rank], w_uv: [H, v_dim, rank]. cos, sin: [T, rope / 2], row t for the token at
    position t; `turn` rotates halves: coordinate i with i + rope / 2. Scores are scaled by 1 /
    √(nope + rope). The cache holds one row of rank + rope values a token: the latent, then the
    rotated key. The arguments stay as they were. Errors: none to raise.

    Example: T = 2, H = 1, nope = v_dim = rank = 1, rope = 2, all weights 1, q = 0, c_kv = [2, 4]:
    token 0 sees 2, token 1 sees
        2 and 4 with equal weights  -> [[[2]], [[3]]]

    The code below runs, and every shape in it is right. It has three bugs. Delete the line with
    `raise` and find them.
    """

    def turn(pe: Tensor, t: int) -> Tensor:  # [..., rope] at position t
        a, b = pe.chunk(2, dim=-1)
        return torch.cat([a * cos[t] - b * sin[t], b * cos[t] + a * sin[t]], dim=-1)

    nope, rank = w_uk.shape[1:]
    # SOLUTION
    rows, outs = c_kv.new_empty(0, rank + k_pe.shape[1]), []
    for t in range(len(q)):
        rows = torch.cat([rows, torch.cat([c_kv[t], turn(k_pe[t], t)])[None]])
        query = torch.cat(
            [torch.einsum("hn,hnr->hr", q[t, :, :nope], w_uk), turn(q[t, :, nope:], t)], dim=-1
        )
        scores = query @ rows.T * q.shape[-1] ** -0.5
        out = torch.softmax(scores, dim=-1) @ rows[:, :rank]
        outs.append(torch.einsum("hr,hvr->hv", out, w_uv))
    return torch.stack(outs)
    # STUB
    # rows, outs = c_kv.new_empty(0, rank + k_pe.shape[1]), []
    # for t in range(len(q)):
    #     rows = torch.cat([rows, torch.cat([c_kv[t], k_pe[t]])[None]])
    #     absorbed = torch.einsum("hn,hnr->hr", q[t, :, :nope], w_uk)
    #     query = torch.cat([absorbed, turn(q[t, :, nope:], t)], dim=-1)
    #     keys = torch.cat([rows[:, :rank], turn(rows[:, rank:], t)], dim=-1)
    #     scores = query @ keys.T * query.shape[-1] ** -0.5
    #     out = torch.softmax(scores, dim=-1) @ rows[:, -rank:]
    #     outs.append(torch.einsum("hr,hvr->hv", out, w_uv))
    # return torch.stack(outs)
    # END
