"""How many bytes of scores an attention moves: counted operation by operation, at full size and
without the memory.

The versions run on PyTorch's meta device, where tensors have shapes but no numbers. Each operation
is charged one read of every score-sized input and one write of every score-sized output. That is
the least it can do; the real ones may read a row twice.

    python -m lessons.l02_naive_attention.lab.traffic
        [--tokens 8192] [--model llama-3-8b] [--gpu h200]
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lessons.l01_roofline.planner.models import ModelShape, find_model
from lessons.l02_naive_attention import naive, optimized
from lessons.toolbox.measure.hardware import Chip, lookup
from lessons.toolbox.measure.passes import Pass, total_bytes


class ScoreTraffic(TorchDispatchMode):
    """Within it, every operation that touches a tensor of `num_scores` elements is appended to
    `passes`. Views move nothing.
    """

    def __init__(self, num_scores: int):
        super().__init__()
        self.num_scores, self.passes = num_scores, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs, outputs = self._scores((args, kwargs)), self._scores(out)
        # What gives back its input's storage is a view, unless it writes to it; a view moves
        # nothing.
        if inputs.keys() != outputs.keys() or (func._schema.is_mutable and outputs):
            name = func._schema.name.removeprefix("aten::")
            self.passes.append(Pass(name, sum(inputs.values()), sum(outputs.values())))
        return out

    def _scores(self, tree) -> dict[int, int]:
        """{storage: bytes} of the score-sized tensors in an operation's arguments or results."""
        return {
            x.untyped_storage()._cdata: x.nbytes
            for x in tree_leaves(tree)
            if isinstance(x, Tensor) and x.numel() == self.num_scores
        }


def passes_of(attention: Callable, q: Tensor, k: Tensor, v: Tensor) -> list[Pass]:
    """The passes that a PyTorch version makes over its scores. q: [Tq, Hq, D]; k, v: [Tk, Hkv, D],
    best on the meta device.

    Raises ValueError if another tensor has as many elements as the scores, because it would be
    counted too.
    """
    num_scores = q.shape[1] * len(q) * len(k)
    if num_scores in (q.numel(), k.numel(), len(q) * len(k)):
        raise ValueError(
            f"q, k: got {tuple(q.shape)}, {tuple(k.shape)}; accepted: shapes with more scores than "
            f"any other tensor has elements, here {num_scores}"
        )
    with ScoreTraffic(num_scores) as traffic:
        attention(q, k, v)
    return traffic.passes


def fused_passes(q: Tensor, k: Tensor, v: Tensor) -> list[Pass]:
    """The passes of optimized.attention, the kernel's by its own arithmetic. q: [Tq, Hq, D]; k, v:
    [Tk, Hkv, D].
    """
    num_scores = q.shape[1] * len(q) * len(k)
    with ScoreTraffic(num_scores) as products:
        scores = optimized.grouped_scores(q, k)
        optimized.weighted_values(scores, v)  # the probabilities have the scores' shape and dtype
    first, second = products.passes
    return [first, kernel_pass(*scores.shape, scores.itemsize), second]


def kernel_pass(
    num_heads: int, num_queries: int, num_keys: int, itemsize: int, window: int | None = None
) -> Pass:
    """What softmax_kernel loads and stores under a causal mask. itemsize: bytes of a score."""
    last = torch.arange(num_queries) + num_keys - num_queries
    begin = (last - (window or num_keys) + 1).clamp(min=0) // 16 * 16
    end = ((last + 16) // 16 * 16).clamp(min=0, max=num_keys)
    read = int((end - begin).clamp(min=0).sum())
    return Pass(
        "softmax_kernel", num_heads * read * itemsize, num_heads * num_queries * num_keys * itemsize
    )


def versions(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, list[Pass]]:
    """The passes of every version of this lesson over a prompt of num_tokens tokens, one layer."""
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device="meta")
    k = torch.empty(num_tokens, num_kv_heads, head_dim, dtype=dtype, device="meta")
    return {
        "naive.attention": passes_of(naive.attention, q, k, k),
        "optimized.attention_torch": passes_of(optimized.attention_torch, q, k, k),
        "optimized.attention": fused_passes(q, k, k),
    }


def pass_table(found: dict[str, list[Pass]], num_scores: int) -> list[str]:
    """Markdown rows: each version's passes as bytes read + written of each score, and their sum."""
    rows = ["| version | pass: bytes read + written of each score | sum |", "|---|---|---|"]
    for name, passes in found.items():
        cells = [
            f"`{p.name}` {p.read_bytes / num_scores:.2g}+{p.written_bytes / num_scores:.2g}"
            for p in passes
        ]
        rows.append(f"| `{name}` | {' · '.join(cells)} | {total_bytes(passes) / num_scores:.2g} |")
    return rows


def print_report(
    found: dict[str, list[Pass]], num_tokens: int, model: ModelShape, chip: Chip
) -> None:
    """The passes of `versions`, and the least ms that each needs, beside those of the matrix
    products and of q, k, v, o alone.
    """
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    num_scores = heads * num_tokens**2
    print(
        f"{model.name}, one layer, {heads} heads, {num_tokens} tokens, bfloat16: "
        f"{2 * num_scores / 2**30:.4g} GiB of scores\n"
    )
    print(*pass_table(found, num_scores), sep="\n", end="\n\n")
    moved = {name: total_bytes(passes) for name, passes in found.items()}
    moved["q, k, v and the output"] = 2 * 2 * num_tokens * (heads + kv_heads) * head_dim
    for name, count in moved.items():
        print(
            f"{name:27} {count / 1e9:9.3g} GB {1e3 * count / chip.memory_bytes_per_s:9.3g} ms at "
            f"{chip.name}'s bandwidth"
        )
    flops = 4 * num_scores * head_dim  # the masked half included, as every version here computes it
    peak = chip.bf16_flops_per_s or chip.fp16_flops_per_s or chip.fp32_flops_per_s
    print(
        f"{'both matrix products':27} {flops / 1e12:9.3g} TFLOP {1e3 * flops / peak:6.3g} ms at "
        f"its peak"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.l02_naive_attention.lab.traffic", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, help="length of the prompt (default: 8192)"
    )
    parser.add_argument("--model", default="llama-3-8b", help="a model of lesson 1")
    parser.add_argument("--gpu", default="h200", help="whose memory the last lines take")
    options = parser.parse_args(argv)
    try:
        model, chip = find_model(options.model), lookup(options.gpu)
        if options.tokens < 1 or model.kv_lora_rank:
            raise ValueError(
                f"--tokens {options.tokens} --model {model.name}; accepted: 1 or more tokens, a "
                f"model without MLA"
            )
        found = versions(
            options.tokens, model.num_attention_heads, model.num_key_value_heads, model.head_dim
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print_report(found, options.tokens, model, chip)
    return 0


if __name__ == "__main__":
    sys.exit(main())
