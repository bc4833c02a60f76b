"""From logits to the next token: temperature, top-k, top-p, min-p, penalties, seeds.

Read `probabilities` first: it is the whole of sampling, one row at a time. `sample` draws from it
for every row of a batch.

The order of the steps is vLLM's (vllm/v1/sample/sampler.py): repetition penalty, frequency penalty,
presence penalty, temperature, min-p, top-k, top-p. Hugging Face transformers applies min-p last;
top-p then counts the mass of tokens that min-p is about to remove, so the two libraries can differ
for a request that sets both.

Sources: top-k (Fan et al. 2018), top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024),
repetition penalty (Keskar et al. 2019, section 4.1), frequency and presence penalties (the OpenAI
API reference).
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lessons.l02_naive_attention.random_streams import streams_of, uniform
from lessons.toolbox.model.arguments import refuse


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled, under vLLM's names. Raises ValueError for a wrong value."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1: all of them
    top_p: float = 1.0  # keep the fewest likeliest tokens whose mass reaches p
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the likeliest
    # > 1 makes tokens of prompt and output less likely, by division
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted once from each token of the output
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the output
    seed: int | None = None  # which random numbers; None: `seeded` draws a fresh one
    stop_token_ids: tuple[int, ...] = ()
    # True: the model's own end-of-sequence tokens do not stop the row
    ignore_eos: bool = False

    def __post_init__(self):
        # Frozen, so that rows may share one object; a list of stop tokens is welcome all the same.
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
        elif isinstance(self.stop_token_ids, (list, set, frozenset)):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        largest = sys.float_info.max
        self._require_number("temperature", 0, largest, "a finite number >= 0 (0 is greedy)")
        self._require_number("top_p", sys.float_info.min, 1, "0 < top_p <= 1")
        self._require_number("min_p", 0, 1, "0 <= min_p <= 1")
        # Wider bounds would take a logit out of float32's range.
        self._require_number(
            "repetition_penalty", 0.01, 100, "0.01 <= repetition_penalty <= 100 (1 is off)"
        )
        self._require_number("presence_penalty", -2, 2, "-2 <= presence_penalty <= 2")
        self._require_number("frequency_penalty", -2, 2, "-2 <= frequency_penalty <= 2")
        self._require(
            "top_k",
            _is_integer(self.top_k, -1, 2**31 - 1),
            "an integer from 1 to 2**31 - 1, or 0 or -1 for all tokens",
        )
        self._require(
            "seed",
            self.seed is None or _is_integer(self.seed, 0, 2**63 - 1),
            "None, or an integer with 0 <= seed < 2**63",
        )
        self._require(
            "stop_token_ids",
            isinstance(self.stop_token_ids, tuple)
            and all(_is_integer(token, 0, 2**63 - 1) for token in self.stop_token_ids),
            "a list of token ids >= 0",
        )
        self._require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")

    def _require_number(self, name: str, low: float, high: float, what: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self._require(name, is_number and low <= value <= high, what)

    def _require(self, name: str, accepted: bool, what: str) -> None:
        if not accepted:
            refuse(name, getattr(self, name), what)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def seeded(self) -> "SamplingParams":
        """The same with a seed: its own, or a fresh one from PyTorch's global generator."""
        if self.seed is not None:
            return self
        return replace(self, seed=int(torch.randint(2**63 - 1, ())))


def _is_integer(value, low: int, high: int) -> bool:
    # True and False are integers to Python, and mistakes here
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


GREEDY = SamplingParams(temperature=0)


def probabilities(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> Tensor:
    """The exact distribution of the next token. logits: [V], any dtype -> [V] float64, sums to 1.

    Greedy puts everything on the largest logit (ties: the smallest token id). top-k keeps every
    token that ties with the k-th; top-p among equally likely tokens keeps the smallest ids.
    """
    logits = penalize(logits.double(), params, prompt, output)
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    # The max goes first, because a logit divided by a tiny temperature overflows; a difference
    # overflows only to -inf.
    p = torch.softmax((logits - logits.max()) / params.temperature, dim=-1)
    if params.min_p > 0:
        p = p.masked_fill(p < params.min_p * p.max(), 0)
    if 1 <= params.top_k < len(p):
        p = p.masked_fill(p < p.topk(params.top_k).values[-1], 0)
    p = p / p.sum()  # top-p counts the mass of what is left
    if params.top_p < 1:
        p = keep_top_p(p, params.top_p)
    return p


def penalize(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> Tensor:
    """Make tokens that occurred less likely. logits: [V] -> [V]. Repetition counts prompt and
    output, the others output only.
    """
    if not params.has_penalties:
        return logits
    seen, counts = torch.zeros_like(logits, dtype=torch.bool), torch.zeros_like(logits)
    seen[list({*prompt, *output})] = True
    for token, count in Counter(output).items():
        counts[token] = count
    # A negative logit is multiplied, because dividing it would make the token likelier.
    weakened = torch.where(
        logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
    )
    logits = torch.where(seen, weakened, logits)
    return (
        logits
        - params.frequency_penalty * counts
        - params.presence_penalty * (counts > 0).to(logits.dtype)
    )


def keep_top_p(p: Tensor, top_p: float) -> Tensor:
    """Zero all but the fewest likeliest tokens whose mass reaches top_p; renormalise. p: [V] ->
    [V].
    """
    sorted_p, ids = p.sort(descending=True, stable=True)
    # + 1, because the token that reaches top_p belongs to them
    kept = int((sorted_p.cumsum(0) < top_p).sum()) + 1
    cut = torch.zeros_like(p).index_copy(0, ids[:kept], sorted_p[:kept])
    return cut / cut.sum()


def draw(p: Tensor, u: Tensor) -> Tensor:
    """One token for each random number, by inverse CDF. p: [V], need not sum to 1; u: [count]
    float64, in [0, 1) -> [count] int64 on the CPU.
    """
    # Only tokens with p > 0 take part, because a parallel cumsum may round a zero into a small gap.
    support = p.nonzero().squeeze(-1)
    cumulative = p[support].double().cumsum(0)
    mass = u.to(p.device) * cumulative[-1]
    slots = torch.searchsorted(cumulative, mass, right=True)
    # always in range, because u is at most 1 - 2^-53, and such a product rounds below the total
    return support[slots].cpu()


def random_number(params: SamplingParams, output: list[int]) -> Tensor:
    """What the next token of a row is drawn with: [1] float64. Raises ValueError without a seed."""
    if params.seed is None:
        raise ValueError("seed: got None; accepted: an integer, which `seeded` fills in")
    return uniform(streams_of([params.seed]), torch.tensor([len(output)]))


def sample(
    logits: Tensor,
    params: list[SamplingParams],
    prompts: list[list[int]],
    outputs: list[list[int]],
) -> list[int]:
    """The next token of each row. logits: [B, V]; the lists hold one entry a row -> B token ids.

    A row's token depends on nothing but that row: its logits, parameters (the seed is one) and
    tokens. Raises ValueError when a row's largest logit is not finite (NaN, inf, or every token at
    -inf), and when a row that is not greedy has no seed.
    """
    best = logits.max(dim=-1)  # one argmax for the whole batch; its ties go to the smallest id
    for row, value in enumerate(best.values.tolist()):
        if not math.isfinite(value):
            raise ValueError(f"logits: the largest of row {row} is {value}; accepted: finite")
    tokens = best.indices.tolist()
    for row, row_params in enumerate(params):
        if row_params.temperature > 0 or row_params.has_penalties:
            p = probabilities(logits[row], row_params, prompts[row], outputs[row])
            is_greedy = row_params.temperature == 0
            drawn = p.argmax() if is_greedy else draw(p, random_number(row_params, outputs[row]))
            tokens[row] = int(drawn)
    return tokens
