"""What the target writes behind prompts, and how its answers are judged."""

import ast
import codeop
import json
import re
from collections import Counter

import torch

from models.tokenizer import HERE


def texts_behind(model, tokenizer, prompt: str, length: int, device: str, **sampling) -> list[str]:
    """The prompt and at most `length` new tokens, once for each sequence that `sampling`, arguments
    of transformers' generate, asks for.
    """
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    rows = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        pad_token_id=0,
        **sampling,
    )
    return [tokenizer.decode(row[1:], skip_special_tokens=True) for row in rows]


@torch.no_grad()
def sampled_functions(model, tokenizer, count: int, device: str) -> list[str]:
    """`count` functions sampled at temperature 0.8, top-p 0.95: cut where the next top-level
    statement begins.
    """
    torch.manual_seed(0)
    # No newline behind the colon: a newline and the indentation after it are one token, which the
    # model has to choose.
    prompts = (
        "def read_lines(path):",
        "def merge(left, right):",
        "def close(self):",
        "def parse_header(line):",
        "def is_valid(name, value):",
        "def write_table(rows, out):",
    )
    functions = []
    for prompt in prompts:
        sampling = dict(do_sample=True, temperature=0.8, top_p=0.95, top_k=0)
        sampling["num_return_sequences"] = count // len(prompts)
        texts = texts_behind(model, tokenizer, prompt, 160, device, **sampling)
        functions.append([_first_function(text) for text in texts])
    # one of each prompt, then the next of each
    return [function for turn in zip(*functions) for function in turn]


def _first_function(text: str) -> str:
    lines = text.split("\n")
    return "\n".join([lines[0], *_until_top_level(lines[1:])]).rstrip()


def _until_top_level(lines):
    for line in lines:
        if line and not line[0].isspace():
            return
        yield line


def parses(source: str) -> bool:
    try:
        ast.parse(source)
        return True
    except (SyntaxError, ValueError):
        return False


@torch.no_grad()
def greedy_answers(model, tokenizer, device: str, length: int = 200) -> list[str]:
    """The prompts of the ladder with `length` greedy tokens behind each: code that the model has
    never seen, and how it goes on.
    """
    prompts = [request["prompt"] for request in json.loads((HERE / "prompts.json").read_text())]
    return [
        texts_behind(model, tokenizer, prompt, length, device, do_sample=False)[0]
        for prompt in prompts
    ]


def real_answers(tokenizer, texts: list[str], length: int = 200) -> list[str]:
    """The same prompts with what their authors wrote behind them: what to compare greedy answers
    with. A prompt that this Python's library writes differently is left out.
    """
    answers = []
    for request in json.loads((HERE / "prompts.json").read_text()):
        for text in texts:
            _, prompt, behind = text.partition(request["prompt"])
            if prompt:
                ids = tokenizer(behind[: 20 * length], add_special_tokens=False)["input_ids"]
                ids = ids[:length]
                answers.append(prompt + tokenizer.decode(ids))
                break
    return answers


def parses_so_far(source: str) -> bool:
    """Whether it is Python, or would be if it went on. What begins with a method stands in a class.
    The last line may have been cut anywhere, so it does not count.
    """
    around = "class Around:\n" if source[:1].isspace() else ""
    whole_lines = around + source.rpartition("\n")[0] + "\n"
    try:
        codeop.compile_command(whole_lines, symbol="exec")  # None: incomplete
        return True
    except (SyntaxError, ValueError, OverflowError):
        return False


SHORTEST_LINE = 12  # characters of a line that counts as repeated: `return None` may stand often


def repeats_a_line(answer: str, times: int = 3) -> bool:
    """Whether a line of SHORTEST_LINE characters or more stands in it `times` times."""
    lines = Counter(line.strip() for line in answer.splitlines())
    return any(count >= times for line, count in lines.items() if len(line) >= SHORTEST_LINE)


def goes_round(answer: str) -> bool:
    """Whether a piece of 3 to 60 characters, more than one kind of them, stands four times in a row
    within a line: another way to repeat oneself.
    """
    return any(len(set(found[1])) > 1 for found in re.finditer(r"(.{3,60}?)\1{3,}", answer))


def share(holds, texts: list[str]) -> float:
    """The share of texts for which it holds."""
    return round(sum(map(holds, texts)) / len(texts), 3)
