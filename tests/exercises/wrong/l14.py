"""Wrong answers to lesson 14's exercises: real slips, each with a hint."""

import heapq

import torch

from lessons.l14_continuous_batching.lab import testing
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l14_continuous_batching.sequence import Chunk, Step
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 14.1 what a place is worth

answers.slips(
    "14.1",
    """
    waves_sorted: You sort the answers. Their lengths are not known in advance.
    - starts = range
    + lengths = sorted(lengths)
    + starts = range

    waves_take_the_mean: A wave ends with its longest answer.
    - static = sum(max(lengths[start : start + num_places]) for start in starts)
    + waves = [lengths[start : start + num_places] for start in starts]
    + static = sum(round(sum(wave) / len(wave)) for wave in waves)

    waves_take_the_sum: The requests of a wave run side by side.
    - max(lengths[start : start + num_places])
    + sum(lengths[start : start + num_places])

    no_tail: Total over places is a lower bound: at the end some places have no request left.
    - max(free_at)
    + -(-sum(lengths) // num_places)

    places_in_turn: You deal the requests out in turn. The next goes to the place that is free
        first.
    - for length in lengths:
    -     first = free_at.index(min(free_at))
    -     free_at[first] += length
    + for at, length in enumerate(lengths):
    +     free_at[at % num_places] += length

    longest_first: You start with the longest answers. Their lengths are not known: take requests as
        they come.
    - for length in lengths:
    + for length in sorted(lengths, reverse=True):

    released_a_step_late: A place is taken again in the step after the last token, not one later.
    - free_at[first] += length
    + free_at[first] += length + (free_at[first] > 0)

    empty_places_forgotten: You leave out the places that a small wave does not use. They are idle,
        too.
    - busy = sum(lengths) / (static * num_places)
    + waves = [lengths[start : start + num_places] for start in starts]
    + busy = sum(lengths) / sum(max(wave) * len(wave) for wave in waves)

    the_longest_for_all: You count the longest answer for all of a wave. Shorter ones got fewer
        tokens.
    - busy = sum(lengths) / (static * num_places)
    + waves = [lengths[start : start + num_places] for start in starts]
    + busy = sum(max(wave) * len(wave) for wave in waves) / (static * num_places)

    ratio_of_steps: That is what continuous batching gains here. The bound asks for no idle place at
        all.
    - 1 / busy
    + static / max(free_at)

    one_plus_idle: Work that fills the share s of the places fits 1 / s times as often, not 2 - s
        times.
    - 1 / busy
    + 2 - busy
    """,
)


@answers.alternative("14.1")
def by_a_heap(lengths, num_places):
    starts = range(0, len(lengths), num_places)
    static = sum(max(lengths[start : start + num_places]) for start in starts)
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

answers.slips(
    "14.2",
    """
    last_column: logits[:, -1] is the padding's column where a prompt is shorter: take each row's
        own.
    - mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    + mask = torch.ones_like(tokens, dtype=torch.bool)
    - logits[b, len(rows[b]) - 1]
    + logits[b, -1]

    last_column_masked: You mask the padding, and then ask it for the next token: take each row's
        own column.
    - logits[b, len(rows[b]) - 1]
    + logits[b, -1]

    left_without_a_mask: Padding on the left comes before the prompt, which sees it unless the mask
        hides it.
    - [row + [pad_token] * (width - len(row)) for row in rows]
    + [[pad_token] * (width - len(row)) + row for row in rows]
    - mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    + mask = torch.ones_like(tokens, dtype=torch.bool)
    - logits[b, len(rows[b]) - 1]
    + logits[b, -1]

    eos_is_2: The id 2 is some models' EOS. Use stop_token_ids.
    - not in stop_token_ids
    + != 2

    one_stop_token: A model may have several stop tokens: test all of them.
    - not in stop_token_ids
    + not in sorted(stop_token_ids)[:1]

    goes_on_until_all_end: A row that has ended goes on to collect tokens until the wave ends.
    - running = [
    -     b
    -     for b in running
    -     if len(answers[b]) < limits[b] and answers[b][-1] not in stop_token_ids
    - ]
    + if calls == max(limits) or all(answer[-1] in stop_token_ids for answer in answers):
    +     break

    the_largest_limit: Each row has its own limit; you give all of them the largest.
    - < limits[b]
    + < max(limits)

    ends_with_the_first: The wave ends with its last row, not its first.
    - running = [
    -     b
    -     for b in running
    -     if len(answers[b]) < limits[b] and answers[b][-1] not in stop_token_ids
    - ]
    + if any(len(answers[b]) == limits[b] or answers[b][-1] in stop_token_ids for b in running):
    +     break

    share_by_the_longest: You count the longest answer for all rows. Count the tokens that each row
        asked for.
    - sum(map(len, answers))
    + max(map(len, answers)) * len(prompts)

    stop_token_dropped: The stop token belongs to the answer.
    - return answers
    + answers = [a[:-1] if a[-1] in stop_token_ids else a for a in answers]
    + return answers

    rows_leave: Right answers, but the finished rows leave. In a static wave all B rows run every
        time.
    - [prompt + answer for prompt, answer in zip(prompts, answers)]
    + [prompts[b] + answers[b] for b in running]
    - for b in running:
    -     answers[b].append(int(logits[b, len(rows[b]) - 1].argmax()))
    + for b, row, own in zip(running, rows, logits):
    +     answers[b].append(int(own[len(row) - 1].argmax()))

    one_call_too_many: One call too many: the wave has ended when its last row has.
    - return answers
    + model(tokens, mask)
    + return answers

    padding_ends_a_row: You take padding for the end of a row: a prompt may hold that token too.
    - not in stop_token_ids
    + not in stop_token_ids | {pad_token}
    """,
)


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


@answers.alternative("14.2")
def padded_on_the_left(model, prompts, limits, stop_token_ids, pad_token):
    found, running, calls = [[] for _ in prompts], set(range(len(prompts))), 0
    while running:
        rows = [prompt + answer for prompt, answer in zip(prompts, found)]
        width = max(map(len, rows))
        tokens = torch.tensor([[pad_token] * (width - len(row)) + row for row in rows])
        mask = torch.arange(width) >= torch.tensor([[width - len(row)] for row in rows])
        new = model(tokens, mask)[:, -1].argmax(-1).tolist()
        calls += 1
        for b in sorted(running):
            found[b].append(new[b])
            if len(found[b]) == limits[b] or new[b] in stop_token_ids:
                running.remove(b)
    return found, sum(map(len, found)) / len(prompts) / calls


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
    (
        testing.LeavesLate,
        "A finished request stays for another step: its place and blocks are not free.",
    ),
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
    (testing.InWaves, "A request waits although a place is free: this is a static batch."),
    (testing.KeepsBlocks, "A request that leaves gives back its blocks as well as its place."),
]:
    answers.wrong("14.3", hint, slip.__name__)(slip)


answers.slips(
    "14.3",
    """
    LongPromptsStarve: A prompt that is longer than the budget never runs: let it run alone.
    - if chunks and tokens
    + if tokens

    DecodesAreFree: You count prompts against the budget, and forget the requests that decode
        already.
    - tokens = len(chunks)
    + tokens = 0

    RefusesNothing: A request that can never fit waits for ever: refuse it in add.
    - if self.blocks.blocks_for(sequence.most_cached) > self.blocks.num_blocks:
    + if False:

    CountsTheLastToken: You refuse by prompt + limit. The last token is never stored: most_cached.
    - blocks_for(sequence.most_cached)
    + blocks_for(sequence.most_cached + 1)

    NewestFirst: The newest comes in first. First come, first served: popleft.
    - self.waiting.append(
    + self.waiting.appendleft(

    OneAtATime: One new request a step. All that find room come in at once.
    - chunks.append(Chunk(first, first.to_compute))
    + chunks.append(Chunk(first, first.to_compute))
    + break

    ReturnsTheOthers: leave() returns the finished requests, and yours returns those that go on.
    - return done
    + return list(self.running)
    """,
)


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
