"""What a change of a model costs in quality, beside the model as it was, with confidence intervals.

    python -m reference.checkpoints.quality MODEL --reference MODEL

Five measures, because no single one tells everything:

- loss: nats a token on held-out code. Perplexity is exp(loss).
- added loss: the loss minus the reference's on the same tokens. The paired difference is known more
  exactly than the loss itself, because a hard text is hard for both.
- kl: how far the predicted distributions are from the reference's, KL(reference ‖ model) in nats.
  It sees changes that the loss does not, because errors that help and errors that hurt do not
  cancel.
- flips: the share of positions at which a different token is the likeliest one.
- agreement: the share of a greedy answer before its first token that differs from the reference's.

An interval holds the middle 95 % of the means that resampled windows give (Efron 1979). It says how
much the choice of the text matters, nothing about other kinds of text.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.generate import Rung, generate
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.toolbox.model.arguments import check_whole, refuse
from lessons.toolbox.model.corpus import corpus

WINDOWS, WINDOW = 24, 512  # of held-out text
PROMPTS, PROMPT, NEW_TOKENS = 12, 64, 32  # greedy answers after the beginnings of windows
SAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True)
class Interval:
    """A mean over windows, and the 95 % interval of its bootstrap."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Quality:
    """What `quality` finds. The reference itself has no added loss, no KL and no flips."""

    loss: Interval
    perplexity: Interval
    added_loss: Interval
    kl: Interval
    flips: Interval
    agreement: Interval


# ---------------------------------------------------------------- text and predictions


def held_out_windows(tokenizer, count: int = WINDOWS, length: int = WINDOW) -> Tensor:
    """Windows spread evenly over the modules of Python's library that the embedded models never
    saw: [count, length + 1] int64. Each module begins as the tokenizer begins a text.
    """
    check_whole(count=count, length=length)
    # not verbose, because whole modules are longer than a context
    parts = (tokenizer(text, verbose=False)["input_ids"] for text in corpus()[1])
    stream = torch.tensor([token for part in parts for token in part])
    if count * (length + 1) > len(stream):
        refuse("count", count, f"at most {len(stream) // (length + 1)} windows of {length} tokens")
    starts = torch.linspace(0, len(stream) - length - 1, count).long()
    return stream[starts[:, None] + torch.arange(length + 1)]


@torch.inference_mode()
def predictions(model: Decoder, windows: Tensor) -> Iterator[Tensor]:
    """The log-probabilities of every next token: [length, V] float32 for each window of [length +
    1] tokens.
    """
    windows = windows.to(model.device)
    attend = whole_sequence(model, windows.shape[1] - 1, attention_torch)
    for window in windows:
        logits = model.logits(model(window[:-1], attend))
        yield logits.float().log_softmax(-1)


def greedy_answers(model: Decoder, windows: Tensor, rung: Rung = PREALLOCATED) -> list[list[int]]:
    """NEW_TOKENS likeliest tokens after the first PROMPT tokens of the first PROMPTS windows.
    windows: [count, length + 1] int64.
    """
    prompts = windows[:PROMPTS, :PROMPT].tolist()
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    return generate(model, prompts, NEW_TOKENS, greedy, rung=rung)


def bits_per_weight(model: nn.Module) -> float:
    """Stored bits a weight, over the matrices of the linear layers, scales and all; lm_head, which
    is left as it is, does not count.
    """
    bits = numbers = 0
    for name, part in model.named_modules():
        if isinstance(part, QuantizedLinear):
            bits, numbers = (
                bits + 8 * part.quantized.nbytes,
                numbers + math.prod(part.quantized.shape),
            )
        elif isinstance(part, nn.Linear) and name != "lm_head":
            bits, numbers = bits + 8 * part.weight.nbytes, numbers + part.weight.numel()
    return bits / numbers


# ---------------------------------------------------------------- measures


def quality(
    model: Decoder,
    windows: Tensor,
    reference: Iterable[Tensor],
    answers: list[list[int]] | None = None,
    rung: Rung = PREALLOCATED,
) -> Quality:
    """windows: [count, length + 1] int64; reference: `predictions` of the reference, one a window,
    kept in a list or made while it is read; answers: its `greedy_answers`. Without answers the
    agreement is that of a model with itself, 1. rung: how greedy answers are generated.
    """
    rows = []
    for window, found, wanted in zip(windows, predictions(model, windows), reference, strict=True):
        token = window[1:, None].to(found.device)
        loss, base = (-x.gather(1, token).mean() for x in (found, wanted))
        kl = (wanted.exp() * (wanted - found)).sum(-1).mean()
        flips = (found.argmax(-1) != wanted.argmax(-1)).float().mean()
        rows.append(torch.stack([loss, loss - base, kl, flips]).double().cpu())
    loss, added, kl, flips = torch.stack(rows, dim=1)
    shares = [1.0]
    if answers is not None:
        shares = [agreed(*two) for two in zip(greedy_answers(model, windows, rung), answers)]
    losses = interval(loss)
    return Quality(
        losses,
        Interval(*(math.exp(x) for x in (losses.mean, losses.low, losses.high))),
        interval(added),
        interval(kl),
        interval(flips),
        interval(torch.tensor(shares, dtype=torch.float64)),
    )


def agreed(answer: list[int], wanted: list[int]) -> float:
    """The share of an answer before its first token that is not the wanted one."""
    same = [a == b for a, b in zip(answer, wanted)]
    return (same.index(False) if False in same else len(same)) / len(wanted)


def interval(values: Tensor) -> Interval:
    """The mean of values: [N] float64, one a window, and the middle 95 % of the means of N values
    drawn from them with replacement.
    """
    generator = torch.Generator().manual_seed(0)  # the same windows are drawn for every model
    drawn = torch.randint(len(values), (SAMPLES, len(values)), generator=generator)
    low, high = values[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval(float(values.mean()), float(low), float(high))


def table(found: Quality) -> str:
    """One line a measure."""
    return "\n".join(
        f"{name:12} {value['mean']:.4f}  ({value['low']:.4f} … {value['high']:.4f})"
        for name, value in asdict(found).items()
    )
