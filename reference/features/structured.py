"""Structured outputs, under vLLM's names: what a request asks for, compiled once, and what each of
its answers may still say.

    SamplingParams(structured_outputs=StructuredOutputsParams(regex="(red|green)"))
    SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object", ...}))

Read `Constraint`: an answer holds a state of lesson 24's automaton, and a state never changes. So
forks, preemptions and drafts need nothing from it.

The mask comes before everything else that a request asks of its logits. Probabilities are then
those of the allowed tokens, and top-p counts only these. A text that is complete and cannot go on
ends, also before min_tokens. Reported log-probabilities stay those of the raw logits.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import DECODE_DTYPES
from lessons.l24_structured_outputs import naive, optimized, stand_ins
from lessons.l24_structured_outputs.languages.json_text import Layout
from lessons.l24_structured_outputs.languages.reading import KINDS, compile_structure, named
from lessons.l24_structured_outputs.languages.regex import read_regex
from lessons.l24_structured_outputs.matcher import State, TooAmbiguous
from lessons.l24_structured_outputs.optimized import TokenMasks
from lessons.l24_structured_outputs.vocabulary import Vocabulary, bytes_of_tokens
from lessons.toolbox.model.arguments import check_kind, refuse
from reference.engine.engine_args import takes_vllm_names

MOST_KEPT = 64  # compiled structures


@takes_vllm_names("StructuredOutputsParams")
@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of the first five says which texts are answers. Raises ValueError for anything else.

    json: a JSON schema, as a dict or as JSON. json_object: True for any JSON object. grammar: in
    GBNF or Lark's notation. disable_any_whitespace: JSON written in one way, as json.dumps does.
    whitespace_pattern: a regular expression of what may stand between the parts of JSON. The other
    two disable_ change nothing, because nothing falls back and properties that are not named are
    never added.
    """

    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self):
        if self.json_object is not None:
            check_kind(bool, "True, False or None", json_object=self.json_object)
        if self.structural_tag is not None:
            refuse(
                "structural_tag", self.structural_tag, f"None; one of {', '.join(KINDS)} instead"
            )
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            refuse("structured_outputs", given, f"one of {', '.join(KINDS)}")
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            check_kind(bool, "True or False", **{name: getattr(self, name)})
        if self.whitespace_pattern is not None:
            check_kind(
                str, "None, or a regular expression", whitespace_pattern=self.whitespace_pattern
            )

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def layout(self) -> Layout:
        """How JSON is written. Raises ValueError for a pattern that cannot be read."""
        if self.whitespace_pattern:
            return Layout.free(read_regex(self.whitespace_pattern, "whitespace_pattern"))
        return Layout.compact() if self.disable_any_whitespace else Layout.free()

    @property
    def key(self) -> str:
        """Equal for equal wishes. Raises ValueError for a value that JSON cannot write."""
        try:
            value = json.dumps(getattr(self, self.kind))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.kind}: {error}; accepted: a value of JSON") from None
        return f"{self.kind} {self.disable_any_whitespace} {self.whitespace_pattern} {value}"


@dataclass(frozen=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """vLLM's older name. backend: accepted, and without effect, because there is one."""

    backend: str | None = None


@dataclass(frozen=True)
class SentStructure(StructuredOutputsParams):
    """As a client of the server sent it. sent_as: its field; with "_" or "." at the end it is the
    beginning of one, and the kind is the rest, as in "guided_".
    """

    sent_as: str = "structured_outputs."

    def as_sent(self, message: str) -> str:
        """An error of compile_structure that names what the client sent."""
        if self.sent_as.endswith(("_", ".")):
            if message.startswith((self.kind, "whitespace_pattern")):
                return self.sent_as + message
            return f"{self.sent_as}{self.kind}: {message}"
        return f"{self.sent_as}: {message.removeprefix(f'{self.kind}: ')}"


def read_structured(name: str, value) -> StructuredOutputsParams | None:
    """A wish that may be a dict of the field names. Raises ValueError that names the argument."""
    kind = GuidedDecodingParams if name == "guided_decoding" else StructuredOutputsParams
    if not isinstance(value, dict):
        check_kind(
            (StructuredOutputsParams, type(None)), f"None or {kind.__name__}", **{name: value}
        )
        return value
    known = [field.name for field in fields(kind)]
    for key in value:
        if key not in known:
            refuse(name, key, f"the keys {', '.join(known)}")
    return kind(**value)


class Row(NamedTuple):
    """What may follow. mask: [ceil(V / 32)] int32, a bit for each token. must_end: whether nothing
    but an end token may.
    """

    mask: Tensor
    must_end: bool


class Constraint:
    """What one answer may still say. has_ended: whether it did. failure: why its grammar cannot be
    followed any more.
    """

    def __init__(self, masks: TokenMasks, end_tokens: frozenset[int]):
        self.masks = masks
        self.end_tokens = end_tokens
        self.state = masks.start
        self.failure: str | None = None
        self.has_ended = False
        self.stuck: set[State] = set()  # where there was no mask, so that only the end was allowed
        is_end = torch.zeros(len(masks.vocabulary), dtype=torch.bool)
        is_end[list(end_tokens)] = True
        self.end_mask = naive.packed(is_end)

    def take(self, token: int) -> None:
        """A token was sampled, one that `row` allowed."""
        if token in self.end_tokens:
            self.has_ended = True
            if self.state in self.stuck:
                self.failure = f"structured_outputs: {TooAmbiguous()}"
            return
        try:
            state = self.masks.advance(self.state, token)
        except TooAmbiguous as error:
            self.failure = f"structured_outputs: {error}"
            return
        if state is None:  # it is never sampled; if it is, other requests shall not suffer
            self.failure = f"structured_outputs: token {token} does not fit"
        else:
            self.state = state

    def count_fitting(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow the answer one after the other. An end token that
        may come counts, and no token after it does.
        """
        state = self.state
        for count, token in enumerate(tokens):
            if token in self.end_tokens:
                return count + state.may_end
            try:
                state = self.masks.advance(state, token)
            except TooAmbiguous:
                return count
            if state is None:
                return count
        return len(tokens)

    def row(self, ahead: Sequence[int] = ()) -> Row | None:
        """What may follow the answer and `ahead`, drafted tokens. None: these do not fit, so
        nothing needs the row.
        """
        state = self.state
        try:
            for token in ahead:
                state = self.masks.advance(state, token)
                if state is None:
                    return None
        except TooAmbiguous:  # so will `take` be, before it comes to this row
            return None
        try:
            mask = None if state in self.stuck else self.masks.mask(state)
        except TooAmbiguous:
            self.stuck.add(state)
        if state in self.stuck:
            return Row(self.end_mask, True)
        if not state.may_end:
            return Row(mask, False)
        return Row(mask | self.end_mask, not mask.any())


class Structures:
    """The compiled structures of an engine; the least recently asked for goes. Threads may share
    it.
    """

    def __init__(self, tokenizer, vocab_size: int):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.vocabulary: Vocabulary | None = None
        self.compiled: OrderedDict[str, TokenMasks] = OrderedDict()
        self.lock = threading.Lock()

    def prepare(self, params: StructuredOutputsParams) -> TokenMasks:
        """Compile what is asked for. A server may call this from another thread before it adds the
        request, because a large schema takes up to about a second. Raises ValueError in one line.
        """
        key = params.key
        with self.lock:
            masks = self.compiled.get(key)
        if masks is None:
            # Without the lock, because the engine's thread takes it for every request that has a
            # structure. Two threads may compile the same one; both get what was there first.
            masks = self.compile(params)
        with self.lock:
            masks = self.compiled.setdefault(key, masks)
            self.compiled.move_to_end(key)
            if len(self.compiled) > MOST_KEPT:
                self.compiled.popitem(last=False)
            return masks

    def compile(self, params: StructuredOutputsParams) -> TokenMasks:
        """Anew. Raises ValueError in one line."""
        if self.vocabulary is None:
            if self.tokenizer is None:
                raise ValueError("structured_outputs: this engine has no tokenizer; accepted: None")
            tokens = bytes_of_tokens(self.tokenizer, self.vocab_size)
            self.vocabulary = Vocabulary(tokens)
        automaton = compile_structure(params.kind, getattr(params, params.kind), params.layout)
        with named(params.kind):
            return TokenMasks(automaton, self.vocabulary)

    def constraint(
        self, params: StructuredOutputsParams, stop_token_ids: frozenset[int]
    ) -> Constraint:
        """What an answer may say. stop_token_ids: those of them that are no text end it where the
        text may end. Raises ValueError in one line.
        """
        masks = self.prepare(params)
        tokens = masks.vocabulary.tokens
        ends = frozenset(token for token in stop_token_ids if not tokens[token])
        if not ends:
            raise ValueError(
                "structured_outputs: this model has no end-of-sequence token; accepted: "
                "stop_token_ids with a special token"
            )
        return Constraint(masks, ends)


def apply_constraints(logits: Tensor, wanted: list[Row | None]) -> list[bool]:
    """-inf for tokens that a row's constraint forbids, in place. logits: [B, V]. wanted: of each
    row what Constraint.row gives; None: anything may follow, and the row stays as it is. Returns
    for each row whether only the end may follow.
    """
    rows = [row for row, found in enumerate(wanted) if found is not None]
    if rows:
        masks = torch.stack([wanted[row].mask for row in rows]).to(logits.device)
        places = torch.tensor(rows, device=logits.device)
        if logits.device.type == "cpu":
            apply = stand_ins.apply_token_mask
        else:
            is_read = logits.dtype in DECODE_DTYPES  # by the kernel
            apply = optimized.apply_token_mask if is_read else naive.apply_token_mask
        apply(logits, masks, places)
    return [found is not None and found.must_end for found in wanted]
