"""A little more training for a changed model: the embedded model learns to live with another way to
tell positions, or (in lesson 5) with fewer KV heads.

It goes on with the text that models.train trained on, in windows of the same length, so that what a
change costs can be told from what it costs before the model has got used to it.

Source: the procedure of Ainslie et al. 2023, GQA, section 2.1, which they call uptraining.
"""

import copy
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.l04_positions.alibi import alibi_bias, alibi_slopes
from lessons.toolbox.model.corpus import corpus, token_stream

WINDOW = 512  # tokens of context, as in most of the model's training
ROWS, LEARNING_RATE = 4, 1e-3
AttendOver = Callable[[Decoder, int], Attend]  # (model, tokens) -> how they attend

# ---------------------------------------------------------------- text


def windows(texts: list[str], count: int) -> Tensor:
    """`count` windows, spread evenly over the tokens of the texts: [count, WINDOW + 1] int64."""
    stream = torch.from_numpy(token_stream(texts))
    starts = torch.linspace(0, len(stream) - WINDOW - 1, count).long()
    return stream[starts[:, None] + torch.arange(WINDOW + 1)]


def held_out_windows(count: int) -> Tensor:
    """Windows of the modules of Python's library that models.train never trains on: [count,
    WINDOW + 1] int64.
    """
    return windows(corpus()[1], count)


def training_windows(count: int) -> Tensor:
    """Windows of a random sample of the modules that models.train does train on: [count, WINDOW
    + 1] int64.
    """
    texts = random.Random(0).sample(corpus()[0], 200)
    return windows(texts, count)[torch.randperm(count, generator=torch.Generator().manual_seed(0))]


# ---------------------------------------------------------------- two ways to tell positions


def rotated(model: Decoder, num_tokens: int) -> Attend:
    """One sequence whose q and k are rotated, as the model was trained."""
    return whole_sequence(model, num_tokens, attention_torch)


def biased(model: Decoder, num_tokens: int) -> Attend:
    """One sequence whose q and k are left alone, and whose scores get ALiBi's bias."""
    config = model.config
    slopes = alibi_slopes(config.num_attention_heads)
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    bias = alibi_bias(slopes, num_tokens, num_tokens).masked_fill(future, -torch.inf)
    bias = bias.to(model.device, model.dtype)  # [Hq, T, T]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
        out = torch.nn.functional.scaled_dot_product_attention(
            *by_head, attn_mask=bias, scale=config.softmax_scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return attend


# ---------------------------------------------------------------- training


def next_token_loss(model: Decoder, window: Tensor, attend_over: AttendOver = rotated) -> Tensor:
    """Mean loss of predicting each next token, in nats: a scalar. window: [T + 1] int64."""
    hidden = model(window[:-1], attend_over(model, len(window) - 1))
    return torch.nn.functional.cross_entropy(model.logits(hidden), window[1:])


def uptrained(
    model: Decoder, train: Tensor, at: list[int], attend_over: AttendOver = rotated
) -> Iterator[tuple[int, Decoder]]:
    """Train all weights of a copy on train: [N, T + 1], ROWS windows a step; yields (tokens seen,
    model) after the steps `at`.
    """
    model = copy.deepcopy(model).requires_grad_(True)  # because variants may share weights
    steps = len(train) // ROWS
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 5, (steps - step) / (0.5 * steps))
    )
    for step, rows in enumerate(train[: steps * ROWS].split(ROWS), 1):
        for row in rows:
            (next_token_loss(model, row, attend_over) / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step in at:
            yield step * ROWS * (train.shape[1] - 1), model
