"""What a quantized model does, beside what it loses: tasks with right and wrong answers, the first
token at which long greedy answers part, and how many drafts the model accepts.

    python -m lessons.l18_weight_quantization.lab.behaviour [NAME …]

counts the methods of these names (of lab/methods.py), or all of ROWS, on the embedded model, and
writes results/cpu/l18_behaviour.json, which MORE.md quotes. With a checkpoint of your own

    python -m lessons.l18_weight_quantization.lab.behaviour --model FOLDER [--draft FOLDER] [NAME …]

prints the same table and writes nothing. FOLDER is any checkpoint of Hugging Face that the course
loads, with its tokenizer and room for 1100 tokens. A method whose groups do not fit its matrices is
left out, with a line that says so, and so are prompts that its tokenizer does not give back.
Prompts are plain text; a chat template is not used. lm-eval (EleutherAI's lm-evaluation-harness) is
the usual program for this: hundreds of tasks, made for models that are larger than the embedded
one.
"""

import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l06_mla.deepseek import load_decoder
from lessons.l12_paged_kv.generate import BLOCK_SIZE, generate
from lessons.l18_weight_quantization.lab.behaviour_tasks import Item, items
from lessons.l18_weight_quantization.lab.folders import (
    bits_of,
    can_be_asked,
    check_draft,
    check_vocabulary,
    prompt_tokens,
)
from lessons.l18_weight_quantization.lab.methods import CALIBRATION, METHODS, four_digits
from lessons.l18_weight_quantization.lab.quality import (
    bits_per_weight,
    held_out_windows,
    predictions,
)
from lessons.l18_weight_quantization.linear import dequantized
from lessons.l18_weight_quantization.methods.calibration import calibration_windows
from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.arguments import one_line
from lessons.toolbox.model.checkpoint import REPOSITORY, load_tokenizer

FILE = REPOSITORY / "results" / "cpu" / "l18_behaviour.json"
TINY, DRAFT = (str(REPOSITORY / "models" / name) for name in ("tiny", "tiny-draft"))
ROWS = ("int8-row", "fp8-row", "int4-g32", "nvfp4", "mxfp4", "gptq-int4-g128", "int4-row")
ROWS += ("int4-tensor",)  # which is broken, so that a table shows what broken looks like
NEW_TOKENS = 32  # of an item
LONG, PROMPTS, PROMPT = 512, 6, 64  # greedy answers: tokens, how many, and tokens of their prompts
WINDOWS = 8  # of 512 tokens, for the drafts
COUNTED = ("items", "right", "lost", "gained")  # lost: right before, and wrong now
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def greedy(model: Decoder, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The likeliest tokens after each prompt, all prompts in one batch."""
    blocks = sum(-(-(len(prompt) + new_tokens) // BLOCK_SIZE) for prompt in prompts)
    return generate(model, prompts, new_tokens, GREEDY, num_blocks=blocks)


def written(model: Decoder, tokenizer, found: list[Item]) -> list[str]:
    """What the model writes after each prompt: NEW_TOKENS likeliest tokens."""
    if not found:
        return []
    prompts = [prompt_tokens(tokenizer, item.prompt) for item in found]
    answers = greedy(model, prompts, NEW_TOKENS)
    texts = []
    for prompt, answer in zip(prompts, answers):
        # from the whole, because some tokenizers drop the blank before a text's first word
        before = tokenizer.decode(prompt, skip_special_tokens=True)
        texts.append(tokenizer.decode(prompt + answer, skip_special_tokens=True)[len(before) :])
    return texts


def right(model: Decoder, tokenizer, found: list[Item]) -> list[bool]:
    """Whether each item's answer is right."""
    return [item.judge(text) for item, text in zip(found, written(model, tokenizer, found))]


def long_answers(model: Decoder, windows: Tensor) -> list[list[int]]:
    """LONG likeliest tokens after the first PROMPT tokens of PROMPTS windows. windows: [count,
    length + 1] int64.
    """
    prompts = windows[:PROMPTS, :PROMPT].tolist()
    return greedy(model, prompts, LONG)


def first_difference(answer: list[int], wanted: list[int]) -> int:
    """How many tokens come before the first that differs; all of them if none does."""
    same = [a == b for a, b in zip(answer, wanted, strict=True)]
    return same.index(False) if False in same else len(same)


def accepted(target: list[Tensor], draft: list[Tensor]) -> float:
    """The share of drafts that speculative sampling accepts: the mean of Σ min(p, q) over all
    places of a text (lesson 16). target, draft: log-probabilities, [length, V] for each window; V
    may differ, because models of one tokenizer are padded to other numbers of rows.
    """
    shares = []
    for p, q in zip(target, draft, strict=True):
        both = min(p.shape[-1], q.shape[-1])
        shares.append(torch.minimum(p[:, :both].exp(), q[:, :both].exp()).sum(-1).mean())
    return float(torch.stack(shares).mean())


class Yardstick:
    """A model as it was trained, and what it does. model, draft: folders; draft may be None."""

    def __init__(self, model: str = TINY, draft: str | None = DRAFT, count: int | None = None):
        self.model = load_decoder(model)
        self.tokenizer, self.bits = load_tokenizer(model), bits_of(model)
        self.windows = held_out_windows(self.tokenizer, max(WINDOWS, PROMPTS))
        if draft is not None:  # before anything takes long
            drafter = load_decoder(draft)
            own = held_out_windows(load_tokenizer(draft), len(self.windows))
            check_draft(draft, self.windows, own)
        check_vocabulary(model, self.windows, self.model.config.vocab_size)
        every = items() if count is None else items(count)
        self.items = can_be_asked(self.tokenizer, every)
        self.left_out = len(every) - len(self.items)
        self.right = right(self.model, self.tokenizer, self.items)
        self.answers = long_answers(self.model, self.windows)
        self.predictions = list(predictions(self.model, self.windows[:WINDOWS]))
        self.drafts = None
        if draft is not None:
            self.drafts = list(predictions(drafter, self.windows[:WINDOWS]))

    def judge(self, model: Decoder) -> dict:
        """Tasks, first differing tokens and accepted drafts of a model."""
        now = right(model, self.tokenizer, self.items)
        tasks = {}
        for item, before, after in zip(self.items, self.right, now):
            row = tasks.setdefault(item.task, dict.fromkeys(COUNTED, 0))
            row["items"] += 1
            row["right"] += after
            row["lost"] += before and not after
            row["gained"] += after and not before
        answers = long_answers(model, self.windows)
        until = [first_difference(*two) for two in zip(answers, self.answers)]
        found = list(predictions(model, self.windows[:WINDOWS]))
        total = {key: sum(task[key] for task in tasks.values()) for key in COUNTED}
        row = {"tasks": tasks, "total": total, "first_difference": until}
        row["same_tokens"] = sum(until) / len(until)
        row["accepted_as_draft"] = accepted(self.predictions, found)
        if self.drafts is not None:
            row["accepts"] = accepted(found, self.drafts)
        return row


def rows(yardstick: Yardstick, names: list[str]) -> Iterator[dict]:
    """The model as it is, then each method; what does not fit its matrices is said and left out."""
    first = {"name": "reference", "format": "as trained", "way": "", "bits": yardstick.bits}
    yield first | yardstick.judge(yardstick.model)
    methods = {method.name: method for method in METHODS}
    windows = calibration_windows(yardstick.tokenizer, CALIBRATION)
    for name in names:
        method = methods[name]
        try:
            model = method.build(yardstick.model, windows)
        except ValueError as error:
            print(f"{name} is left out: {one_line(str(error))}", file=sys.stderr)
            continue
        row = {"name": name, "format": method.format, "way": method.way}
        yield row | {"bits": bits_per_weight(model)} | yardstick.judge(dequantized(model))


def notes(yardstick: Yardstick) -> list[str]:
    """What a reader of the table has to know of this folder."""
    said = []
    if yardstick.left_out:
        count = yardstick.left_out + len(yardstick.items)
        said.append(
            f"{yardstick.left_out} of {count} items are left out: the tokenizer does not give "
            "their prompts back"
        )
    if yardstick.tokenizer.chat_template:
        said.append("prompts are plain text: the chat template is not used")
    return said


def recorded() -> dict:
    """What was counted last."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def line(row: dict) -> str:
    """A row as the command prints it."""
    tasks = "  ".join(
        f"{name} {task['right']}/{task['items']} (-{task['lost']} +{task['gained']})"
        for name, task in row["tasks"].items()
    )
    drafts = f"  accepts {row['accepts']:.1%}" if "accepts" in row else ""
    return (
        f"{row['name']:16} {row['bits']:5.2f} bits  {tasks}  same tokens {row['same_tokens']:.0f} "
        f"of {LONG}{drafts}  as a draft {row['accepted_as_draft']:.1%}"
    )


def main(argv: list[str] | None = None) -> int:
    """The command; every failure is one line."""
    return run_command("behaviour", lambda: run(argv))


def run(argv: list[str] | None) -> int:
    """Count and print. Raises ValueError for a name, CheckpointError for a model."""
    parser = OneLineParser(
        prog="python -m lessons.l18_weight_quantization.lab.behaviour",
        description=__doc__.split("\n")[0],
        epilog="For published comparisons: lm_eval --model hf --model_args pretrained=FOLDER",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(ROWS)}")
    parser.add_argument(
        "--model", help="a checkpoint that is not quantized; default: the embedded one"
    )
    parser.add_argument("--draft", help="a smaller checkpoint with the same tokenizer")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - {method.name for method in METHODS}:
        accepted_names = ", ".join(method.name for method in METHODS)
        raise ValueError(f"NAME: got {', '.join(sorted(unknown))}; accepted: {accepted_names}")
    names = options.names or list(ROWS)
    own = options.model is not None
    draft = options.draft if own else options.draft or DRAFT
    found, yardstick = [], Yardstick(options.model or TINY, draft)
    for note in notes(yardstick):
        print(note, file=sys.stderr)
    for row in rows(yardstick, names):
        print(line(row), flush=True)
        found.append(four_digits(row))
    if not own:
        old = {row["name"]: row for row in recorded()["rows"]} if FILE.exists() else {}
        merged = old | {row["name"]: row for row in found}
        order = ["reference", *(method.name for method in METHODS)]
        facts = {"model": "models/tiny", "new_tokens": NEW_TOKENS, "long": LONG}
        facts["rows"] = sorted(merged.values(), key=lambda row: order.index(row["name"]))
        write_json(FILE, facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
