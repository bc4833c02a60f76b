"""What pages of the playground ask while a reader uses them: the lessons' own classes, run.

In a browser this file and those that it imports run as they are (packing.py). Each function takes
and returns what JSON can say.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from lessons.l12_paged_kv.blocks import BlockManager, OutOfBlocks
from lessons.l14_continuous_batching.clock import Arrival, CostExecutor, Log, VirtualClock, serve
from lessons.l14_continuous_batching.lab.cost import StepCost
from lessons.l14_continuous_batching.loop import Scheduler
from lessons.l14_continuous_batching.naive import DynamicScheduler, StaticScheduler
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.naive import PrefillFirstScheduler
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler

BLOCK_SIZE = 16  # tokens, of the time line
WINDOW_S = 0.05  # of the dynamic waves
NUM_BLOCKS, TOKENS_OF_A_BLOCK = 12, 4  # of the block tables
MOST_SEQUENCES = 6


def answer(name: str, asked: dict) -> dict:
    """One of ASKED's functions; {"error": words} for what the lesson's code refuses."""
    try:
        return ASKED[name](asked)
    except (ValueError, OutOfBlocks) as error:
        return {"error": str(error)}


# ---------------------------------------------------------------- lessons 14 and 15: a time line


@dataclass
class Recorded(CostExecutor):
    """An executor that keeps what each pass held: [row, tokens, 1 if they are of a prompt], and how
    many blocks were owned.
    """

    blocks: BlockManager
    kept: list[dict] = field(default_factory=list)

    def __call__(self, step: Step) -> list[int]:
        chunks = [
            [chunk.sequence.row, chunk.count, int(not chunk.sequence.is_decoding)]
            for chunk in step.chunks
        ]
        self.kept.append({"chunks": chunks, "used": self.blocks.num_blocks - self.blocks.num_free})
        return super().__call__(step)


def scheduler_of(policy: str, asked: dict, blocks: BlockManager, clock: VirtualClock) -> Scheduler:
    """The lessons' scheduler of this name."""
    places, budget = asked["places"], asked["budget"]
    policies: dict[str, Callable[[], Scheduler]] = {
        "static waves": lambda: StaticScheduler(places),
        "waves with a window": lambda: DynamicScheduler(places, WINDOW_S, clock),
        "continuous": lambda: ContinuousScheduler(blocks, places, budget),
        "prompts first": lambda: PrefillFirstScheduler(blocks, places, budget),
        "chunks": lambda: ChunkedScheduler(blocks, places, budget),
    }
    return policies[policy]()


def timeline(asked: dict) -> dict:
    """Requests that a visitor made, served by one policy.

    asked: policy; places, budget (tokens of a step), blocks; cost: seconds of a step, of a token
    and of a token of context; requests: [ms of arrival, tokens of prompt, tokens of answer], in any
    order. A row is a place in this list. Times in the answer are ms.
    """
    clock, blocks = VirtualClock(), BlockManager(asked["blocks"], BLOCK_SIZE)
    scheduler = scheduler_of(asked["policy"], asked, blocks, clock)
    execute = Recorded(clock, StepCost(*asked["cost"]), blocks)
    requests = asked["requests"]
    # `serve` numbers requests as they arrive.
    rows = sorted(range(len(requests)), key=lambda row: requests[row][0])
    trace = [
        Arrival(ms / 1e3, [1] * prompt, output)
        for ms, prompt, output in map(requests.__getitem__, rows)
    ]
    log = serve(scheduler, trace, execute, clock)
    passes = [
        {
            "start": rounded(one.start_s),
            "end": rounded(one.end_s),
            "chunks": [[rows[row], count, kind] for row, count, kind in kept["chunks"]],
            "used": kept["used"],
            "computed": one.computed_tokens,
            "wanted": one.wanted_tokens,
        }
        for one, kept in zip(log.passes, execute.kept)
    ]
    return {"passes": passes, "rows": served(log, rows), "totals": totals(log)}


def served(log: Log, rows: list[int]) -> list[dict]:
    """Of each request, in the visitor's order: ms from its arrival to its first token and to its
    end, and the longest wait between two tokens.
    """
    found: list[dict] = [{} for _ in rows]
    for number, row in enumerate(rows):
        begin, times = log.arrived_s[number], log.token_s[number]
        gaps = [times[at] - times[at - 1] for at in range(1, len(times))]  # Brython has no pairwise
        found[row] = {
            "first": rounded(times[0] - begin),
            "left": rounded(log.left_s[number] - begin),
            "gap": rounded(max(gaps, default=0.0)),
        }
    return found


def totals(log: Log) -> dict:
    """Of the whole run."""
    computed = sum(one.computed_tokens for one in log.passes)
    wanted = sum(one.wanted_tokens for one in log.passes)
    return {
        "passes": len(log.passes),
        "makespan": rounded(log.makespan_s),
        "rate": round(log.tokens_per_s),
        "wasted": round(100 * (1 - wanted / computed)),
    }


def rounded(seconds: float) -> float:
    """ms, to a tenth."""
    return round(1e3 * seconds, 1)


# ---------------------------------------------------------------- lesson 12: block tables


@dataclass
class Tables:
    """A pool of blocks, and how many tokens each sequence has: `held` in blocks, `away` on the
    host.
    """

    manager: BlockManager
    held: dict[int, int] = field(default_factory=dict)
    away: dict[int, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    count: int = 0

    def new(self, tokens: int) -> str:
        """A sequence of so many tokens."""
        if self.count == MOST_SEQUENCES:
            raise ValueError(f"{MOST_SEQUENCES} sequences were made; accepted: that many")
        self.manager.grow(self.count, 0, tokens)
        self.held[self.count] = tokens
        self.count += 1
        return f"sequence {self.count - 1} has {tokens} tokens"

    def grow(self, row: int) -> str:
        """One token more."""
        self.copies = self.manager.grow(row, self.held[row], self.held[row] + 1)
        self.held[row] += 1
        copied = "".join(
            f"; block {old} was shared, so {new} is its copy" for old, new in self.copies
        )
        return f"sequence {row} has a token more{copied}"

    def fork(self, row: int) -> str:
        """A second sequence over the same blocks."""
        if self.count == MOST_SEQUENCES:
            raise ValueError(f"{MOST_SEQUENCES} sequences were made; accepted: that many")
        self.manager.fork(row, self.count)
        self.held[self.count] = self.held[row]
        self.count += 1
        return f"sequence {self.count - 1} shares all blocks of {row}"

    def free(self, row: int) -> str:
        """It has ended."""
        self.manager.free(row)
        del self.held[row]
        return f"sequence {row} has ended"

    def out(self, row: int) -> str:
        """Its K and V move to the host, as in lesson 12's more/swap.py."""
        self.away[row] = self.held[row]
        self.free(row)
        return f"sequence {row} waits in host memory"

    def back(self, row: int) -> str:
        """They come back, into whichever blocks are free."""
        self.manager.receive(row, self.away[row])
        self.held[row] = self.away.pop(row)
        return f"sequence {row} is back, in other blocks perhaps"

    def filled(self) -> list[int]:
        """How many tokens each block has."""
        size, found = self.manager.block_size, [0] * self.manager.num_blocks
        for row, table in self.manager.tables.items():
            for at, block in enumerate(table):
                found[block] = max(found[block], min(size, self.held[row] - at * size))
        return found


def block_tables(asked: dict) -> dict:
    """What a pool looks like after these actions. asked: {"actions": [[name of a method of Tables,
    its number]]}. An action that fails changes nothing, and is told.
    """
    state, said = Tables(BlockManager(NUM_BLOCKS, TOKENS_OF_A_BLOCK)), "all blocks are free"
    for name, number in asked["actions"]:
        state.copies = []
        try:
            said = getattr(state, name)(number)
        except (ValueError, OutOfBlocks) as error:
            said = f"refused: {error}"
    manager = state.manager
    return {
        "said": said,
        "owners": manager.pool.owners,
        "filled": state.filled(),
        "next": list(manager.pool.free),
        "tables": [[row, state.held[row], manager.tables[row]] for row in sorted(state.held)],
        "away": [[row, state.away[row]] for row in sorted(state.away)],
        "copies": [list(copy) for copy in state.copies],
        "full": int(state.count == MOST_SEQUENCES),
    }


ASKED: dict[str, Callable[[dict], dict]] = {"timeline": timeline, "blocks": block_tables}
