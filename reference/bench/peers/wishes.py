"""Random requests for two engines: prompts and SamplingParams as JSON, equal for an equal seed.

Each asks for tokens that do not depend on a stream of random numbers, because two engines have
different ones: greedy, or drawn where one token alone can come.
"""

import random
from collections.abc import Callable, Iterator

LINE = 199  # of models/tiny: "\n", which ends a character, as random bytes may not
SPECIAL = 0  # of models/tiny: <|endoftext|>, which begins and ends a text
TEXTS = (
    "def quicksort(items):\n", "import os\n\n\ndef main():\n", "class Stack:\n    def __init__(",
    "for i in range(10):\n    ", "# Copyright", "x", "    return ", "été 漢字 ", "\n\n", "print(\"é",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + ", "a = [1, 2, 3, ",
    "<|endoftext|>import re\n", "try:\n    import json\nexcept ", "emoji = '\U0001f600", "SELECT",
)  # fmt: skip
STOPS = (
    "\n",
    "\n\n",
    "return",
    "def ",
    ":",
    "self",
    "(",
    ".",
    "ret",
    "turn x",
    " ",
    "e",
    "::",
    "):",
)
WORDS = ("return", "self", "def", "import", '"""', "the", "x", "None", " in", "e", "class Foo", "é")
STRUCTURES = (
    {"regex": "[a-z]{3,9}"}, {"regex": r"(yes|no)( please)?"}, {"choice": ["red", "green", "blue"]},
    {"regex": r"\d{1,3}\.\d{2}"}, {"choice": ["a", "ab", "abc"]},
    {"grammar": 'root ::= "(" [a-c]+ ")"'},
    {"json": {"enum": ["yes", "no", 3]}}, {"json": {"type": "boolean"}},
)  # fmt: skip
# What no engine may take. Not here: what is a value to one of them alone (DIFFERENCES has those).
BAD = (
    {"temperature": -0.1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": -0.1}, {"n": 0},
    {"min_p": 1.5}, {"max_tokens": 0}, {"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 3},
    {"logprobs": -2}, {"prompt_logprobs": -2}, {"logprobs": 21}, {"prompt_logprobs": 21},
    {"logprobs": -1}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"stop": [""]},
    {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"stop": ["a"], "detokenize": False},
    {"stop_token_ids": [4096]}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["x"]}, {"n": -1},
    {"logit_bias": {"4096": 1}}, {"logit_bias": {"-1": 1}}, {"allowed_token_ids": [4096]},
    {"allowed_token_ids": []}, {"allowed_token_ids": [-1]}, {"bad_words": [""]}, {"top_k": 1.5},
    {"bad_words": [" "]}, {"n": 2, "temperature": 0}, {"temprature": 1}, {"max_tokens": "x"},
    {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}}, {"structured_outputs": {}},
    {"structured_outputs": {"json": "{"}}, {"structured_outputs": {"grammar": "nonsense"}},
)  # fmt: skip


class Draw:
    """Wishes by one stream of random numbers. vocab_size: of the model."""

    def __init__(self, seed: int, vocab_size: int):
        self.random = random.Random(seed)
        self.vocab_size = vocab_size

    def request(self) -> dict:
        """{"prompt", "params"}. One in twelve has a value that is refused."""
        draw = self.random
        params = {"max_tokens": draw.randint(1, 24)}
        params |= self.one_token_alone()
        for value in self.kinds().values():
            if draw.random() < 0.22:
                params |= value()
        if params.get("min_tokens", 0) > params["max_tokens"]:
            params["min_tokens"] = params["max_tokens"]
        if draw.random() < 1 / 8 and "allowed_token_ids" not in params:
            params["structured_outputs"] = draw.choice(STRUCTURES)
            for name in ("ignore_eos", "min_tokens", "stop_token_ids", "bad_words"):
                params.pop(name, None)  # see DIFFERENCES
            params["max_tokens"] += 16
        if "stop" in params:
            params.pop("detokenize", None)
        if draw.random() < 1 / 12:
            params |= draw.choice(BAD)
        return {"prompt": self.prompt(), "params": params}

    def prompt(self) -> str | list[int]:
        """A text, or token ids as no text would have them."""
        if self.random.random() < 0.7:
            return "".join(self.random.choices(TEXTS, k=self.random.choice((1, 1, 2, 3))))
        return [*self.tokens(self.random.randint(1, 40)), LINE]  # see DIFFERENCES

    def tokens(self, count: int) -> list[int]:
        """Any that the model has, special ones among them."""
        return [self.random.randrange(self.vocab_size) for _ in range(count)]

    def one_token_alone(self) -> dict:
        """Ways to ask for the likeliest token."""
        draw = self.random
        return draw.choice((
            {"temperature": 0}, {"temperature": 0}, {"temperature": 0},
            {"temperature": draw.choice((0.3, 1.0, 2.0)), "top_k": 1},
            {"temperature": draw.choice((0.5, 1.0)), "top_p": 1e-6},
            {"temperature": 1.0, "min_p": 1.0, "seed": draw.choice((None, -1, 5))},
            {"temperature": 0.7, "top_k": 1, "n": draw.randint(2, 4)},
        ))  # fmt: skip

    def kinds(self) -> dict[str, Callable[[], dict]]:
        """What else a request may ask for, each drawn anew."""
        draw = self.random

        def few(values, most: int) -> list:
            return draw.sample(values, draw.randint(1, most))

        return {
            "penalty": lambda: {
                draw.choice(("presence_penalty", "frequency_penalty")): draw.choice(
                    (-2, -0.7, 0.6, 2)
                )
            },
            "repetition": lambda: {"repetition_penalty": draw.choice((0.7, 1.1, 1.9))},
            "least": lambda: {"min_tokens": draw.randint(1, 12)},
            "stop": lambda: {"stop": few(STOPS, 4)},
            "kept": lambda: {"include_stop_str_in_output": True},
            "tokens": lambda: {
                "stop_token_ids": [*self.tokens(2), draw.choice((199, 277, 10, 14))]
            },
            "eos": lambda: {"logit_bias": {str(SPECIAL): draw.choice((4, 9, 100))}},
            "ignored": lambda: {"ignore_eos": True},
            "bias": lambda: {"logit_bias": {str(t): draw.uniform(-9, 9) for t in self.tokens(20)}},
            "words": lambda: {"bad_words": few(WORDS, 5)},
            "allowed": lambda: {"allowed_token_ids": self.tokens(draw.choice((1, 2, 50, 900)))},
            "special": lambda: {"skip_special_tokens": False},
            "silent": lambda: {"detokenize": False},
            "logprobs": lambda: {
                "logprobs": draw.choice((0, 1, 3, 20)),
                "flat_logprobs": draw.random() < 0.3,
            },
            "of the prompt": lambda: {"prompt_logprobs": draw.choice((0, 1, 5))},
        }


def requests(seed: int, count: int, vocab_size: int = 4096) -> Iterator[dict]:
    """So many, the same for the same seed."""
    draw = Draw(seed, vocab_size)
    for _ in range(count):
        yield draw.request()
