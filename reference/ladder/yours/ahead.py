"""Exercise 25.2, a loop that is one step ahead, where lesson 25 runs its own."""

from collections.abc import Callable

from lessons.l02_naive_attention.request import OnToken
from lessons.l14_continuous_batching.sequence import Chunk, Sequence, Step
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler
from lessons.l25_one_step_ahead.device import PLACEHOLDER, Pass
from lessons.l25_one_step_ahead.model_device import ModelDevice

STOP = -2  # what the exercise is told of any token that ends an answer


def run_ahead(yours: Callable, original: Callable) -> Callable:
    """decode_ahead in place of lesson 25's loop: the prompts are computed, all but their last
    tokens, for as many requests as find room; then the learner's loop writes their answers.
    """

    def run(scheduler: PreemptiveScheduler, device: ModelDevice, on_token: OnToken | None) -> None:
        if any(one.sampling.has_penalties or one.output for one in scheduler.waiting):
            return original(scheduler, device, on_token)  # of which the exercise does not speak
        while scheduler.waiting:
            wave = admitted(scheduler)
            fill(wave, scheduler, device)
            passes = Passes(device, wave, on_token)
            first, limits = [one.tokens[-1] for one in wave], [one.max_new_tokens for one in wave]
            passes.write(yours(passes, first, limits, STOP))
            for sequence in wave:
                scheduler.blocks.free(sequence.row)

    return run


def admitted(scheduler: PreemptiveScheduler) -> list[Sequence]:
    """The next requests, with blocks for their longest answers. `add` has refused those that would
    not fit alone.
    """
    wave, blocks = [], scheduler.blocks
    while scheduler.waiting and len(wave) < scheduler.max_num_seqs:
        first = scheduler.waiting[0]
        if not blocks.can_grow(first.row, 0, first.most_cached):
            break
        blocks.grow(first.row, 0, first.most_cached)
        wave.append(scheduler.waiting.pop(0))
    return wave


def fill(wave: list[Sequence], scheduler: PreemptiveScheduler, device: ModelDevice) -> None:
    """Compute the prompts but for their last tokens, in steps of the scheduler's budget."""
    while waiting := [one for one in wave if one.to_compute > 1]:
        step = Step([], [])
        for sequence in waiting:
            room = scheduler.max_num_batched_tokens - step.num_tokens
            if room:
                step.chunks.append(Chunk(sequence, min(room, sequence.to_compute - 1)))
        device.launch(step)
        for sequence, count in step.chunks:
            sequence.computed += count


class Passes:
    """The exercise's Device over the lesson's: a pass runs one token of each of some sequences."""

    def __init__(self, device: ModelDevice, wave: list[Sequence], on_token: OnToken | None):
        self.device, self.wave, self.on_token = device, wave, on_token
        self.told: dict[Sequence, list[int]] = {sequence: [] for sequence in wave}
        self.last: Pass | None = None

    def start(self, tokens: list[int]) -> Pass:
        return self.launch(self.wave)

    def follow(self, rows: list[int]) -> Pass:
        return self.launch([self.last.sequences[row] for row in rows])

    def launch(self, sequences: list[Sequence]) -> Pass:
        """Begin a pass, and hold the places of its tokens."""
        passed = self.device.launch(Step([Chunk(one, 1) for one in sequences], []), self.last)
        self.device.sample(passed, sequences)
        for sequence in sequences:
            sequence.computed += 1
            sequence.append(PLACEHOLDER)
        self.last = passed
        return passed

    def read(self, launched: Pass) -> list[int]:
        tokens = self.device.read(launched)
        for sequence, token in zip(launched.sequences, tokens):
            told = self.told[sequence]
            has_ended = bool(told) and told[-1] in sequence.stop_token_ids
            told.append(token)
            if self.on_token is not None and not has_ended:
                self.on_token(sequence.row, token)
        stops = [one.stop_token_ids for one in launched.sequences]
        return [STOP if token in ends else token for token, ends in zip(tokens, stops)]

    def write(self, answers: list[list[int]]) -> None:
        """The answers into the sequences, with the tokens that ended them."""
        for sequence, answer in zip(self.wave, answers):
            del sequence.all_tokens[len(sequence.prompt) :], sequence.output[:]
            for place, token in enumerate(answer):
                sequence.append(self.told[sequence][place] if token == STOP else token)
