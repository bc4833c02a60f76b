"""The fast way: walk the trie of all tokens together with the automaton, once for each state of a
text, and keep the mask.

Three ideas make a mask cheap:

- **Tokens share beginnings.** The trie has one node for each. All nodes of a level are followed at
  once: the state of a node is `table[state of its parent, byte]`, a gather over the whole level.
- **States repeat.** A text is in the same state again and again (inside a string, after a comma).
  Its mask was made the first time. Equal states are one object (matcher.py), also with a stack.
- **The table is filled when it is needed.** Most states that a grammar can reach never occur, and
  with a stack they are infinitely many.

Sources: Willard and Louf 2023, *Efficient Guided Generation for Large Language Models* (masks by
state); Dong et al. 2024, *XGrammar* (masks of pushdown automata, bits, the kernel that applies
them).
"""

import threading

import numpy as np
import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import DECODE_DTYPES, check_one_device
from lessons.l24_structured_outputs.automata.automaton import Automaton
from lessons.l24_structured_outputs.kernels import token_mask_kernel
from lessons.l24_structured_outputs.matcher import MOST_STEPS, Matcher, State, TooAmbiguous
from lessons.l24_structured_outputs.vocabulary import Vocabulary
from lessons.toolbox.kernels.triton_ import triton

DEAD, UNKNOWN = 0, -1  # of the table
MOST_ROWS = 4096  # states in the table; then it begins anew
MOST_MASK_BYTES = 2**24
BLOCK = 1024  # tokens of a program


class TokenMasks:
    """The masks of one automaton over one vocabulary. Texts share it; each keeps its own `State`.
    Engines in several threads may share it, too.

    Raises ValueError for a vocabulary that could come to a dead end, because a byte is no token.
    """

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary):
        check_bytes(automaton, vocabulary)
        self.matcher = Matcher(automaton)
        self.vocabulary = vocabulary
        self.class_of = np.frombuffer(automaton.class_of, np.uint8)
        self.node_class = self.class_of[vocabulary.trie[1]]
        self.lock = threading.Lock()
        self.forget()

    @property
    def start(self) -> State:
        return self.matcher.start

    def forget(self) -> None:
        """Begin anew with tables and masks. States that a caller holds stay valid."""
        self.matcher.forget()
        self.states: list[State | None] = [None]  # by number; DEAD is none
        self.numbers: dict[State, int] = {}
        self.table = np.zeros((1, self.matcher.automaton.num_classes), np.int32)
        self.masks: dict[State, Tensor] = {}

    def number_of(self, state: State) -> int:
        """The row of a state in the table."""
        if state not in self.numbers:
            self.numbers[state] = len(self.states)
            self.states.append(state)
            if len(self.states) > len(self.table):
                more = np.full((len(self.table) + 32, self.table.shape[1]), UNKNOWN, np.int32)
                self.table = np.concatenate([self.table, more])
        return self.numbers[state]

    def advance(self, state: State, token: int) -> State | None:
        """The state after a token; None: the token does not fit."""
        with self.lock:
            return self.after(state, self.vocabulary.tokens[token])

    def after(self, state: State, text: bytes | None) -> State | None:
        """`advance` for the bytes of a token. The caller holds the lock."""
        for byte in text or ():
            # The walk that made the mask has come by here, unless the table began anew.
            number = self.numbers.get(state, DEAD)
            known = self.table[number, self.class_of[byte]] if number else UNKNOWN
            state = self.matcher.step(state, byte) if known == UNKNOWN else self.states[known]
            if state is None:
                return None
        return state if text else None

    def mask(self, state: State) -> Tensor:
        """Which tokens may come next: [ceil(V / 32)] int32, which is kept: do not change it.

        Raises TooAmbiguous for a grammar of which a mask would take too long.
        """
        with self.lock:
            if state not in self.masks:
                mask_bytes = len(self.vocabulary) // 8
                if len(self.states) > MOST_ROWS or len(self.masks) * mask_bytes > MOST_MASK_BYTES:
                    self.forget()
                self.masks[state] = new_mask(self, state)
            return self.masks[state]

    def allowed(self, state: State) -> np.ndarray:
        """Which tokens may come next: [V] bool. Read it beside naive.token_mask."""
        parent, _, levels, node_of = self.vocabulary.trie
        at = np.zeros(len(parent), np.int32)  # the state of each node
        at[0] = self.number_of(state)
        most = self.matcher.steps + MOST_STEPS
        for level in levels:
            sources, classes = at[parent[level]], self.node_class[level]
            found = self.table[sources, classes]
            if (found == UNKNOWN).any():
                self.fill(sources, classes, found == UNKNOWN, most)
                found = self.table[sources, classes]
            if not found.any():
                break
            at[level] = found
        at[0] = DEAD  # the node of tokens without text
        return at[node_of] != DEAD

    def fill(
        self, sources: np.ndarray, classes: np.ndarray, is_unknown: np.ndarray, most: int
    ) -> None:
        """Entries of the table that a level needs. most: of the matcher's steps."""
        width = self.table.shape[1]
        pairs = np.unique(sources[is_unknown].astype(np.int64) * width + classes[is_unknown])
        for source, byte_class in zip((pairs // width).tolist(), (pairs % width).tolist()):
            if self.matcher.steps > most:
                raise TooAmbiguous
            target = self.matcher.step_class(self.states[source], byte_class)
            number = DEAD if target is None else self.number_of(target)
            self.table[source, byte_class] = number


def new_mask(masks: TokenMasks, state: State) -> Tensor:
    """Which tokens may come next, made anew: [ceil(V / 32)] int32. The caller holds the lock."""
    return packed(masks.allowed(state))


def check_bytes(automaton: Automaton, vocabulary: Vocabulary) -> None:
    """Raise ValueError unless each class of bytes that the grammar uses has a token of one byte:
    then some token fits wherever some byte does.
    """
    used = {byte_class for edges in automaton.edges for byte_class in edges}
    missing = used - {automaton.class_of[byte] for byte in vocabulary.single_bytes}
    if missing:
        byte = automaton.class_of.index(min(missing))
        raise ValueError(
            f"the grammar needs byte 0x{byte:02X}, which is no token of this vocabulary; accepted: "
            f"grammars of bytes that are"
        )


def packed(allowed: np.ndarray) -> Tensor:
    """naive.packed for one row of NumPy's booleans: [V] -> [ceil(V / 32)] int32."""
    words = -(-len(allowed) // 32)
    bits = np.zeros(4 * words, np.uint8)
    found = np.packbits(allowed, bitorder="little")
    bits[: len(found)] = found
    return torch.from_numpy(bits.view("<i4"))


def apply_token_mask(logits: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """As naive.apply_token_mask. logits: [B, V] float32, float16 or bfloat16 with dense rows; mask:
    [R, ceil(V / 32)] int32; rows: [R] int64. Raises ValueError for others.
    """
    check_apply(logits, mask, rows)
    vocab_size = logits.shape[1]
    if len(rows) and vocab_size:
        token_mask_kernel[len(rows), triton.cdiv(vocab_size, BLOCK)](
            logits,
            mask,
            rows,
            vocab_size,
            logits.stride(0),
            mask.stride(0),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return logits


def check_apply(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """Raise ValueError unless logits: [B, V], mask: [R, ceil(V / 32)] and rows: [R] fit each other
    and are on one device.
    """
    is_dense = logits.dim() == 2 and (logits.stride(1) == 1 or logits.shape[1] < 2)
    if not is_dense or logits.dtype not in DECODE_DTYPES:
        raise ValueError(
            f"logits: got {logits.dtype} {tuple(logits.shape)}; accepted: [B, V] with dense rows "
            "in float32, float16 or bfloat16"
        )
    words = -(-logits.shape[1] // 32)
    shape = (len(rows), words)
    if mask.shape != shape or mask.dtype != torch.int32 or (words > 1 and mask.stride(1) != 1):
        raise ValueError(
            f"mask: got {mask.dtype} {tuple(mask.shape)}; accepted: torch.int32 {shape}, a row for "
            f"each of rows and a bit for each token"
        )
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(
            f"rows: got {rows.dtype} {tuple(rows.shape)}; accepted: torch.int64 [R], row numbers"
        )
    check_one_device(logits=logits, mask=mask, rows=rows)
