"""QAT and QLoRA on the embedded model, each in about a minute of one core: what a little training gives
back, or teaches, beside the same training without quantization.
"""

import copy
import importlib
from dataclasses import asdict
from functools import partial

import torch
from rich.progress import track
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l04_positions.lab.uptraining import next_token_loss, training_windows
from lessons.l18_weight_quantization.lab.quality import interval, predictions
from lessons.l18_weight_quantization.linear import dequantized, quantized
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest, to_nf4
from lessons.l18_weight_quantization.qat import finished, prepared
from lessons.l18_weight_quantization.qlora import adapters, merged, with_adapters

STEPS, ROWS = 12, 4  # steps of 4 windows
COARSE = partial(
    round_to_nearest, group_size=None
)  # INT4 with one scale a row: there is much to gain
QAT_RATE, LORA_RATE, LORA_WINDOW = 3e-4, 3e-3, 256


def trained(model: Decoder, weights: list[nn.Parameter], windows: Tensor, rate: float) -> None:
    """Next-token training of `weights` in place, ROWS windows a step; the rate falls to zero. windows:
    [N, T + 1] int64.
    """
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    steps = len(windows) // ROWS
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for rows in track(windows[: steps * ROWS].split(ROWS), "training", transient=True):
        for row in rows:
            (next_token_loss(model, row) / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


# ---------------------------------------------------------------- QAT


def count_qat(yardstick) -> dict:
    """INT4 with one scale a row: rounded at once, and rounded all through a short training. The same
    training without rounding is there too, because it alone may change the loss.
    """
    windows = training_windows(STEPS * ROWS)
    found = {"tokens": windows[:, 1:].numel(), "bits": 4, "learning_rate": QAT_RATE}

    def plainly_trained(model: Decoder) -> Decoder:
        model = copy.deepcopy(model).requires_grad_(True)
        trained(model, list(model.parameters()), windows, QAT_RATE)
        return model.requires_grad_(False)

    def trained_rounded(model: Decoder) -> Decoder:
        student = copy.deepcopy(prepared(model, COARSE)).requires_grad_(True)
        trained(student, list(student.parameters()), windows, QAT_RATE)
        return finished(student.requires_grad_(False), dequantize_matmul)

    after = plainly_trained(yardstick.model)
    models = {
        "trained": after,
        "rounded": rounded(yardstick.model),
        "trained_then_rounded": rounded(after),
        "qat": trained_rounded(yardstick.model),
    }
    for name, model in models.items():
        found[name] = yardstick.judge(model)
        print(name, found[name]["added_loss"], flush=True)
    return found


def rounded(model: Decoder) -> Decoder:
    return quantized(model, lambda _, linear: COARSE(linear.weight), dequantize_matmul)


# ---------------------------------------------------------------- QLoRA


def prose_windows(tokenizer, train: int, test: int) -> tuple[Tensor, Tensor]:
    """Windows of the help texts of Python's library, English prose, which the embedded model has never
    seen: [train, LORA_WINDOW + 1] and [test, LORA_WINDOW + 1] int64, of different texts.
    """
    topics = importlib.import_module("pydoc_data.topics").topics
    texts = [text for _, text in sorted(topics.items())]
    parts = [text for i, text in enumerate(texts) if i % 4], texts[::4]
    found = []
    for part, count in zip(parts, (train, test)):
        stream = torch.tensor(tokenizer("\n".join(part), verbose=False)["input_ids"])
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
    trained(student, learned, train, LORA_RATE)
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
