"""Histories for the engine: who comes when, with what wishes, who gives up, which passes fail; and
what every request must get.

The model is lesson 15's memory of tokens, so a block that was lost, mixed up or not copied is seen
at once; its logits are a row of a table, chosen by a hash of the context. Everything else is the
engine itself.
"""

from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from lessons.l02_naive_attention.sampling import sample
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l15_chunked_prefill.lab.histories import ChunkedRules, Rules
from lessons.l15_chunked_prefill.lab.virtual import VOCAB, VirtualModel
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import Host, Lender
from lessons.toolbox.model.config import ModelConfig
from reference.engine.engine import Engine
from reference.engine.model_runner import ModelRunner
from reference.engine.request import EngineRequest, by_priority
from reference.engine.sampling_params import SamplingParams
from tests.engine_cases import assert_clean

CONFIG = ModelConfig("llama", VOCAB, 48, 2, 6, 2, 8, 64, 96, eos_token_ids=(VOCAB - 1,))
LONGEST = 40
LOGITS = 2 * torch.randn(509, VOCAB, generator=torch.Generator().manual_seed(0))
COMMON = [(7 * i) % 89 for i in range(16)]  # how the prompts of some requests begin


class Asked(NamedTuple):
    """A request. Steps are counted from 0; aborts: before that step its client gives up."""

    arrives: int
    prompt_len: int
    limit: int
    answers: int = 1
    priority: int = 0
    begins_as_others: bool = False
    scores_prompt: bool = False
    aborts: int | None = None

    def prompt(self, index: int) -> list[int]:
        own = [(31 * index + 5 * i) % 91 for i in range(self.prompt_len)]
        return (COMMON + own)[: self.prompt_len] if self.begins_as_others else own

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(
            n=self.answers,
            temperature=1.0,
            seed=100 * index,
            max_tokens=self.limit,
            prompt_logprobs=0 if self.scores_prompt else None,
            detokenize=False,
        )


class House(NamedTuple):
    """What the engine is made of. host_blocks: None preempts by computing again."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    cache: type | None = None
    host_blocks: int | None = None


class PassFailed(RuntimeError):
    """What a planned fault raises."""


class VirtualRunner:
    """In the place of ModelRunner. faults: {step: "before" its writes, "after" them, or in its
    "logits"}. hidden: [T] int64, the hash of each token's context.
    """

    def __init__(self, blocks: BlockManager, rules: Rules | None, faults: dict[int, str]):
        self.model = torch.nn.Identity()
        self.model.config, self.model.device = CONFIG, torch.device("cpu")
        self.virtual = VirtualModel(blocks)
        self.rules, self.faults, self.steps = rules, faults, 0
        self.features, self.adapters, self.sight = None, None, None

    def __call__(self, step, tables) -> Tensor:
        self.rules.check(step)
        self.fail("before")
        self.virtual.copy(step)
        for sequence, count in step.chunks:
            self.virtual.write(sequence, count)
        self.wrote(step, tables)
        self.fail("after")
        hidden = []
        for sequence, count in step.chunks:
            context = self.virtual.read(sequence, count)
            hidden += hashes(context)[-count:]
        return torch.tensor(hidden)

    def wrote(self, step, tables) -> None:
        """What happens to what was written, before it is known whether the pass succeeds."""

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        self.fail("logits")
        return LOGITS[hidden[rows] % len(LOGITS)].clone()

    scores = ModelRunner.scores

    def fail(self, where: str) -> None:
        if self.faults.get(self.steps) == where:
            raise PassFailed(where)


def hashes(context: list[int]) -> list[int]:
    """The hash of the tokens up to each of them."""
    found, last = [], 0
    for token in context:
        last = crc32(bytes([token]), last)
        found.append(last)
    return found


def logits_after(
    table: Tensor, sequence, output: list[int], read: list[int] | None = None
) -> Tensor:
    """[1, VOCAB], without the stop tokens that come too early. read: what the model reads in the
    place of the output.
    """
    last = hashes(sequence.prompt + (output if read is None else read))[-1]
    logits = table[last % len(table)][None].clone()
    if len(output) < sequence.params.min_tokens:
        logits[:, list(sequence.stop_token_ids)] = -torch.inf
    return logits


def new_engine(
    house: House, faults: dict[int, str], kind: type[Engine], new_scheduler=ChunkedScheduler
) -> Engine:
    size = house.num_blocks, house.block_size
    if house.cache is None:
        blocks = BlockManager(*size)
    else:
        blocks = CachingBlockManager(*size, house.cache(house.block_size))
    runner = VirtualRunner(blocks, None, faults)
    how = dict(
        max_num_seqs=house.max_num_seqs,
        max_num_batched_tokens=house.max_num_batched_tokens,
        enable_chunked_prefill=house.enable_chunked_prefill,
        order=by_priority,
    )
    if house.host_blocks is not None:
        swap = HostSwap(Lender(runner.virtual.memory, blocks))
        how["host"] = Host(swap, house.host_blocks)
    scheduler = new_scheduler(blocks, **how)
    runner.rules = (ChunkedRules if house.enable_chunked_prefill else Rules)(scheduler)
    return kind(runner, scheduler, None, LONGEST)


class History:
    """A history under way. What it has met is counted in `seen`, so that a test can ask for it."""

    def __init__(
        self,
        house: House,
        requests: list[Asked],
        faults: dict[int, str],
        kind=Engine,
        engine: Engine | None = None,
    ):
        self.engine = engine or new_engine(house, faults, kind)
        self.house, self.asked = house, requests
        self.requests: dict[int, EngineRequest] = {}
        self.ended: dict[int, str] = {}  # how: "finished", "aborted", "failed", or "refused"
        self.seen = {"preempted": 0, "swapped": 0, "cached": 0}

    def run(self) -> None:
        """All of it. Raises AssertionError at the first rule that is broken."""
        runner = self.engine.runner
        coming = sorted(range(len(self.asked)), key=lambda index: self.asked[index].arrives)
        while coming or self.engine.has_unfinished_requests:
            while coming and self.asked[coming[0]].arrives <= runner.steps:
                self.arrive(coming.pop(0))
            for index in list(self.requests):
                if self.asked[index].aborts == runner.steps and index not in self.ended:
                    self.engine.abort_request(str(index))
                    self.ended[index] = "aborted"
            self.step()
            runner.steps += 1
            assert runner.steps < 5_000, "the engine makes no progress"
        self.check_end()

    def arrive(self, index: int) -> None:
        asked, engine = self.asked[index], self.engine
        prompt = asked.prompt(index)
        try:
            engine.add_request(str(index), prompt, self.params(index), asked.priority)
        except ValueError as error:
            assert self.can_never_fit(asked), f"refused without a reason: {error}"
            assert "\n" not in str(error) and str(index) not in engine.requests
            self.ended[index] = "refused"
            return
        assert not self.can_never_fit(asked), "accepted, although it can never fit"
        self.requests[index] = engine.requests[str(index)]

    def params(self, index: int) -> SamplingParams:
        return self.asked[index].params(index)

    def alone(self, sequence) -> list[int]:
        """The answer that a sequence gets when no other request is there."""
        output = []
        while len(output) < sequence.max_new_tokens and output[-1:] != [VOCAB - 1]:
            logits = self.logits_after(LOGITS, sequence, output)
            output += sample(logits, [sequence.sampling], [sequence.prompt], [output])
        return output

    def logits_after(self, table: Tensor, sequence, output: list[int], read=None) -> Tensor:
        """What the next token is sampled from. A feature that changes it does so here."""
        return logits_after(table, sequence, output, read)

    def can_never_fit(self, asked: Asked) -> bool:
        house = self.house
        if asked.prompt_len >= LONGEST:
            return True
        most = asked.prompt_len + min(asked.limit, LONGEST - asked.prompt_len) - 1
        return (
            asked.answers > house.max_num_seqs
            or -(-most // house.block_size) > house.num_blocks
            or (not house.enable_chunked_prefill and most > house.max_num_batched_tokens)
        )

    def step(self) -> None:
        sequences = [s for request in self.requests.values() for s in request.sequences]
        self.engine.runner.rules.departures = sum(s.finished for s in sequences)
        before = set(self.engine.requests)
        try:
            for output in self.engine.step():
                if output.finished:
                    self.ended[int(output.request_id)] = "finished"
        except PassFailed:
            for id in before - set(self.engine.requests):
                self.ended[int(id)] = "failed"

    def check_end(self) -> None:
        assert_clean(self.engine)
        assert set(self.ended) == set(range(len(self.asked))), "a request was forgotten"
        for index, request in self.requests.items():
            for sequence in request.sequences:
                assert sequence.finished
                want, got = self.alone(sequence), sequence.output
                has_ended = self.ended[index] == "finished"
                assert got == (want if has_ended else want[: len(got)]), "tokens of another request"
            self.check_prompt(request)
            self.seen["preempted"] += sum(s.preemptions for s in request.sequences)
            self.seen["cached"] += request.num_cached_tokens
        if self.house.host_blocks is not None:
            self.seen["swapped"] = self.engine.scheduler.host.swap.swapped_bytes

    def check_prompt(self, request: EngineRequest) -> None:
        """Its prompt's log-probabilities, as far as the prompt was read: each once, none twice."""
        prompt, found = request.prompt_token_ids, request.prompt_logprobs
        if found is None:
            return
        contexts = torch.tensor(hashes(prompt))
        wanted = LOGITS[contexts % len(LOGITS)].log_softmax(-1)
        has_read = any(sequence.output for sequence in request.sequences)
        assert len(found) == len(prompt) if has_read else len(found) <= len(prompt)
        for at, logprobs in enumerate(found[1:], 1):
            got = logprobs[prompt[at]].logprob
            assert abs(got - wanted[at - 1, prompt[at]].item()) < 1e-4, "another token's score"
