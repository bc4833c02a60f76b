"""vLLM and llama.cpp as contenders of the ladder and of reference.bench.speed, where `make peers`
has installed them: greedy, on one thread, the same weights, token ids in and out.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from reference.bench.peers.processes import Theirs, llama_cpp, python_with, vllm

PLACES = 64  # requests side by side


class Library:
    """A library that serves requests: prompts and limits -> tokens. It starts when it is first
    asked, and ends with this process. start: of the checkpoint's path. eos: the token that
    llama.cpp does not name.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[Theirs]], eos: list[int]):
        self.start, self.eos = start, eos

    @cached_property
    def theirs(self) -> Theirs:
        stack = ExitStack()
        atexit.register(stack.close)
        return stack.enter_context(self.start())

    def __call__(self, prompts, limits, on_token=None) -> list[list[int]]:
        """All requests at once. Raises RuntimeError for one that is refused."""
        requests = [
            {"prompt": prompt, "params": {"temperature": 0, "max_tokens": limit}}
            for prompt, limit in zip(prompts, limits)
        ]
        rows = [self.tokens_of(answer) for answer in self.theirs(requests)]
        for row, tokens in enumerate(rows):
            for token in tokens if on_token else ():
                on_token(row, token)
        return rows

    def tokens_of(self, answer: dict) -> list[int]:
        """The tokens of an answer with the one that ended it."""
        if "error" in answer:
            raise RuntimeError(answer["error"])
        (one,) = answer["outputs"]
        ids = one["token_ids"]
        is_named = bool(ids) and ids[-1] in self.eos
        return ids if is_named or one["finish_reason"] != "stop" else [*ids, self.eos[0]]

    def one_by_one(self, prompts, limits, on_token=None) -> list[list[int]]:
        """One request after the other."""
        return [self([prompt], [limit], on_token)[0] for prompt, limit in zip(prompts, limits)]

    def renew(self) -> None:
        """It forgets the prompts that it has seen."""
        self.theirs.forget()


@lru_cache(maxsize=1)
def new_vllm(path: str, dtype: str, eos: tuple[int, ...]) -> Library:
    """vLLM on a checkpoint, compiled. dtype: its name."""
    how = {"dtype": dtype, "max_num_seqs": PLACES, "seed": 0}
    if torch.cuda.is_available():  # others run beside it
        how["gpu_memory_utilization"] = 0.3
    return Library(lambda: vllm(path, compiles=True, **how), list(eos))


@lru_cache(maxsize=1)
def new_llama_cpp(path: str, dtype: str, eos: tuple[int, ...]) -> Library:
    """llama.cpp on the same weights, written into a GGUF file."""
    from lessons.l06_mla.deepseek import load_decoder
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.checkpoints.gguf.gguf_model import save_gguf

    folder = TemporaryDirectory(prefix="llama-cpp-")
    atexit.register(folder.cleanup)
    gguf = Path(folder.name) / "model.gguf"
    model = load_decoder(path, device="cpu", dtype=getattr(torch, dtype))
    mixture = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    save_gguf(gguf, model, load_tokenizer(path), mixture)
    context = min(model.config.max_position_embeddings, 1024)
    return Library(lambda: llama_cpp(gguf, PLACES, context), list(eos))


LIBRARIES: dict[str, Callable[[str, str, tuple[int, ...]], Library]] = {
    "vLLM": new_vllm,
    "llama.cpp": new_llama_cpp,
}


def installed() -> list[str]:
    """The libraries that can be asked here."""
    return [name for name in LIBRARIES if python_with(name) is not None]
