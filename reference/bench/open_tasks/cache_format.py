"""Choose what the cache's numbers become, layer by layer, for a budget of quality: the fewest bytes
that keep it.

A choice says for each layer what K and V become, and how many of the first tokens (`sinks`) and of
the newest (`recent`) stay in 16 bits. It is measured on the embedded model by `coded_cache`.
"""

import json
import random
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.lab.quality import agreed
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.toolbox.model.arguments import is_whole, refuse
from lessons.toolbox.model.checkpoint import load_tokenizer
from reference.bench.open_tasks import handed_in
from reference.bench.open_tasks.coded_cache import NAMES, Choice, CodedCache, cache_bytes
from reference.bench.open_tasks.handed_in import Allowed

MODELS = Path(__file__).resolve().parents[3] / "models"
WINDOWS, WINDOW = 8, 512
PROMPTS, PROMPT, NEW_TOKENS = 12, 96, 32
NUMBERS = ("bytes", "more_loss_percent", "same_tokens")
# Of two machines that round differently: one answer may part from the other, and the loss a little.
ALLOWED = {
    "more_loss_percent": Allowed(absolute=0.03),
    "same_tokens": Allowed(absolute=NEW_TOKENS),
}
FIELDS = ("k", "v", "sinks", "recent")


@dataclass(frozen=True)
class Task:
    """context: tokens of each sequence. most_loss: percent. fewest_same: greedy tokens."""

    context: int
    batch: int
    most_loss: float
    fewest_same: int

    def __str__(self) -> str:
        return (
            f"The cache of models/tiny holds {self.batch} sequences of {self.context} tokens. "
            f"Give it the fewest bytes with at most {self.most_loss:g} % more loss on held-out "
            f"text ({WINDOWS} windows of {WINDOW} tokens) and at least {self.fewest_same} of "
            f"{PROMPTS * NEW_TOKENS} greedy tokens before the first that differs in each of "
            f"{PROMPTS} answers, both beside a cache in 16 bits."
        )


def task_of(seed: int) -> Task:
    """Another number is another task."""
    rng = random.Random(f"cache {seed}")
    most_loss, fewest_same = rng.choice(BUDGETS)
    return Task(rng.choice((768, 1024, 1536)), rng.randint(8, 64), most_loss, fewest_same)


BUDGETS = ((0.25, 240), (0.5, 200), (1.0, 160))


def read_choice(where: str, given, layers: int) -> Choice:
    """Raises ValueError, in one line."""
    handed_in.check_fields(f"{where}: choice", given, FIELDS)
    parts = []
    for name in ("k", "v"):
        value = given[name]
        each = [value] * layers if isinstance(value, str) else value
        is_list = isinstance(each, list) and len(each) == layers
        if not is_list or not all(isinstance(one, str) and one in NAMES for one in each):
            accepted = f"one of {', '.join(NAMES)}, or a list of {layers}, one for each layer"
            refuse(f"{where}: {name}", value, accepted)
        parts.append(tuple(each))
    for name in ("sinks", "recent"):
        if not is_whole(given[name], 0, WINDOW):
            refuse(f"{where}: {name}", given[name], f"a whole number, 0 to {WINDOW}")
    return Choice(*parts, given["sinks"], given["recent"])


# ---------------------------------------------------------------- quality


@lru_cache(maxsize=1)
def model() -> Decoder:
    """models/tiny in float32."""
    return load_decoder(str(MODELS / "tiny"), "cpu").float()


@lru_cache(maxsize=1)
def texts() -> tuple[Tensor, Tensor]:
    """(windows: [WINDOWS, WINDOW + 1], prompts: [PROMPTS, PROMPT]) of the ladder's prompts, code
    that the model never saw. Committed, so that every version of Python has the same.
    """
    asked = json.loads((MODELS / "prompts.json").read_text(encoding="utf-8"))
    encoded = load_tokenizer(str(MODELS / "tiny"))([one["prompt"] for one in asked])["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in ids])
    windows = stream[: WINDOWS * WINDOW + 1].unfold(0, WINDOW + 1, WINDOW)
    prompts = [ids[:PROMPT] for ids in encoded if len(ids) >= PROMPT]
    return windows, torch.tensor(prompts[:PROMPTS])


@torch.inference_mode()
def loss(choice: Choice) -> float:
    """Nats a token."""
    found, decoder = [], model()
    for window in texts()[0]:
        attend = CodedCache(decoder.config, choice).attend
        logits = decoder.logits(decoder(window[:-1], attend)).log_softmax(-1)
        found.append(-logits.gather(1, window[1:, None]).mean())
    return float(torch.stack(found).mean())


@torch.inference_mode()
def answers(choice: Choice) -> list[list[int]]:
    """The likeliest tokens after each prompt."""
    found, decoder = [], model()
    for tokens in texts()[1]:
        cache, answer = CodedCache(decoder.config, choice), []
        while len(answer) < NEW_TOKENS:
            hidden = decoder(tokens, cache.attend)
            tokens = decoder.logits(hidden[-1:]).argmax(-1)
            answer.append(int(tokens))
        found.append(answer)
    return found


@lru_cache(maxsize=1)
def in_16_bits() -> tuple[float, list[list[int]]]:
    """Loss and answers of a cache that is not quantized."""
    layers = ("auto",) * model().config.num_hidden_layers
    return loss(Choice(layers, layers)), answers(Choice(layers, layers))


@lru_cache(maxsize=handed_in.MOST)
def quality(choice: Choice) -> dict[str, float]:
    """Percent of loss more than in 16 bits, and greedy tokens before the first other one."""
    base, wanted = in_16_bits()
    same = sum(agreed(*two) * NEW_TOKENS for two in zip(answers(choice), wanted))
    return {"more_loss_percent": 100 * (loss(choice) / base - 1), "same_tokens": round(same)}


# ---------------------------------------------------------------- the command


def plain_search(task: Task) -> tuple[int, str]:
    """(bytes, format) of the smallest that keeps the budget among one format for everything."""
    config, sizes = model().config, {}
    for name in ("auto", *FORMATS):
        choice = Choice(*[(name,) * config.num_hidden_layers] * 2)
        sizes[cache_bytes(choice, config, task.context, task.batch), name] = choice
    for (size, name), choice in sorted(sizes.items(), key=lambda item: item[0]):
        if name == "auto" or not over_budget(task, quality(choice)):
            return size, name
    raise AssertionError("16 bits keep every budget")


def over_budget(task: Task, found: dict[str, float]) -> list[str]:
    """What of the budget is not kept, a line each."""
    lines = []
    if found["more_loss_percent"] > task.most_loss:
        more = f"{found['more_loss_percent']:.3f} %"
        lines.append(f"the loss is {more} higher, at most {task.most_loss:g} % may be")
    if found["same_tokens"] < task.fewest_same:
        lines.append(f"{found['same_tokens']} tokens are the same, {task.fewest_same} have to be")
    return lines


def run(seed: int, plan: Path | None, measure: Path | None) -> int:
    """Say the task, measure choices, or check what is handed in."""
    task = task_of(seed)
    print(task)
    path = plan or measure
    if path is None:
        print(f"\nA choice is JSON with {', '.join(FIELDS)}; formats: {', '.join(NAMES)}.")
        return 0
    found = handed_in.read_json(path)
    handed_in.check_fields(
        str(path), found, ("tried", "chosen") if plan else ("tried",), ("chosen",)
    )
    config = model().config
    read = partial(read_choice, layers=config.num_hidden_layers)
    rows = handed_in.read_tried(found, read, NUMBERS if plan else ())
    chosen = handed_in.one_named(rows, found["chosen"]) if plan else None
    print()
    wrong = []
    for row in rows:
        again = quality(row.choice)
        handed_in.print_numbers(row.name, again)
        size = cache_bytes(row.choice, config, task.context, task.batch)
        wrong += handed_in.wrong_numbers(row, {"bytes": size, **again}, ALLOWED) if plan else []
    if not plan:
        return 0
    wrong += [f"{chosen.name}: {line}" for line in over_budget(task, quality(chosen.choice))]
    size = cache_bytes(chosen.choice, config, task.context, task.batch)
    least, name = plain_search(task)
    print(
        f"\nYours, {chosen.name}: {size / 1e6:.2f} MB. One format for everything: "
        f"{least / 1e6:.2f} MB ({name})."
    )
    return handed_in.verdict(wrong)
