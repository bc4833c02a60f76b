"""Who samples in the place of an engine's sampler when the logits are in workers: says what each
sequence wants, and turns what comes back into what the engine takes.
"""

from concurrent.futures import Future
from typing import TYPE_CHECKING

from reference.engine.request import EngineSequence
from reference.engine.sampler import Emitted
from reference.engine.sampling_params import SamplingParams
from reference.parallel.runner import DistributedRunner, RemoteHidden
from reference.parallel.sampling import Sampled, Told, Wanted

if TYPE_CHECKING:  # few engines speculate
    from reference.speculation.protocol import Draft
    from reference.speculation.speculation import Speculation

LIKELIEST, SAMPLED, FETCHED = "likeliest", "sampled", "fetched"


class RemoteSampler:
    """In the place of an engine's `emit`. known: {number of a sequence: (the sequence, how many of
    its tokens the workers have)}, of those that they keep.
    """

    def __init__(self, runner: DistributedRunner, speculation: "Speculation | None" = None):
        self.runner, self.speculation = runner, speculation
        self.known: dict[int, tuple[EngineSequence, int]] = {}

    def __call__(
        self, hidden: RemoteHidden, rows: list[int], sequences: list[EngineSequence]
    ) -> list:
        """What each sequence gets: Emitted, or Verified in an engine that speculates. Raises
        ValueError for logits that are not finite, RankError.
        """
        found = self.begin(hidden, rows, sequences).read()
        return found if self.speculation is None else self.speculation.note(sequences, found)

    def begin(
        self, hidden: RemoteHidden, rows: list[int], sequences: list[EngineSequence]
    ) -> "Sampling":
        """Let the workers sample. rows: a row of the last step for each sequence, and for each of
        its drafted tokens. Without any, `read` waits until that step has run.
        """
        sampling = Sampling(self, sequences)
        told, likeliest, fetched, first = [], [], [], 0
        for sequence in sequences:
            draft = self.draft_of(sequence)
            tokens = [] if draft is None else draft.tokens
            own = rows[first : first + 1 + len(tokens)]
            first += len(own)
            way = way_of(sequence, draft)
            sampling.ways.append((way, draft))
            if way == LIKELIEST:
                likeliest += own
            elif way == FETCHED:
                fetched += own
            else:
                told.append(self.tell(sequence, own, tokens))
        gone = [id for id, (sequence, _) in self.known.items() if sequence.finished]
        for id in gone:
            del self.known[id]
        if likeliest or told or gone or not fetched:
            wanted = Wanted(likeliest, told, gone)
            sampling.reply = self.runner.ask_of(hidden, "sample", wanted)
        if fetched:
            sampling.logits = self.runner.ask_of(hidden, "logits", fetched)
        return sampling

    def draft_of(self, sequence: EngineSequence) -> "Draft | None":
        """What was drafted for it in this step; None: nothing."""
        return None if self.speculation is None else self.speculation.drafts.get(sequence)

    def tell(self, sequence: EngineSequence, rows: list[int], drafted: list[int]) -> Told:
        """What the workers need to hear of it."""
        who, count, masks = None, 0, None
        if sequence.row in self.known:
            _, count = self.known[sequence.row]
        else:
            who = wishes_of(sequence)
        new = sequence.output[count:]
        self.known[sequence.row] = sequence, len(sequence.output)
        if sequence.constraint is not None:
            found = [sequence.constraint.row(drafted[:ahead]) for ahead in range(len(rows))]
            masks = [each and (each.mask.numpy(), each.must_end) for each in found]
        return Told(sequence.row, rows, new, drafted, who, masks)

    def have(self, sequence: EngineSequence, count: int) -> None:
        """The workers have `count` more of its tokens, if it was not aborted meanwhile."""
        if sequence.row in self.known:
            _, before = self.known[sequence.row]
            self.known[sequence.row] = sequence, before + count


class Sampling:
    """A step that the workers sample. ways: of each sequence, (where it is sampled, its draft)."""

    def __init__(self, sampler: RemoteSampler, sequences: list[EngineSequence]):
        self.sampler, self.sequences = sampler, sequences
        self.ways: list[tuple[str, Draft | None]] = []
        self.reply: Future | None = None
        self.logits: Future | None = None
        self.found: list | None = None

    def read(self) -> list:
        """Wait for it: what each sequence emits. Raises ValueError, RankError."""
        if self.found is None:
            sampled = Sampled([], [])
            if self.reply is not None:
                [sampled] = [each for each in self.reply.result() if each is not None]
            if sampled.failed is not None:
                raise ValueError(sampled.failed)
            self.found = self.put_together(sampled)
        return self.found

    def put_together(self, sampled: Sampled) -> list:
        """Of all three ways, in the order of the sequences."""
        ways = zip(self.sequences, self.ways)
        emitted, fetched = iter(sampled.emitted), iter(self.verified())
        found, first = [], 0
        for sequence, (way, draft) in ways:
            if way == LIKELIEST:
                own = sampled.tokens[first : first + 1 + (len(draft.tokens) if draft else 0)]
                first += len(own)
                found.append(self.kept(own, draft))
            elif way == FETCHED:
                found.append(next(fetched))
            else:
                found.append(next(emitted))
                self.sampler.have(sequence, len(found[-1].tokens))
        return found

    def kept(self, tokens: list[int], draft: "Draft | None"):
        """What a greedy sequence emits. tokens: the likeliest of its rows."""
        if self.sampler.speculation is None:
            return Emitted(tokens, [None])
        from reference.speculation.protocol import NO_DRAFT
        from reference.speculation.verification import Verified, compared

        [(tokens, path)] = compared(tokens, [draft or NO_DRAFT])
        return Verified(tokens, [None] * len(tokens), path)

    def verified(self) -> list:
        """What sequences emit whose drafts were drawn here."""
        if self.logits is None:
            return []
        pairs = [
            (sequence, draft)
            for sequence, (way, draft) in zip(self.sequences, self.ways)
            if way == FETCHED
        ]
        logits = self.sampler.runner.read_logits(self.logits)
        return self.sampler.speculation.verifier(logits, *map(list, zip(*pairs)))


def way_of(sequence: EngineSequence, draft: "Draft | None") -> str:
    """Where its rows become tokens."""
    if draft is not None and draft.q is not None:
        return FETCHED
    asks_more = (
        sequence.bias is not None
        or sequence.bans is not None
        or sequence.constraint is not None
        or sequence.wants_logprobs
        or len(sequence.output) < sequence.params.min_tokens
    )
    return SAMPLED if asks_more or not sequence.is_greedy else LIKELIEST


def wishes_of(sequence: EngineSequence) -> EngineSequence:
    """What a sampler asks of a sequence, without its request, its text and its structure. Its
    prompt only where a penalty counts the tokens in it.
    """
    params = sequence.params
    asked = SamplingParams(
        n=params.n,
        best_of=params.best_of,
        logprobs=params.logprobs,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
    )
    return EngineSequence(
        row=sequence.row,
        prompt=sequence.prompt if sequence.sampling.has_penalties else [],
        max_new_tokens=sequence.max_new_tokens,
        sampling=sequence.sampling,
        stop_token_ids=frozenset(),
        params=asked,
        bias=sequence.bias,
        late_token_ids=sequence.late_token_ids,
        bans=sequence.bans,
    )
