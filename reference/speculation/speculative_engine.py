"""The engine with speculation. Read `run` beside engine.py's: there a step samples a token for each
sequence, here it drafts, verifies, and emits one token or more.
"""

import time

from torch import Tensor

from lessons.l12_paged_kv.runner import copy_blocks
from lessons.l14_continuous_batching.sequence import Chunk, Step
from lessons.l17_tree_speculation.runner import compact, path_moves
from reference.engine.engine import Engine
from reference.engine.outputs import RequestOutput, SpeculationCounts
from reference.engine.request import EngineRequest, EngineSequence, ends
from reference.speculation.lookahead import DraftedSequence, LookaheadScheduler
from reference.speculation.protocol import NO_DRAFT, Draft, Proposer, Ran
from reference.speculation.verification import Emitted, Verifier

Drafts = dict[EngineSequence, Draft]


class SpeculativeEngine(Engine):
    """An engine whose sequences get several tokens from one pass of the target.

    scheduler: a LookaheadScheduler, whose proposer drafts. Other arguments are Engine's.
    """

    sequence_kind = DraftedSequence
    scheduler: LookaheadScheduler

    def __init__(self, *args, **arguments):
        super().__init__(*args, **arguments)
        self.sampler = Verifier()
        self.speculation = SpeculationCounts()

    @property
    def proposer(self) -> Proposer:
        return self.scheduler.proposer

    def add_request(self, request_id, *args, **arguments) -> None:
        """As in engine.py. Its metrics count what speculation does for it."""
        super().add_request(request_id, *args, **arguments)
        self.requests[request_id].metrics.speculation = SpeculationCounts()

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """As in engine.py; the proposer forgets, too."""
        request = self.requests.get(request_id) if isinstance(request_id, str) else None
        output = super().abort_request(request_id)
        for sequence in [] if request is None else request.sequences:
            self.proposer.forget(sequence)
        return output

    # ------------------------------------------------------------ a step

    def run(self, step: Step) -> list[EngineRequest]:
        """Draft, run, verify, tell, tidy up. Returns the requests that got a token."""
        tables = self.scheduler.blocks.tables
        drafts = self.draft(step)
        hidden = self.runner(step, tables)
        self.score_prompts(step, hidden)
        emitted = self.verify(step, hidden, drafts)
        self.hand_out(emitted, drafts)
        ran = self.keep(step, drafts, emitted)
        # Before `finish` tells the prefix cache of full blocks: they are full of the proposer's K
        # and V, too, or of none.
        self.proposer.observe(ran, self.runner.features, tables)
        self.scheduler.finish(step)
        self.fork(emitted)
        for sequence in self.scheduler.leave():
            self.proposer.forget(sequence)
        return list(dict.fromkeys(sequence.request for sequence in emitted))

    def draft(self, step: Step) -> Drafts:
        """Fill the places of the step with drafted tokens; places for which there are none go."""
        for pool in self.proposer.pools:
            copy_blocks(pool, step.copies)
        waiting = [chunk.sequence for chunk in step.chunks if chunk.sequence.drafted]
        if not waiting:
            return {}
        counts = [len(sequence.drafted) for sequence in waiting]
        found = self.proposer.propose(waiting, counts, self.scheduler.blocks.tables)
        drafts = dict(zip(waiting, found))
        for sequence, draft in drafts.items():
            # Where nothing was drawn any token will do: what follows it is not asked for.
            sequence.look_ahead([max(token, 0) for token in draft.tokens], draft.tree)
        step.chunks[:] = [
            Chunk(sequence, sequence.to_compute if sequence in drafts else count)
            for sequence, count in step.chunks
        ]
        return drafts

    def verify(self, step: Step, hidden: Tensor, drafts: Drafts) -> dict[EngineSequence, Emitted]:
        """What each sequence emits whose newest token has run, and each that forks from one now.
        hidden: [T, hidden_size].
        """
        rows, sequences = [], []
        for last, chunk in ends(step):
            if not chunk.is_sampled:
                continue
            children = chunk.sequence.request.waiting_to_fork
            rows += range(last - len(chunk.sequence.drafted), last + 1)
            rows += [last] * len(children)
            sequences += [chunk.sequence, *children]
        if not rows:
            return {}
        proposed = [drafts.get(sequence, NO_DRAFT) for sequence in sequences]
        return dict(
            zip(sequences, self.sampler(self.runner.logits(hidden, rows), sequences, proposed))
        )

    def hand_out(self, emitted: dict[EngineSequence, Emitted], drafts: Drafts) -> None:
        """Give each sequence its tokens, up to a stop."""
        now = time.monotonic()
        self.drafts = {}
        for sequence, (tokens, logprobs, _) in emitted.items():
            sequence.look_ahead([])
            before = len(sequence.output)
            for token, found in zip(tokens, logprobs):
                if not sequence.finished:
                    sequence.take(token, found)
            got = len(sequence.output) - before
            # Nodes of a tree for which nothing could be drawn are none.
            drafted = sum(token >= 0 for token in drafts.get(sequence, NO_DRAFT).tokens)
            accepted, metrics = min(got, len(tokens) - 1), sequence.request.metrics
            for counts in (self.speculation, metrics.speculation):
                counts.add(drafted, accepted, got)
            if drafted:
                self.drafts[sequence.row] = drafted, accepted
            metrics.first_token = metrics.first_token or now
            metrics.last_token = now

    def keep(self, step: Step, drafts: Drafts, emitted: dict[EngineSequence, Emitted]) -> list[Ran]:
        """Cut the step down to the tokens that stay, as if no others had been drafted. The path
        that stays of a tree moves together in the cache. What does not stay keeps its slots, and
        the next step writes over it.
        """
        ran, moves = [], []
        for at, (last, (sequence, count)) in enumerate(ends(step)):
            first_row, held = last + 1 - count, sequence.computed
            rows = range(first_row, last + 1)
            if sequence in drafts:
                # All of its tokens but the newest, which was sampled from the last row that stays.
                count = sequence.num_own - 1 - held
                path = list(emitted[sequence].path[:count])
                rows = [first_row + node for node in path]
                step.chunks[at] = Chunk(sequence, count)
                table = self.scheduler.blocks.tables[sequence.row]
                moves += path_moves(path, held, table, self.scheduler.blocks.block_size)
            ran.append(Ran(sequence, held, count, rows))
        if moves:
            compact(self.runner.pool, moves)
        return ran

    def fork(self, emitted: dict[EngineSequence, Emitted]) -> None:
        """Let the other answers of a request begin, now that its prompt has run."""
        for sequence in emitted:
            request = sequence.request
            children, request.waiting_to_fork = request.waiting_to_fork, []
            for child in children:
                self.scheduler.fork(sequence, child)
                self.proposer.fork(sequence, child)
