"""What is counted on the embedded pair (acceptance, tokens a step), what is timed there (c), and
what is predicted for an 8B draft beside a 70B target.

    python -m lessons.l16_speculative_sampling.lab.experiments      prints all of it
"""

from dataclasses import replace

import torch

from lessons.l01_roofline.calculators import Floor, attention_flops, kv_bytes_per_token
from lessons.l01_roofline.planner.models import ModelShape, find_model
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l16_speculative_sampling.generate import Counts, generate
from lessons.l16_speculative_sampling.lab.workload import (
    NEW_TOKENS,
    embedded_pair,
    held_out_prompts,
)
from lessons.l16_speculative_sampling.more.speed import expected_tokens, speedup
from lessons.l16_speculative_sampling.runner import RewindingRunner
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.measure.timing import Stopwatch

COUNT = 4  # K, unless said otherwise
REQUESTS = 32
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
WAYS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "temperature 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True),
    "temperature 1": SamplingParams(ignore_eos=True),
}
CONTEXT = 2048  # tokens of each sequence in the predictions
TARGET, DRAFT = find_model("llama-3-70b"), find_model("llama-3-8b")
BATCHES = tuple(2**n for n in range(11))


# ---------------------------------------------------------------- counted


def counted(way: str, with_draft: bool, requests: int = REQUESTS) -> Counts:
    """What happens to drafted tokens on the embedded pair. The same numbers on every machine, up to
    ties of rounding.
    """
    target, draft, _ = embedded_pair()
    params = [replace(WAYS[way], seed=row) for row in range(requests)]
    counts = Counts()
    generate(
        target,
        held_out_prompts(requests),
        NEW_TOKENS,
        params,
        draft=draft if with_draft else None,
        num_speculative_tokens=COUNT,
        counts=counts,
    )
    return counts


def tokens_a_step(counts: Counts, requests: int = REQUESTS) -> float:
    """Tokens that one request gets in one pass of the target, on average.

    Each request emits one token a pass, and one more for each that stayed.
    """
    passes = counts.emitted - counts.kept
    return counts.emitted / passes


# ---------------------------------------------------------------- timed


def pass_s(model, batch: int, new: int, context: int = 64, rounds: int = 9) -> float:
    """Seconds of one pass over `new` tokens of each of `batch` sequences; the median of some."""
    blocks = batch * -(-(context + new) // 16)
    runner = RewindingRunner.for_model(model, blocks, 16, context + new)
    tokens = torch.randint(model.config.vocab_size, (context,)).tolist()
    runner.step({row: tokens for row in range(batch)})
    seconds = []
    for _ in range(rounds):
        with Stopwatch(model.device) as watch:
            rows = dict.fromkeys(range(batch), tokens[:new])
            runner.run_rows(rows, dict.fromkeys(rows, new))
        seconds.append(watch.seconds)
        for row in range(batch):
            runner.rewind(row, context)
    return sorted(seconds)[rounds // 2]


# ---------------------------------------------------------------- predicted


def predicted_pass_s(model: ModelShape, batch: int, new: int, context: int = CONTEXT) -> float:
    """Seconds that a pass must take at least on one H100, if the model fitted; only ratios of it
    are used, and in a ratio the number of GPUs cancels.
    """
    chip, tokens = CHIPS["h100"], batch * new
    pairs = batch * (new * context + new * (new + 1) / 2)
    moved = 2 * model.params_read(tokens) + batch * (context + new) * kv_bytes_per_token(model)
    flops = 2 * tokens * model.active_params + attention_flops(model, pairs)
    return Floor(moved, flops, chip.memory_bytes_per_s, chip.bf16_flops_per_s).seconds


def predicted_cost_ratio(batch: int = 1, context: int = CONTEXT) -> float:
    """c: a pass of the 8B draft over a pass of the 70B target, one token of each sequence."""
    return predicted_pass_s(DRAFT, batch, 1, context) / predicted_pass_s(TARGET, batch, 1, context)


def predicted_speedup(
    alpha: float, batch: int, count: int = COUNT, context: int = CONTEXT
) -> float:
    """With the draft's passes and a verification that is K + 1 times as much work."""
    one, all_rows = (predicted_pass_s(TARGET, batch, new, context) for new in (1, count + 1))
    return speedup(alpha, count, predicted_cost_ratio(batch, context), all_rows / one)


def main() -> None:
    for alpha in ALPHAS:
        print(f"alpha {alpha}: {expected_tokens(alpha, COUNT):.2f} tokens a step, "
              f"{speedup(alpha, COUNT, 0.1):.2f}x at c = 0.1")  # fmt: skip
    print(f"c of 8B beside 70B: {predicted_cost_ratio():.3f}")
    for alpha in (0.6, 0.7, 0.8, 0.9):
        row = " ".join(f"{predicted_speedup(alpha, batch):.2f}" for batch in BATCHES)
        print(f"alpha {alpha}, batch 1 to 1024: {row}")
    for way in WAYS:
        for with_draft in (True, False):
            counts = counted(way, with_draft)
            print(f"{way}, {'tiny-draft' if with_draft else 'n-grams'}: alpha {counts.alpha:.3f}, "
                  f"{tokens_a_step(counts):.2f} tokens a pass, {counts}")  # fmt: skip
    target, draft, _ = embedded_pair()
    for batch in (1, 4, 16, 32):
        one = pass_s(target, batch, 1)
        print(
            f"batch {batch}: c = {pass_s(draft, batch, 1) / one:.2f}, a pass over {COUNT + 1} "
            # Fmt: skip.
            f"tokens takes {pass_s(target, batch, COUNT + 1) / one:.2f} of one over 1"
        )


if __name__ == "__main__":
    main()
