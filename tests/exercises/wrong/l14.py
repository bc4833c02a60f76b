"""Wrong answers to lesson 14's exercises: real slips, and the hint for whoever made them."""

import heapq
from functools import partial

import torch

from lessons.l14_continuous_batching.lab import testing
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l14_continuous_batching.sequence import Chunk, Step
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 14.1 what a place is worth


def waves_of(lengths, num_places):
    return [lengths[i : i + num_places] for i in range(0, len(lengths), num_places)]


def slipped_places(
    lengths,
    num_places,
    *,
    waves="arrival",
    wave_takes="longest",
    refill="first free",
    late=0,
    area="all places",
    gain="bound",
):
    """The four numbers with some slips, spelled by switches."""
    ordered = sorted(lengths) if waves == "sorted" else lengths
    groups = waves_of(ordered, num_places)
    takes = {"longest": max, "mean": lambda wave: round(sum(wave) / len(wave)), "sum": sum}
    static = sum(takes[wave_takes](wave) for wave in groups)
    if refill == "no tail":
        continuous = -(-sum(lengths) // num_places)
    elif refill == "in turn":
        continuous = max(sum(lengths[place::num_places]) for place in range(num_places))
    elif refill == "longest first":
        continuous = list_steps(sorted(lengths, reverse=True), num_places, late)
    else:
        continuous = list_steps(lengths, num_places, late)
    places = {
        "all places": static * num_places,
        "places in use": sum(max(wave) * len(wave) for wave in groups),
    }[area]
    busy = sum(lengths) / places
    if gain == "longest for all":
        busy = sum(max(wave) * len(wave) for wave in groups) / places
    most = {"ratio": static / continuous, "idle": 1 + (1 - busy)}.get(gain, 1 / busy)
    return static, continuous, busy, most


def list_steps(lengths, num_places, late):
    """Steps of places that each take the next request, `late` steps after they have fallen free."""
    free = [0] * num_places
    for length in lengths:
        at = heapq.heappop(free)
        heapq.heappush(free, at + length + (late if at else 0))
    return max(free)


for name, slip, hint in [
    ("waves_sorted", dict(waves="sorted"), "You sort the answers. Nobody knows their lengths."),
    ("waves_take_the_mean", dict(wave_takes="mean"), "A wave ends with its longest answer."),
    ("waves_take_the_sum", dict(wave_takes="sum"), "The requests of a wave run side by side."),
    (
        "no_tail",
        dict(refill="no tail"),
        "Total over places is a lower bound: in the end some places find nobody to take them.",
    ),
    (
        "places_in_turn",
        dict(refill="in turn"),
        "You deal the requests out in turn. The next goes to the place that is free first.",
    ),
    (
        "longest_first",
        dict(refill="longest first"),
        "You start with the longest answers. Nobody knows their lengths: take them as they come.",
    ),
    (
        "released_a_step_late",
        dict(late=1),
        "A place is taken again in the step after the last token, not one later.",
    ),
    (
        "empty_places_forgotten",
        dict(area="places in use"),
        "You leave out the places that a small wave does not use. They are idle, too.",
    ),
    (
        "the_longest_for_all",
        dict(gain="longest for all"),
        "You count the longest answer for all of a wave. Shorter ones got fewer tokens.",
    ),
    (
        "ratio_of_steps",
        dict(gain="ratio"),
        "That is what continuous batching gains here. The bound asks for no idle place at all.",
    ),
    (
        "one_plus_idle",
        dict(gain="idle"),
        "Work that fills the share s of the places fits 1 / s times as often, not 2 - s times.",
    ),
]:
    answers.wrong("14.1", hint, name)(partial(slipped_places, **slip))


@answers.alternative("14.1")
def by_a_heap(lengths, num_places):
    static = sum(map(max, waves_of(lengths, num_places)))
    free = [0] * num_places
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return static, max(free), sum(lengths) / static / num_places, static * num_places / sum(lengths)


@answers.alternative("14.1")
def step_by_step(lengths, num_places):
    queue, running, continuous = list(lengths), [], 0
    while queue or running:
        while queue and len(running) < num_places:
            running.append(queue.pop(0))
        running = [left - 1 for left in running if left > 1]
        continuous += 1
    static = 0
    for start in range(0, len(lengths), num_places):
        static += max(lengths[start : start + num_places])
    idle = static * num_places - sum(lengths)
    busy = 1 - idle / (static * num_places)
    return static, continuous, busy, 1 / busy


# ---------------------------------------------------------------- 14.2 a padded wave


def slipped_wave(
    model,
    prompts,
    limits,
    stop_token_ids,
    pad_token,
    *,
    column="own",
    side="right",
    stop="given",
    ends="own",
    share="wanted",
    leaves=False,
    keeps_stop=True,
):
    """A padded wave with some slips, spelled by switches."""
    found = [[] for _ in prompts]
    stops = {"given": stop_token_ids, "2": {2}, "one": set(sorted(stop_token_ids)[:1])}[stop]
    stops = stops | {pad_token} if stop == "padding" else stops
    running, calls = list(range(len(prompts))), 0
    while running:
        here = running if leaves else range(len(prompts))
        rows = [prompts[b] + found[b] for b in here]
        width = max(map(len, rows))
        padding = [[pad_token] * (width - len(row)) for row in rows]
        is_left = side in ("left", "left, seen")
        tokens = [pad + row if is_left else row + pad for row, pad in zip(rows, padding)]
        seen = [[True] * len(row) for row in rows]
        hidden = [[side in ("left, seen", "right, seen")] * len(pad) for pad in padding]
        mask = [h + s if is_left else s + h for s, h in zip(seen, hidden)]
        logits = model(torch.tensor(tokens), torch.tensor(mask))
        calls += 1
        for index, b in enumerate(here):
            at = len(rows[index]) - 1 if column == "own" and not is_left else width - 1
            if b in running or ends == "all":
                found[b].append(int(logits[index, at].argmax()))
        most = [max(limits)] * len(limits) if ends in ("all", "longest limit") else limits
        done = [len(f) >= m or f[-1] in stops for f, m in zip(found, most)]
        running = [] if ends == "first" and any(done) else [b for b in running if not done[b]]
        if ends == "all" and running:
            running = list(range(len(prompts)))
    if not keeps_stop:
        found = [f[:-1] if f[-1] in stops else f for f in found]
    longest = max(map(len, found))
    wanted = {"wanted": sum(map(len, found)), "longest": longest * len(found)}[share]
    return found, wanted / (len(found) * calls)


for name, slip, hint in [
    (
        "last_column",
        dict(column="last", side="right, seen"),
        "logits[:, -1] is the padding's column where a prompt is shorter: take each row's own.",
    ),
    (
        "last_column_masked",
        dict(column="last"),
        "You mask the padding, and then ask it for the next token: take each row's own column.",
    ),
    (
        "left_without_a_mask",
        dict(side="left, seen"),
        "Padding on the left stands before the prompt, which sees it unless the mask hides it.",
    ),
    ("eos_is_2", dict(stop="2"), "The id 2 is some models' EOS. Use stop_token_ids."),
    ("one_stop_token", dict(stop="one"), "A model may have several stop tokens: test all of them."),
    (
        "goes_on_until_all_end",
        dict(ends="all"),
        "A row that has ended goes on to collect tokens until the wave ends.",
    ),
    (
        "everybodys_limit",
        dict(ends="longest limit"),
        "Each row has its own limit; you give all of them the largest.",
    ),
    ("ends_with_the_first", dict(ends="first"), "The wave ends with its last row, not its first."),
    (
        "share_by_the_longest",
        dict(share="longest"),
        "You count the longest answer for all rows. Count the tokens that each row asked for.",
    ),
    (
        "stop_token_dropped",
        dict(keeps_stop=False),
        "The stop token belongs to the answer.",
    ),
    (
        "rows_leave",
        dict(leaves=True),
        "Right answers, but the finished rows leave. In a static wave all B rows run every time.",
    ),
]:
    answers.wrong("14.2", hint, name)(partial(slipped_wave, **slip))


@answers.wrong(
    "14.2", "Column, EOS and the end of each row are still wrong. Then look at the share."
)
def as_given(model, prompts, limits, stop_token_ids, pad_token):
    found, calls = [[] for _ in prompts], 0
    while calls < max(limits):
        rows = [prompt + answer for prompt, answer in zip(prompts, found)]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [pad_token] * (width - len(row)) for row in rows])
        logits = model(tokens, torch.ones_like(tokens, dtype=torch.bool))
        calls += 1
        for answer, token in zip(found, logits[:, -1].argmax(-1).tolist()):
            answer.append(token)
        if all(answer[-1] == 2 for answer in found):
            break
    return found, max(map(len, found)) / calls


@answers.wrong("14.2", "One call too many: the wave has ended when its last row has.")
def one_call_too_many(model, prompts, limits, stop_token_ids, pad_token):
    found, share = slipped_wave(model, prompts, limits, stop_token_ids, pad_token)
    model(torch.tensor([[0]] * len(prompts)), torch.ones(len(prompts), 1, dtype=torch.bool))
    return found, share


@answers.wrong("14.2", "You take padding for the end of a row: a prompt may hold that token too.")
def padding_ends_a_row(model, prompts, limits, stop_token_ids, pad_token):
    stops = stop_token_ids | {pad_token}
    return slipped_wave(model, prompts, limits, stops, pad_token)


@answers.alternative("14.2")
def padded_on_the_left(model, prompts, limits, stop_token_ids, pad_token):
    return slipped_wave(model, prompts, limits, stop_token_ids, pad_token, side="left")


@answers.alternative("14.2")
def with_lengths(model, prompts, limits, stop_token_ids, pad_token):
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width, rows = int(lengths.max()) + max(limits), torch.arange(len(prompts))
    tokens = torch.full((len(prompts), width), pad_token)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = torch.tensor(prompt)
    done = torch.zeros(len(prompts), dtype=torch.bool)
    count, calls = torch.zeros_like(lengths), 0
    while not done.all():
        mask = torch.arange(width) < (lengths + count)[:, None]
        new = model(tokens, mask)[rows, lengths + count - 1].argmax(-1)
        calls += 1
        live = ~done
        tokens[rows[live], (lengths + count)[live]] = new[live]
        count += live
        stopped = torch.tensor([token in stop_token_ids for token in new.tolist()])
        done |= live & (stopped | (count >= torch.tensor(limits)))
    found = [row[n : n + c].tolist() for row, n, c in zip(tokens, lengths, count)]
    return found, int(count.sum()) / (len(prompts) * calls)


# ---------------------------------------------------------------- 14.3 the scheduler

for slip, hint in [
    (testing.LeavesLate, "Who has finished stays for another step: place and blocks are not free."),
    (
        testing.NeverBinds,
        "Your admission never says no: ask can_grow, and the tokens of this step, before you grow.",
    ),
    (
        testing.ReservesPrompts,
        "You take blocks for the prompt alone. Its answer needs some, and may find none.",
    ),
    (
        testing.Overtakes,
        "A small request passes a large one that waits. Stop at the first that does not fit.",
    ),
    (
        testing.OnePlaceTooMany,
        "More sequences run than there are places: while len(self.running) < self.max_num_seqs.",
    ),
    (testing.NoBudget, "A step may have max_num_batched_tokens tokens, decodes among them."),
    (testing.InWaves, "Somebody waits although a place is free: this is a static batch."),
    (testing.KeepsBlocks, "Who leaves gives back the blocks as well as the place."),
]:
    answers.wrong("14.3", hint, slip.__name__)(slip)


@answers.wrong("14.3", "A prompt that is longer than the budget never runs: let it run alone.")
class LongPromptsStarve(ContinuousScheduler):
    def schedule(self):
        chunks = super().schedule().chunks
        return Step([c for c in chunks if c.count <= self.max_num_batched_tokens], [])


@answers.wrong("14.3", "You count prompts against the budget, and forget who decodes already.")
class DecodesAreFree(ContinuousScheduler):
    def schedule(self):
        self.max_num_batched_tokens += len(self.running)
        step = super().schedule()
        self.max_num_batched_tokens -= len(self.running) - len(
            [c for c in step.chunks if not c.sequence.output]
        )
        return step


@answers.wrong("14.3", "A request that can never fit waits for ever: refuse it in add.")
class RefusesNothing(ContinuousScheduler):
    def add(self, sequence):
        self.waiting.append(sequence)


@answers.wrong("14.3", "You refuse by prompt + limit. The last token is never stored: most_cached.")
class CountsTheLastToken(ContinuousScheduler):
    def add(self, sequence):
        if self.blocks.blocks_for(sequence.most_cached + 1) > self.blocks.num_blocks:
            raise ValueError("too long")
        super().add(sequence)


@answers.wrong("14.3", "The newest comes in first. First come, first served: popleft.")
class NewestFirst(ContinuousScheduler):
    def add(self, sequence):
        super().add(sequence)
        self.waiting.rotate(1)


@answers.wrong("14.3", "One new request a step. All who find room come in at once.")
class OneAtATime(ContinuousScheduler):
    def schedule(self):
        places = self.max_num_seqs
        self.max_num_seqs = min(places, len(self.running) + 1)
        step = super().schedule()
        self.max_num_seqs = places
        return step


@answers.wrong("14.3", "leave() returns who has finished, and yours returns who goes on.")
class ReturnsTheOthers(ContinuousScheduler):
    def leave(self):
        super().leave()
        return list(self.running)


@answers.alternative("14.3")
class WithCounters(ContinuousScheduler):
    """Counts tokens and places in hand, and admits by a helper."""

    def schedule(self):
        step = Step([Chunk(sequence, 1) for sequence in self.running], [])
        while self.waiting and self.admit(step):
            self.running.append(self.waiting.popleft())
        return step

    def admit(self, step):
        first = self.waiting[0]
        total = step.num_tokens + len(first.prompt)
        is_refused = (
            len(self.running) == self.max_num_seqs
            or (total > self.max_num_batched_tokens and step.chunks)
            or self.blocks.needs(first.row, 0, first.most_cached) > self.blocks.num_free
        )
        if is_refused:
            return False
        self.blocks.grow(first.row, 0, first.most_cached)
        step.chunks.append(Chunk(first, len(first.prompt)))
        return True


@answers.alternative("14.3")
class FromScratch:
    """Without the lesson's class, over plain lists."""

    def __init__(self, blocks, max_num_seqs=32, max_num_batched_tokens=4096):
        self.blocks, self.max_num_seqs = blocks, max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting, self.running = [], []

    @property
    def is_idle(self):
        return len(self.waiting) + len(self.running) == 0

    def add(self, sequence):
        size, pool = self.blocks.block_size, self.blocks.num_blocks
        if sequence.most_cached > size * pool:
            raise ValueError(f"{sequence.most_cached} tokens do not fit {pool} blocks")
        self.waiting = [*self.waiting, sequence]

    def schedule(self):
        counts = {sequence: 1 for sequence in self.running}
        free_places = self.max_num_seqs - len(self.running)
        for sequence in self.waiting[:free_places]:
            new = sequence.to_compute
            if counts and sum(counts.values()) + new > self.max_num_batched_tokens:
                break
            if not self.blocks.can_grow(sequence.row, 0, sequence.most_cached):
                break
            self.blocks.grow(sequence.row, 0, sequence.most_cached)
            counts[sequence] = new
        self.running = list(counts)
        self.waiting = [sequence for sequence in self.waiting if sequence not in counts]
        return Step([Chunk(*pair) for pair in counts.items()], [])

    def finish(self, step):
        for sequence, count in step.chunks:
            sequence.computed += count
        return [sequence for sequence, _ in step.chunks]

    def leave(self):
        done, left = [], []
        for sequence in self.running:
            (done if sequence.finished else left).append(sequence)
        for sequence in done:
            self.blocks.free(sequence.row)
        self.running = left
        return done
