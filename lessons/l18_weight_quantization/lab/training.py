"""QAT and QLoRA on the embedded model, each in about a minute of one core: what a little training
gives back, and what it teaches.
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from rich.progress import track
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.l04_positions.lab.uptraining import next_token_loss, training_windows
from lessons.l18_weight_quantization.lab.quality import bits_per_weight, interval, predictions
from lessons.l18_weight_quantization.linear import dequantized, quantized
from lessons.l18_weight_quantization.methods.qat import RoundedLinear, finished, prepared
from lessons.l18_weight_quantization.methods.qlora import adapters, merged, with_adapters
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest, to_nf4

STEPS, ROWS = 20, 2  # steps of 2 windows
COARSE = partial(
    round_to_nearest, group_size=None
)  # INT4 with one scale a row: there is much to gain
QAT_RATE, LORA_RATE, LORA_WINDOW = 1.5e-4, 2e-3, 256


def trained(
    weights: list[nn.Parameter],
    windows: Tensor,
    rate: float,
    loss_of: Callable[[Tensor], Tensor],
) -> None:
    """Train `weights` in place, ROWS windows a step, with AdamW at a rate that falls to zero.
    windows: [N, T + 1] int64; loss_of: (window) -> a scalar.
    """
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    steps = len(windows) // ROWS
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for rows in track(windows[: steps * ROWS].split(ROWS), "training", transient=True):
        for row in rows:
            (loss_of(row) / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


# ---------------------------------------------------------------- QAT


def count_qat(yardstick) -> dict:
    """INT4 with one scale a row: rounded at once, and after the rounded model has learned to
    predict what the model in full precision predicts. Learning from the model rather than from the
    text shows what rounding costs alone: the model itself cannot get better by it.

    Source: Liu et al. 2023, LLM-QAT, section 3.1 (the loss).
    """
    windows = training_windows(STEPS * ROWS)
    teacher = yardstick.model
    student = copy.deepcopy(prepared(teacher, COARSE)).requires_grad_(True)

    def loss_of(window: Tensor) -> Tensor:
        [wanted] = [p.clone() for p in predictions(teacher, window[None])]  # no inference tensor
        found = logits_of(student, window[:-1]).log_softmax(-1)
        return (wanted.exp() * (wanted - found)).sum(-1).mean()

    learned = [part.weight for part in student.modules() if isinstance(part, RoundedLinear)]
    trained(learned, windows, QAT_RATE, loss_of)
    models = {
        "rounded": quantized(teacher, lambda _, x: COARSE(x.weight), dequantize_matmul),
        "qat": finished(student.requires_grad_(False), dequantize_matmul),
    }
    found = {"tokens": windows[:, 1:].numel(), "learning_rate": QAT_RATE}
    found["bits"] = bits_per_weight(models["qat"])
    for name, model in models.items():
        found[name] = yardstick.judge(model)
        print(name, found[name]["added_loss"], flush=True)
    return found


def logits_of(model: Decoder, tokens: Tensor) -> Tensor:
    """tokens: [T] -> [T, V]."""
    return model.logits(model(tokens, whole_sequence(model, len(tokens), attention_torch)))


# ---------------------------------------------------------------- QLoRA


def prose_windows(tokenizer, train: int, test: int) -> tuple[Tensor, Tensor]:
    """Windows of the help texts of Python's library, English prose, which the embedded model has
    never seen: [train, LORA_WINDOW + 1] and [test, LORA_WINDOW + 1] int64, of different texts.
    """
    topics = importlib.import_module("pydoc_data.topics").topics
    texts = [text for _, text in sorted(topics.items())]
    parts = [text for i, text in enumerate(texts) if i % 4], texts[::4]
    found = []
    for part, count in zip(parts, (train, test)):
        quiet = dict(add_special_tokens=False, verbose=False)  # longer than a context
        stream = torch.tensor(tokenizer("\n".join(part), **quiet)["input_ids"])
        starts = torch.linspace(0, len(stream) - LORA_WINDOW - 1, count).long()
        found.append(stream[starts[:, None] + torch.arange(LORA_WINDOW + 1)])
    return found[0][torch.randperm(train, generator=torch.Generator().manual_seed(0))], found[1]


def count_qlora(yardstick) -> dict:
    """An NF4 model learns another kind of text through its adapters, which are then merged: into 16
    bits, and into NF4 again.
    """
    torch.manual_seed(0)
    train, test = prose_windows(yardstick.tokenizer, 2 * STEPS * ROWS, 24)

    def to_4_bits(_: str, linear: nn.Linear):
        return to_nf4(linear.weight)

    base = quantized(yardstick.model, to_4_bits, dequantize_matmul)
    student = with_adapters(base)
    learned = adapters(student)
    trained(learned, train, LORA_RATE, lambda window: next_token_loss(student, window))
    student.requires_grad_(False)
    one = merged(student)
    models = {
        "float": yardstick.model,
        "nf4": dequantized(base),
        "adapted": student,
        "merged": one,
        "merged_bf16": copy.deepcopy(one).bfloat16().float(),
        "merged_nf4": dequantized(quantized(one, to_4_bits, dequantize_matmul)),
    }
    found = {
        "tokens": train[:, 1:].numel(),
        "test_tokens": test[:, 1:].numel(),
        "learned": sum(weight.numel() for weight in learned),
        "weights": sum(weight.numel() for weight in yardstick.model.layers.parameters()),
        "rank": len(learned[0]),
        "learning_rate": LORA_RATE,
    }
    for name, model in models.items():
        found[name] = asdict(interval(losses(model, test)))
        print(name, found[name], flush=True)
    return found


def losses(model: Decoder, windows: Tensor) -> Tensor:
    """The loss of each window, [N] float64."""
    rows = zip(windows, predictions(model, windows))
    return torch.stack([-p.gather(1, row[1:, None]).mean() for row, p in rows]).double()
