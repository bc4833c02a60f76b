"""Several continuations of one prompt that share its blocks: parallel sampling and beam search.

Both are `fork` and nothing else: a branch begins as a copy of its parent's table. A block is copied
when a branch writes into one that others own too, so at most one block a branch, and never the
whole prompt.

Source: Kwon et al. 2023, PagedAttention, section 4.4 and figures 8 and 9.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.requests import sampling_batch, take_batch_tokens
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l12_paged_kv.runner import PagedRunner


class Beam(NamedTuple):
    """A continuation. logprob: the sum over its tokens, natural logarithms."""

    logprob: float
    tokens: list[int]


def parallel_sample(
    runner: PagedRunner, prompt: list[int], sampling: list[SamplingParams], max_new_tokens: int
) -> list[list[int]]:
    """One answer for each of `sampling`, all to one prompt, which is computed and stored once.

    The tokens are those that each would get alone. Raises ValueError as lesson 2's `generate`.
    """
    prompts = [prompt] * len(sampling)
    requests = read_requests(runner.model.config, prompts, max_new_tokens, sampling)
    running = [request for request in requests if not request.finished]
    if not running:
        return [[] for _ in requests]
    first = running[0].row
    logits = runner.step({first: prompt}).expand(len(running), -1)
    for request in running[1:]:
        runner.fork(first, request.row)
    while running:
        batch = sampling_batch(running, runner.model.device)
        take_batch_tokens(logits, batch, running, None)
        for request in running:
            if request.finished:
                runner.free(request.row)
        running = [request for request in running if not request.finished]
        if running:
            logits = runner.step({request.row: request.output[-1:] for request in running})
    return [request.output for request in requests]


def beam_search(
    model: Decoder, prompt: list[int], width: int, steps: int, block_size: int = 16
) -> list[Beam]:
    """The `width` likeliest continuations of `steps` tokens that a search of this width finds, the
    likeliest first. Stop tokens do not end a beam. Raises ValueError.
    """
    if width < 1 or steps < 1 or not prompt:
        raise ValueError(
            f"prompt, width, steps: got {len(prompt)} tokens, {width} and {steps}; accepted: 1 or "
            "more of each"
        )
    longest = len(prompt) + steps - 1  # nothing is computed from the last token
    # Enough even if no beam shared a block.
    num_blocks = width * -(-longest // block_size)
    runner = PagedRunner.for_model(model, num_blocks, block_size, longest)
    return search(runner, prompt, width, steps)


def search(runner: PagedRunner, prompt: list[int], width: int, steps: int) -> list[Beam]:
    """`beam_search` on a runner without sequences.

    After each token every beam has V continuations. The best `width` of all survive: some beams
    have several heirs, which share its blocks, and some have none, and their blocks are free.
    """
    beams, names, unused = [Beam(0.0, [])], [0], 1
    logits = runner.step({0: prompt})
    for step in range(steps):
        parents, beams = survivors(beams, logits, width)
        if step == steps - 1:
            break
        heirs = list(range(unused, unused + len(beams)))
        unused += len(beams)
        for heir, parent in zip(heirs, parents):
            runner.fork(names[parent], heir)
        # After all forks. The last heir of a beam then owns its blocks alone and copies nothing.
        for name in names:
            runner.free(name)
        names = heirs
        logits = runner.step({name: beam.tokens[-1:] for name, beam in zip(names, beams)})
    for name in names:
        runner.free(name)
    return beams


def survivors(beams: list[Beam], logits: Tensor, width: int) -> tuple[list[int], list[Beam]]:
    """The best `width` of all continuations by one token, best first, and whose they are.

    logits: [len(beams), V]. Fewer if there are fewer.
    """
    scores = torch.tensor([beam.logprob for beam in beams], dtype=torch.float64)
    total = scores[:, None] + logits.double().log_softmax(-1).cpu()
    best = total.flatten().topk(min(width, total.numel()))
    parents, found = [], []
    for logprob, index in zip(best.values.tolist(), best.indices.tolist()):
        parent, token = divmod(index, logits.shape[-1])
        parents.append(parent)
        found.append(Beam(logprob, [*beams[parent].tokens, token]))
    return parents, found
