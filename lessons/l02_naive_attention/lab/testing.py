"""What tests of the batched sampler share: random rows, hostile ones, and rows whose random number
is chosen.
"""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_rows import SamplingBatch
from lessons.l02_naive_attention.random_streams import uniform
from lessons.l02_naive_attention.sampling import GREEDY, SamplingParams, draw, probabilities
from lessons.toolbox.measure.device import default_device

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
VOCAB = 67  # no multiple of a part
HIGHEST = 2**53 - 1  # the bits of the largest random number
# The bits of 0, the smallest above it, two in the middle, 1 - 2^-24 and the largest.
NUMBERS = [0, 1, 2**51 + 12345, 2**53 * 5 // 7, 2**53 - 2**29, HIGHEST]
MASK = 2**64 - 1


@dataclass
class Rows:
    """logits: [B, V] float32; a row's parameters, prompt and output; the bits of its number."""

    logits: Tensor
    params: list[SamplingParams]
    prompts: list[list[int]]
    outputs: list[list[int]]
    numbers: list[int]

    def batch(self, device: torch.device = DEVICE) -> SamplingBatch:
        """As it is sampled, with these very random numbers."""
        batch = SamplingBatch.of(self.params, self.prompts, self.outputs, device)
        pairs = zip(self.numbers, self.outputs)
        streams = [stream_of(bits, len(output)) for bits, output in pairs]
        batch.stream = torch.tensor(streams, dtype=torch.int64, device=device)
        return batch

    def expected(self) -> list[int]:
        """The specification's token of each row, -1 where its logits are no distribution."""
        tokens = []
        for row, bits in enumerate(self.numbers):
            logits, params = self.logits[row].float(), self.params[row]
            if not math.isfinite(logits.max()):
                tokens.append(-1)
                continue
            p = probabilities(logits, params, self.prompts[row], self.outputs[row])
            u = torch.tensor([bits * 2.0**-53], dtype=torch.float64)
            tokens.append(int(p.argmax() if params.temperature == 0 else draw(p, u)))
        return tokens


def stream_of(bits: int, drawn: int) -> int:
    """The stream whose number after `drawn` tokens is bits · 2^-53: SplitMix64 backwards."""
    x = _unshift(bits << 11, 31)
    x = _unshift(x * pow(0x94D049BB133111EB, -1, 2**64) & MASK, 27)
    x = _unshift(x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK, 30)
    x = (x - (drawn + 1) * 0x9E3779B97F4A7C15) & MASK
    return x - 2**64 if x >> 63 else x


def _unshift(x: int, bits: int) -> int:
    """What y was, if x = y ^ (y >> bits)."""
    y = x
    for _ in range(64 // bits):
        y = x ^ (y >> bits)
    return y


# ---------------------------------------------------------------- random rows

# No top_p is a quotient of small numbers: a row of ties would reach it exactly, or miss it by the
# last bit of a sum.
CHOICES = dict(
    temperature=[0, 0.31, 0.8, 1.7],
    top_k=[1, 3, 10, 50, 10**6],
    top_p=[0.9513, 0.6107, 0.0523, 1e-9, 1 - 1e-9],
    min_p=[0.0213, 0.3127, 1.0],
    repetition_penalty=[1.3, 0.7],
    presence_penalty=[0.9, -0.5],
    frequency_penalty=[0.4, -0.2],
)
KINDS = ("normal", "ties", "holes", "flat")


def random_rows(rows: int, vocab_size: int, kind: str, **fixed) -> Rows:
    """ "ties": few distinct logits; "holes": -inf among them; "flat": as of an untrained model."""
    logits = 2 * torch.randn(rows, vocab_size)
    if kind == "ties":
        logits = logits.round()
    if kind == "holes":
        holes = torch.rand(rows, vocab_size) < 0.6
        holes[range(rows), logits.argmax(dim=1)] = False
        logits[holes] = -torch.inf
    if kind == "flat":
        logits = 0.01 * logits
    off = SamplingParams()
    params = [
        SamplingParams(
            **{
                name: random.choice([getattr(off, name), random.choice(values)])
                for name, values in CHOICES.items()
            }
            | fixed
        )
        for _ in range(rows)
    ]
    prompts = [random.choices(range(vocab_size), k=random.randrange(9)) for _ in range(rows)]
    outputs = [random.choices(range(vocab_size), k=random.randrange(12)) for _ in range(rows)]
    numbers = [random.randrange(2**53) for _ in range(rows)]
    return Rows(logits, params, prompts, outputs, numbers)


# ---------------------------------------------------------------- hostile rows


def wave() -> Tensor:
    """[V] of a few distinct logits, some negative; the largest stands in two parts of 16."""
    x = (torch.arange(VOCAB) * 7 % 11 - 5).float()
    x[[20, 50]] = 6.0
    return x


def holes() -> Tensor:
    """[V]: whole parts of -inf, the first and the last among them."""
    x = wave()
    x[:33] = x[60:] = -torch.inf
    return x


ONE = torch.where(torch.arange(VOCAB) == 66, 0.0, -torch.inf)  # a single token, the last
FLAT = torch.zeros(VOCAB)
ZEROS = torch.where(torch.arange(VOCAB) % 2 == 0, -0.0, 0.0)  # equal, with unlike bits
FAR = torch.linspace(-3e38, 3e38, VOCAB)  # a difference overflows
FAINT = torch.where(torch.arange(VOCAB) == 40, 0.0, -27.0)  # 2^-39: a unit or two each
LESS = dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
HOSTILE: dict[str, tuple[Tensor, dict]] = {
    "all equal": (FLAT, {}),
    "all equal, top-k": (FLAT, dict(top_k=5)),
    "all equal, top-p": (FLAT, dict(top_p=0.4321)),
    "zeros with and without a sign": (ZEROS, dict(top_k=3, top_p=0.4321)),
    "holes": (holes(), {}),
    "holes, top-k beyond what is left": (holes(), dict(top_k=40)),
    "holes, top-p": (holes(), dict(top_p=0.8765)),
    "one token": (ONE, dict(top_p=0.5)),
    "one token, top-k": (ONE, dict(top_k=2)),
    "top-k is 1": (wave(), dict(top_k=1)),
    "top-k without ties": (wave(), dict(top_k=2, temperature=3.0)),
    "top-k ties across parts": (wave(), dict(top_k=7, temperature=3.0)),
    "top-k is the vocabulary": (wave(), dict(top_k=VOCAB, temperature=2.0)),
    "top-k is one fewer": (wave(), dict(top_k=VOCAB - 1, temperature=2.0)),
    "top-k above the vocabulary": (wave(), dict(top_k=2**31 - 1, top_p=0.9)),
    "top-p is tiny": (wave(), dict(top_p=1e-300)),
    "top-p leaves out almost nothing": (FAINT, dict(top_p=1 - 2.0**-40)),
    "top-p among ties": (wave(), dict(top_p=0.7777, temperature=4.0)),
    "top-p after top-k": (wave(), dict(top_p=0.5123, top_k=20, temperature=4.0)),
    "min-p is 1": (wave(), dict(min_p=1.0)),
    "min-p leaves fewer than top-k": (wave(), dict(min_p=0.3, top_k=60)),
    "min-p before top-p": (wave(), dict(min_p=0.02, top_p=0.6543, temperature=3.0)),
    "cold": (wave(), dict(temperature=1e-300, top_p=0.9)),
    "hot": (wave(), dict(temperature=1e4, top_k=9)),
    "far apart": (FAR, dict(top_p=0.9)),
    "faint": (FAINT, {}),
    "faint, top-k": (FAINT, dict(top_k=3)),
    "penalties": (wave(), dict(**LESS, temperature=2.0)),
    "penalties, top-p": (wave(), dict(**LESS, temperature=2.0, top_p=0.6789)),
    "penalties, greedy": (wave(), dict(**LESS, temperature=0)),
    "a bonus for what occurred": (wave(), dict(presence_penalty=-2, repetition_penalty=0.5)),
    "greedy among ties": (wave(), dict(temperature=0)),
    "greedy with cuts": (wave(), dict(temperature=0, top_k=3, top_p=0.5, min_p=0.5)),
}


def hostile_rows(name: str, numbers: list[int] | None = None) -> Rows:
    """Rows of one of HOSTILE, one for each number, with repeated tokens in prompt and output."""
    numbers = NUMBERS if numbers is None else numbers
    logits, settings = HOSTILE[name]
    prompt, output = [20, 20, 3, 66], [50, 50, 50, 3, 9]
    count = len(numbers)
    return Rows(
        logits.expand(count, -1).clone(),
        [SamplingParams(**settings)] * count,
        [prompt] * count,
        [output] * count,
        list(numbers),
    )


def mixed_rows() -> Rows:
    """Good and bad logits, greedy and drawn, with and without penalties, side by side."""
    logits = wave().expand(9, -1).clone()
    logits[1, 40], logits[2, 5], logits[4], logits[7, 66] = math.nan, math.inf, -math.inf, math.nan
    top_p = SamplingParams(top_p=0.6107, temperature=2.0)
    top_k = SamplingParams(top_k=4, **LESS)
    params = [
        GREEDY,
        GREEDY,
        top_p,
        top_p,
        top_k,
        top_k,
        SamplingParams(),
        SamplingParams(),
        GREEDY,
    ]
    return Rows(logits, params, [[3, 3, 20]] * 9, [[20, 50]] * 9, [2**52 + 99] * 9)


def check_numbers(batch: SamplingBatch, rows: Rows) -> None:
    """Raise unless the batch's random numbers are those that were chosen."""
    u = uniform(batch.stream, batch.drawn)
    assert (u * 2.0**53).long().tolist() == rows.numbers
