"""Beam search on the engine's blocks, under vLLM's names.

    params = BeamSearchParams(beam_width=4, max_tokens=20)
    for sequence in llm.beam_search(["def f("], params)[0].sequences:
        print(sequence.cum_logprob, sequence.text)

Read `Search.survive`, then `BeamSearch.run`. A beam that has several heirs is forked: they share
its blocks, and one is copied only when a branch writes into it (lesson 12).

Source: which beams survive and how they are ranked: vLLM, vllm/beam_search.py. A stop token ends a
beam, and its place goes to the next one, so `beam_width` beams run until the last token.
"""

import math
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lessons.l12_paged_kv.more.branches import Beam
from lessons.toolbox.model.arguments import check_kind, check_whole, is_number, refuse
from lessons.toolbox.model.placement import launching_on
from reference.engine.engine import Engine
from reference.engine.engine_args import takes_vllm_names
from reference.features.beam_runner import SearchRunner
from reference.features.structured import (
    Constraint,
    StructuredOutputsParams,
    apply_constraints,
    read_structured,
)

if TYPE_CHECKING:
    from lessons.l21_multi_lora.peft.adapters import Adapter
    from reference.vision.prompt import Placed

FAILED = object()  # a grammar that cannot be followed any more


@takes_vllm_names("BeamSearchParams")
@dataclass(frozen=True)
class BeamSearchParams:
    """How a search goes. Raises ValueError for a value that cannot work.

    length_penalty: a beam's score is the sum of its log-probabilities, divided by (tokens of prompt
    and answer, without a stop token) ** length_penalty. temperature changes nothing, because scores
    are those of the model's own distribution. structured_outputs, and guided_decoding, its older
    name: which texts are answers; scores stay those of the model.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # whether `text` shows the stop token
    skip_special_tokens: bool = True  # in `text`
    structured_outputs: StructuredOutputsParams | dict | None = None
    guided_decoding: StructuredOutputsParams | dict | None = None

    def __post_init__(self):
        for name in ("structured_outputs", "guided_decoding"):
            object.__setattr__(self, name, read_structured(name, getattr(self, name)))
        if self.structured_outputs and self.guided_decoding:
            refuse("guided_decoding", self.guided_decoding, "None beside structured_outputs")
        if self.structure and self.ignore_eos is True:
            refuse("ignore_eos", True, "False, because such an answer ends where its text does")
        check_whole(beam_width=self.beam_width, max_tokens=self.max_tokens)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_kind(bool, "True or False", **{name: getattr(self, name)})
        if not is_number(self.temperature, 0):
            refuse("temperature", self.temperature, "a finite number, 0 or more")
        if not is_number(self.length_penalty, -10, 10):  # wider ones overflow the divisor
            refuse("length_penalty", self.length_penalty, "a number from -10 to 10")

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """Which texts are answers, under either name; None: all are."""
        return self.structured_outputs or self.guided_decoding


@dataclass
class BeamSearchSequence:
    """One beam. tokens: of prompt and answer. text: what they decode to, special tokens included.
    finish_reason: "stop" or "length".
    """

    tokens: list[int]
    cum_logprob: float  # of the answer, natural logarithms
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None  # the token that ended it


@dataclass
class BeamSearchOutput:
    """The best `beam_width` beams of a prompt, the best first; fewer where a structure allows
    fewer.
    """

    sequences: list[BeamSearchSequence]


@dataclass
class Search:
    """The search for one prompt. room: tokens that its beams may get. names: under which the runner
    knows the beams. constraints: what each beam may still say; empty if any text is an answer.
    pictures: and where they are in the prompt. adapter: held on the host until the search ends.
    """

    prompt: list[int]
    room: int
    params: BeamSearchParams
    stop_token_ids: frozenset[int]
    beams: list[Beam] = field(default_factory=lambda: [Beam(0.0, [])])
    completed: list[Beam] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    constraints: list[Constraint] = field(default_factory=list)
    pictures: tuple["Placed", ...] = ()
    adapter: "Adapter | None" = None

    @property
    def finished(self) -> bool:
        return not self.beams or len(self.beams[0].tokens) >= self.room

    def survive(self, logits: Tensor) -> list[int]:
        """One token more. logits: [len(beams), V]. Returns whose heir each of the new beams is.

        Twice the width of each beam's continuations are looked at, so that enough are left when
        some end in a stop token.
        """
        width, found = self.params.beam_width, []
        # float64, because beams that differ in one token may differ little in their sums
        scores = logits.double().log_softmax(-1)
        if self.constraints:
            apply_constraints(scores, [constraint.row() for constraint in self.constraints])
        best = scores.topk(min(2 * width, scores.shape[-1]))
        rows = zip(self.beams, best.values.tolist(), best.indices.tolist())
        for parent, (beam, logprobs, tokens) in enumerate(rows):
            for logprob, token in zip(logprobs, tokens):
                heir = Beam(beam.logprob + logprob, [*beam.tokens, token])
                if logprob == -math.inf or (then := self.follow(parent, token)) is FAILED:
                    continue  # forbidden, or it is not known whether it is
                if token in self.stop_token_ids:
                    self.completed.append(heir)
                else:
                    found.append((parent, heir, then))
        # All are of one length, so the penalty does not change their order.
        found = sorted(found, key=lambda one: -one[1].logprob)[:width]
        self.beams = [heir for _, heir, _ in found]
        self.constraints = [constraint for *_, constraint in found if constraint]
        return [parent for parent, *_ in found]

    def follow(self, parent: int, token: int) -> Constraint | None:
        """The constraint of a beam's heir; None if any text is an answer."""
        if not self.constraints:
            return None
        constraint = copy(self.constraints[parent])
        constraint.take(token)
        return FAILED if constraint.failure else constraint

    def score(self, beam: Beam) -> float:
        """By which beams of different lengths are ranked, as BeamSearchParams says."""
        ended = beam.tokens[-1] in self.stop_token_ids
        length = len(self.prompt) + len(beam.tokens) - ended
        return beam.logprob / length**self.params.length_penalty

    def output(self, tokenizer) -> BeamSearchOutput:
        """The best of those that have ended, and of those that had no room left."""
        ranked = sorted([*self.completed, *self.beams], key=self.score, reverse=True)
        best = ranked[: self.params.beam_width]
        return BeamSearchOutput([self.sequence(beam, tokenizer) for beam in best])

    def sequence(self, beam: Beam, tokenizer) -> BeamSearchSequence:
        """A beam as it is told. tokenizer: None tells no text."""
        tokens, last = [*self.prompt, *beam.tokens], beam.tokens[-1]
        stop = last if last in self.stop_token_ids else None
        is_hidden = stop is not None and not self.params.include_stop_str_in_output
        shown = tokens[:-1] if is_hidden else tokens
        skip = self.params.skip_special_tokens
        text = None if tokenizer is None else tokenizer.decode(shown, skip_special_tokens=skip)
        reason = "length" if stop is None else "stop"
        return BeamSearchSequence(tokens, beam.logprob, text, reason, stop)


class BeamSearch:
    """Searches that share an engine's blocks. The engine must have nothing else to do."""

    def __init__(self, engine: Engine, params: BeamSearchParams):
        check_kind(BeamSearchParams, "BeamSearchParams", params=params)
        scheduler = engine.scheduler
        if engine.has_unfinished_requests:
            raise ValueError(
                f"engine: {len(engine.requests)} requests are not finished; accepted: an idle one, "
                f"because a search needs its blocks"
            )
        if params.beam_width > scheduler.max_num_seqs:
            accepted = f"at most {scheduler.max_num_seqs} (max_num_seqs)"
            refuse("beam_width", params.beam_width, accepted)
        self.engine = engine
        self.params = params
        self.blocks = scheduler.blocks
        self.runner = SearchRunner(engine.runner, self.blocks)

    def new_search(self, prompt: str | list[int], lora_request=None) -> Search:
        """lora_request: the adapter that answers; None: the base model. Raises ValueError for a
        prompt that cannot be served.
        """
        engine, params = self.engine, self.params
        _, ids, pictures = engine.read_prompt(prompt)
        room = min(params.max_tokens, engine.max_model_len - len(ids))
        eos = () if params.ignore_eos else engine.runner.model.config.eos_token_ids
        search = Search(ids, room, params, frozenset(eos), pictures=pictures)
        if params.structure is not None:
            search.constraints = [engine.structures.constraint(params.structure, frozenset(eos))]
        if (need := self.most_blocks(search)) > self.blocks.num_blocks:
            raise ValueError(
                f"beam_width, max_tokens: {params.beam_width} beams of {len(ids)} + {room} tokens "
                f"may need {need} blocks; accepted: at most {self.blocks.num_blocks}, the whole "
                "pool"
            )
        search.adapter = engine.take_adapter(lora_request)  # last, because it has to be given back
        return search

    def let_go(self, search: Search) -> None:
        """A search has ended, or will not begin: it needs no adapter any more."""
        if search.adapter is not None:
            self.engine.runner.adapters.store.give_back(search.adapter)
            search.adapter = None

    def most_blocks(self, search: Search) -> int:
        """What a search takes if no beam shares a block."""
        # - 1, because nothing is computed from the last token
        longest = len(search.prompt) + search.room - 1
        return self.params.beam_width * self.blocks.blocks_for(longest)

    def next_group(self, waiting: list[Search]) -> list[Search]:
        """The first of those that wait: as many as have blocks, places and adapter slots."""
        group, blocks, adapters = [], 0, set()
        places = self.engine.scheduler.max_num_seqs // self.params.beam_width
        for search in waiting[:places]:
            blocks += self.most_blocks(search)
            adapters |= {search.adapter} - {None}
            has_slots = not adapters or len(adapters) <= self.engine.runner.adapters.slots.num_slots
            if blocks > self.blocks.num_blocks or not has_slots:
                break
            group.append(search)
        return group

    def run(self, group: list[Search]) -> None:
        """All searches of a group, token by token. Whatever happens, no block stays taken."""
        with launching_on(self.engine.runner.model.device):
            self.run_here(group)

    def run_here(self, group: list[Search]) -> None:
        """`run`, with kernels launched where the model lies."""
        try:
            running, logits = group, torch.cat([self.read(search) for search in group])
            while running:
                counts = [len(search.beams) for search in running]
                for search, rows in zip(running, logits.split(counts)):
                    self.pass_on(search, search.survive(rows))
                running = [search for search in running if not search.finished]
                if running:
                    logits = self.runner.step(
                        {
                            name: beam.tokens[-1:]
                            for search in running
                            for name, beam in zip(search.names, search.beams)
                        }
                    )
        finally:
            for name in list(self.runner.held):
                self.runner.free(name)
            for search in group:
                self.let_go(search)

    def read(self, search: Search) -> Tensor:
        """Run a prompt, in chunks that a step has room for. Returns logits: [1, V]."""
        name = next(self.engine.ids)
        search.names = [name]
        if search.adapter is not None:
            self.runner.adapter_of[name] = search.adapter
        most = self.engine.scheduler.max_num_batched_tokens
        for start in range(0, len(search.prompt), most):
            tokens = search.prompt[start : start + most]
            logits = self.runner.read(name, tokens, search.pictures)
        return logits

    def pass_on(self, search: Search, parents: list[int]) -> None:
        """The new beams take over the blocks of the old, those without heirs give theirs back."""
        heirs = [] if search.finished else [next(self.engine.ids) for _ in parents]
        for heir, parent in zip(heirs, parents):
            self.runner.fork(search.names[parent], heir)
        # After all forks. The last heir of a beam then owns its blocks alone and copies nothing.
        for name in search.names:
            self.runner.free(name)
        search.names = heirs
