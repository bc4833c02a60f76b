"""Wrong answers to exercise 11.3, a step that no graph can replay; l11.py registers them."""

from functools import partial

import torch

from solutions.l11_cuda_graphs import noise


def slipped_capture(
    state,
    *,
    seed="in place",
    memory="in place",
    write="where",
    longest=None,
    noise_of="tensor",
    own_row=True,
    scale="length",
    read="masked",
):
    """The toy step with some slips, spelled by switches."""
    if seed == "in place":
        state.seed.add_(1)
    elif seed == "rebound":
        state.seed = state.seed + 1
    rows, live = torch.arange(len(state.tokens)), state.lengths > 0
    place = (state.lengths - (1 if own_row else 0)).clamp(min=0, max=state.memory.shape[1] - 1)
    kept = state.memory if memory == "in place" else state.memory.clone()
    new = state.embedding[state.tokens]
    if write == "where":
        kept.index_put_((rows, place), torch.where(live[:, None], new, kept[rows, place]))
    elif write == "mask":
        kept[rows[live], place[live]] = new[live]
    elif write == "always":
        kept.index_put_((rows, place), new)
    elif write == "negative":
        kept.index_put_((rows, state.lengths - 1), new)
    elif write == "branch":
        for row in range(len(rows)):
            if state.lengths[row] > 0:
                kept[row, place[row]] = new[row]
    if memory == "rebound":
        state.memory = kept
    capacity = {
        None: lambda: kept.shape[1],
        "item": lambda: int(state.lengths.max()),
        "list": lambda: max(state.lengths.tolist()),
    }
    seen = torch.arange(capacity[longest]()) < state.lengths[:, None]
    seen = torch.ones_like(seen) if read == "all" else seen
    total = torch.where(seen[:, :, None], kept[:, : seen.shape[1]], 0.0).sum(1)
    average = total / (state.lengths.clamp(min=1)[:, None] if scale == "length" else kept.shape[1])
    drawn = {
        "tensor": lambda: noise(state.seed, len(state.embedding), rows.device),
        "number": lambda: noise(int(state.seed), len(state.embedding), rows.device),
        "frozen": lambda: noise(1, len(state.embedding), rows.device),
        "none": lambda: 0,
    }[noise_of]()
    return (average @ state.embedding.T + drawn).argmax(-1)


AS_GIVEN = dict(seed="rebound", memory="rebound", write="mask", longest="item")
SLIPS = [
    ("as_given", AS_GIVEN, "Which line does the error name? More bugs may follow it."),
    (
        "length_left",
        dict(longest="item"),
        "int(...) waits for the GPU, and the slice would stay as captured: mask instead.",
    ),
    ("length_as_a_list", dict(longest="list"), "tolist() waits for the GPU just as int(...) does."),
    (
        "mask_left",
        dict(write="mask"),
        "Indexing with a mask gives a shape that depends on values: torch.where keeps the shape.",
    ),
    (
        "memory_left",
        dict(memory="rebound"),
        "state.memory is another tensor after a step; the graph goes on with the old one.",
    ),
    (
        "seed_left",
        dict(seed="rebound"),
        "state.seed + 1 is a new tensor; the graph goes on reading the old one: add in place.",
    ),
    (
        "two_left_inside",
        dict(write="mask", longest="item"),
        "Where do values decide a shape? Perhaps in more than one line.",
    ),
    (
        "two_left_outside",
        dict(memory="rebound", seed="rebound"),
        "A tensor of the graph is replaced, and perhaps not one alone.",
    ),
    (
        "three_left",
        dict(seed="rebound", memory="rebound", longest="item"),
        "The error names the first line that cannot be captured, and perhaps not the last.",
    ),
    (
        "branch",
        dict(write="branch"),
        "`if` on a tensor waits for the GPU; torch.where decides there.",
    ),
    (
        "seed_as_number",
        dict(noise_of="number"),
        "int(seed) waits for the GPU; noise takes the tensor.",
    ),
    (
        "frozen_noise",
        dict(noise_of="frozen"),
        "A seed that Python knows is part of the recording: every replay draws the same.",
    ),
    ("no_noise", dict(noise_of="none"), "Where is the noise?"),
    (
        "seed_stays",
        dict(seed="none"),
        "You draw before the seed has moved: add 1 to state.seed first.",
    ),
    (
        "writes_padding",
        dict(write="always"),
        "A row of padding writes its token into row 0 of a memory that may be in use.",
    ),
    (
        "writes_at_minus_one",
        dict(write="negative"),
        "lengths - 1 of padding is -1: the last row, a row like any other.",
    ),
    (
        "works_on_a_copy",
        dict(memory="copy"),
        "You write into a copy, and the next step finds nothing.",
    ),
    ("one_row_too_far", dict(own_row=False), "The newest of n tokens is at row n - 1."),
    ("averages_all", dict(read="all"), "You average rows that are not in use."),
    (
        "divides_by_capacity",
        dict(scale="capacity"),
        "Divide by the number of tokens, not by the room.",
    ),
]


def through_a_one_hot(state):
    state.seed += 1
    # nowhere for padding
    at = (torch.arange(state.memory.shape[1]) == (state.lengths - 1)[:, None])[:, :, None]
    state.memory.copy_(
        torch.where(at, state.embedding.index_select(0, state.tokens)[:, None], state.memory)
    )
    share = (torch.arange(state.memory.shape[1]) < state.lengths[:, None]) / state.lengths.clamp(
        min=1
    )[:, None]
    average = torch.einsum("bn,bnd->bd", share, state.memory)
    return torch.add(
        average @ state.embedding.T, noise(state.seed, len(state.embedding), state.seed.device)
    ).argmax(-1)


def add_to(answers):
    """Register the wrong answers and another right one."""
    for name, slip, hint in SLIPS:
        answers.wrong("11.3", hint, name)(partial(slipped_capture, **slip))
    answers.alternative("11.3")(through_a_one_hot)
