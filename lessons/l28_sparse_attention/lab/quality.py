"""What choosing keys costs in quality on the embedded model: counted, not timed.

    python -m lessons.l28_sparse_attention.lab.quality     # writes results/counted/l28_quality.json

Every layer of models/tiny attends to at most k keys a query, the same for all its heads, on
held-out code. Four ways to choose them: the last k; the first four and the last k − 4; the k to
which the layer itself gives most weight (the oracle, which has computed all scores before); and the
k highest scores of an indexer, trained here to imitate the layer.

The indexer is `Indexer` in small, one a layer. As in DeepSeek's first stage the model is frozen,
and the loss of an indexer is the cross-entropy between its softmax over the keys and the mean of
the layer's attention weights over all heads. All of it takes less than two minutes of one core.

The loss of the model is counted in the second half of each window only, where every query has more
keys than it may choose. mass: which share of a layer's attention weights the chosen keys hold.
"""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.lab.quality import held_out_windows
from lessons.l18_weight_quantization.methods.calibration import calibration_windows
from lessons.l28_sparse_attention.indexer import Indexer, IndexerShape
from lessons.l28_sparse_attention.naive import (
    chosen,
    index_scores,
    oracle_scores,
    sparse_attention,
    top_k,
    window_with_sinks,
)
from lessons.toolbox.model.checkpoint import load_tokenizer

ROOT = Path(__file__).parents[3]
OUT = ROOT / "results" / "counted" / "l28_quality.json"
MODEL = ROOT / "models" / "tiny"
WINDOWS, WINDOW = 6, 512
KEYS = (8, 16, 32, 64, 128, 256)
SINKS = 4
STEPS, TRAINED_ON, LEARNING_RATE = 96, 32, 3e-3
HEADS, DIM, ROPE = 4, 32, 16  # of an indexer
# (what a layer sees, k) -> [T, k]
Choice = Callable[["Seen", int], Tensor]


class Seen:
    """What a layer sees of a window: its input x: [T, hidden_size], and rotated q, k."""

    def __init__(self, layer: int, x: Tensor, q: Tensor, k: Tensor, scale: float):
        self.layer, self.x, self.q, self.k = layer, x, q, k
        self.scale = scale
        self.positions = torch.arange(len(x))

    def weights(self) -> Tensor:
        """The mean of the attention weights over all heads: [T, T]; -inf where none is."""
        return oracle_scores(self.q, self.k, self.scale, self.positions) / self.q.shape[1]


def through(model: Decoder, window: Tensor, attend: Callable) -> Tensor:
    """The model over window: [T], whose layers attend by attend(Seen, v) -> [T, Hq, D]. Returns
    hidden: [T, hidden_size].
    """
    inputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable:
        return lambda module, arguments: inputs.__setitem__(layer, arguments[0])

    hooks = [
        layer.self_attn.register_forward_pre_hook(keep(number))
        for number, layer in enumerate(model.layers)
    ]
    layers = count()  # attention is called layer after layer

    def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, **options) -> Tensor:
        number = next(layers)
        return attend(Seen(number, inputs[number], q, k, softmax_scale), v)

    try:
        return model(window, whole_sequence(model, len(window), attention))
    finally:
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------- the indexers


def new_indexers(model: Decoder) -> list[Indexer]:
    """One a layer, with random weights. MLA's compressed query is x itself here."""
    size = model.config.hidden_size
    shape = IndexerShape(size, size, HEADS, DIM, ROPE, max(KEYS))
    return [Indexer(shape) for _ in model.layers]


def scores_of(indexer: Indexer, seen: Seen) -> Tensor:
    """[T, T], -inf for keys that a query does not see."""
    q, weights, k = indexer(seen.x, seen.x, seen.positions)
    return index_scores(q, weights, k, seen.positions)


def imitation_loss(indexer: Indexer, seen: Seen) -> Tensor:
    """Cross-entropy of the layer's weights and the indexer's softmax, in nats a query: []."""
    target = seen.weights()
    is_seen = target != -torch.inf
    found = scores_of(indexer, seen).log_softmax(-1)
    return -(target.where(is_seen, 0.0) * found.where(is_seen, 0.0)).sum(-1).mean()


def trained_indexers(model: Decoder, windows: Tensor, steps: int = STEPS) -> list[Indexer]:
    """windows: [count, T], of which each step takes one."""
    indexers = new_indexers(model)
    parameters = [p for indexer in indexers for p in indexer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        losses: list[Tensor] = []

        def attend(seen: Seen, v: Tensor, losses: list[Tensor] = losses) -> Tensor:
            losses.append(imitation_loss(indexers[seen.layer], seen))
            return attention_torch(seen.q, seen.k, v, seen.scale)

        through(model, windows[step % len(windows)], attend)
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        schedule.step()
        if step % 16 == 0:
            print(f"step {step}: {[round(float(loss.detach()), 2) for loss in losses]}", flush=True)
    return indexers


# ---------------------------------------------------------------- who chooses


def all_keys(seen: Seen) -> Tensor:
    """[T, T], every key that a query sees."""
    return window_with_sinks(seen.positions, len(seen.positions))


def last(seen: Seen, k: int) -> Tensor:
    """[T, k], the last ones."""
    return window_with_sinks(seen.positions, k)


def first_and_last(seen: Seen, k: int) -> Tensor:
    """[T, k], the sinks and the last ones."""
    return window_with_sinks(seen.positions, k - SINKS, SINKS)


def oracle(seen: Seen, k: int) -> Tensor:
    """[T, k], those with most weight."""
    return top_k(seen.weights(), k)


def by_indexers(indexers: list[Indexer]) -> Choice:
    """A choice by the indexer of each layer."""
    return lambda seen, k: top_k(scores_of(indexers[seen.layer], seen), k)


# ---------------------------------------------------------------- the measures


@torch.inference_mode()
def losses_and_mass(
    model: Decoder, windows: Tensor, choose: Choice, k: int
) -> tuple[Tensor, float]:
    """The loss of each window's second half: [count], and the mean mass there. windows: [count,
    T + 1].
    """
    masses: list[Tensor] = []

    def attend(seen: Seen, v: Tensor) -> Tensor:
        indices = choose(seen, k)
        half = slice(len(v) // 2, None)
        held = seen.weights()[half].where(chosen(indices, len(v))[half], 0.0)
        masses.append(held.sum(-1).mean())
        return sparse_attention(seen.q, seen.k, v, indices, seen.scale)

    losses = []
    for window in windows:
        hidden = through(model, window[:-1], attend)
        half = slice(len(hidden) // 2, None)
        logits = model.logits(hidden[half])
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:][half]))
    return torch.stack(losses), float(torch.stack(masses).mean())


def rows(model: Decoder, windows: Tensor, indexers: list[Indexer]) -> Iterator[dict]:
    """A row for each way to choose and each number of keys. windows: [count, T + 1]."""
    length = windows.shape[1] - 1
    everything, _ = losses_and_mass(model, windows, lambda seen, k: all_keys(seen), length)
    yield {"choice": "all keys", "keys": length, "share": 1.0, "loss": float(everything.mean()),
           "added": 0.0, "mass": 1.0}  # fmt: skip
    ways = {
        "oracle": oracle,
        "indexer": by_indexers(indexers),
        "first four and last": first_and_last,
        "last": last,
    }
    mean_context = (length // 2 + 1 + length) / 2
    for name, choose in ways.items():
        for k in KEYS:
            found, mass = losses_and_mass(model, windows, choose, k)
            yield {
                "choice": name,
                "keys": k,
                "share": round(k / mean_context, 4),
                "loss": round(float(found.mean()), 4),
                "added": round(float((found - everything).mean()), 4),
                "mass": round(mass, 4),
            }
            print(f"{name:20} {k:4} keys: +{float((found - everything).mean()):.3f}", flush=True)


def main() -> int:
    torch.manual_seed(28)
    tokenizer, model = load_tokenizer(str(MODEL)), load_decoder(str(MODEL), "cpu").float()
    indexers = trained_indexers(model, calibration_windows(tokenizer, TRAINED_ON, WINDOW))
    windows = held_out_windows(tokenizer, WINDOWS, WINDOW)
    record = {
        "model": "models/tiny",
        "windows": WINDOWS,
        "window": WINDOW,
        "steps": STEPS,
        "index_heads": HEADS,
        "index_dim": DIM,
        "rows": list(rows(model, windows, indexers)),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
