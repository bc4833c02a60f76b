"""Token masks: made by trying every token and by the trie, over the size of the vocabulary; and
applied to a batch of logits.

    python -m lessons.toolbox.measure.bench 24

Masks are made on the CPU, wherever the model runs. The state is inside a quoted string, where most
tokens fit: there trying takes longest. On a CPU stand_ins.py takes the place of the kernel, which
is interpreted and not timed.
"""

import random

import torch
from torch import Tensor

from lessons.l24_structured_outputs import naive, optimized, stand_ins
from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.matcher import Matcher, State
from lessons.l24_structured_outputs.optimized import TokenMasks
from lessons.l24_structured_outputs.vocabulary import Vocabulary
from lessons.toolbox.measure.bench import Benchmark, needs
from lessons.toolbox.measure.hardware import this_machine, time_floor_s

PATTERN, INSIDE = '"[^"\n]*"', b'"'
VOCABULARIES = [1024, 4096, 16384, 65536]
LLAMA_3_VOCABULARY = 128_256
ROWS = [1, 8, 32, 128]
ALLOWED = 0.25  # of the tokens, when masks are applied


def random_vocabulary(size: int) -> Vocabulary:
    """All bytes, then words of two to nine random letters; some begin alike."""
    draws = random.Random(size)
    tokens = {bytes([byte]) for byte in range(256)}
    while len(tokens) < size:
        tokens.add(bytes(draws.choice(b"etaoin srhl") for _ in range(draws.randint(2, 9))))
    return Vocabulary(sorted(tokens))


def state_inside(size: int, device: torch.device) -> tuple[TokenMasks, State]:
    """Masks over a vocabulary, whose trie is made, and a state in the middle of a string."""
    vocabulary = random_vocabulary(size)
    masks = TokenMasks(compile_structure("regex", PATTERN), vocabulary)
    return masks, masks.matcher.read(INSIDE)


def by_trying(masks: TokenMasks, state: State):
    """Every token, byte by byte."""
    matcher = Matcher(masks.matcher.automaton)
    inside = matcher.read(INSIDE)
    return lambda: naive.token_mask(matcher, inside, masks.vocabulary.tokens)


def by_the_trie(masks: TokenMasks, state: State):
    """A new state each time: nothing is kept."""

    def run() -> Tensor:
        masks.forget()
        return masks.mask(masks.matcher.read(INSIDE))

    return run


# ---------------------------------------------------------------- applied


def logits_and_masks(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [rows, V] float32, masks: [rows, ceil(V / 32)] int32, rows: [rows]."""
    allowed = torch.rand(rows, LLAMA_3_VOCABULARY) < ALLOWED
    logits = torch.randn(rows, LLAMA_3_VOCABULARY, device=device)
    return logits, naive.packed(allowed).to(device), torch.arange(rows, device=device)


def unpacked(logits: Tensor, masks: Tensor, rows: Tensor):
    """Bits become booleans, which are selected by."""
    logits = logits.clone()
    return lambda: naive.apply_token_mask(logits, masks, rows)


def by_the_engine(logits: Tensor, masks: Tensor, rows: Tensor):
    """The kernel, and on a CPU what takes its place."""
    logits, form = logits.clone(), optimized if logits.is_cuda else stand_ins
    return lambda: form.apply_token_mask(logits, masks, rows)


def by_xgrammar(logits: Tensor, masks: Tensor, rows: Tensor):
    """XGrammar's function for this device."""
    with needs("xgrammar"):
        import xgrammar
    logits, indices = logits.clone(), rows.tolist()

    def run() -> Tensor:
        xgrammar.apply_token_bitmask_inplace(logits, masks, indices=indices)
        return logits

    return run


def applied_bytes(rows: int) -> float:
    """Bits are read, and what is forbidden is written."""
    return rows * LLAMA_3_VOCABULARY * (1 / 8 + 4 * (1 - ALLOWED))


BENCHMARKS = [
    Benchmark(
        name="l24_masks",
        title=(
            "A mask of {x} tokens: walking the trie is {speedup:.0f}x as fast as trying each token"
        ),
        x_name="tokens of the vocabulary",
        x_values=VOCABULARIES,
        quick_x_values=VOCABULARIES[:1],
        inputs=state_inside,
        providers={
            "every token": ("naive", by_trying),
            "trie, a new state": ("optimized", by_the_trie),
        },
        ylabel="one mask",
        dtype="int32",
        shape="inside a quoted string; random tokens of up to nine letters",
        tolerance=0.0,
    ),
    Benchmark(
        name="l24_apply",
        title="Masks on {x} rows of logits: the engine is {speedup:.1f}x as fast as unpacking",
        x_name="rows",
        x_values=ROWS,
        quick_x_values=ROWS[:1],
        inputs=logits_and_masks,
        providers={
            "unpacked": ("naive", unpacked),
            "as the engine does it": ("optimized", by_the_engine),
            "XGrammar": ("library", by_xgrammar),
        },
        ylabel="masks applied",
        bytes_moved=applied_bytes,
        floor_s=lambda rows: time_floor_s(applied_bytes(rows), 0, this_machine(), torch.float32),
        shape=f"V = {LLAMA_3_VOCABULARY}, {ALLOWED:.0%} of the tokens are allowed",
        tolerance=0.0,
    ),
]
