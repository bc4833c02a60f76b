"""Speculative sampling as in the paper: one sequence, one row of probabilities after the other.

Read `residual`, then `verify_sequence`: it is the whole idea. `verify` runs it for each sequence of
a batch. `generate` is the paper's loop without a cache.

A row is a position that the target has seen: what it would sample there (p), what the draft would
have sampled (q), the token that the draft did sample, and two random numbers. The first decides
whether the token stays. The second draws another token if it does not. The last row of a sequence
has no drafted token: it gives the bonus token.

Sources: Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding, algorithm
1 and appendix A.1; Chen et al. 2023, Accelerating Large Language Model Decoding with Speculative
Sampling, algorithm 2.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.random_streams import streams_of, uniform
from lessons.l02_naive_attention.request import OnToken, Request, hand_out, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams, draw, probabilities

# Each position of an answer has three random numbers of its own, in this order.
DRAFTS, ACCEPTS, DRAWS = 0, 1, 2


# ---------------------------------------------------------------- verification


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is drawn from after a rejection, not normalized. p, q: [V] -> [V].

    It is max(0, p - q): the share of p that accepted drafts do not cover.
    """
    rest = (p - q).clamp(min=0)
    # All zero only if p and q are equal up to rounding. Then p itself is right up to rounding.
    return rest if rest.sum() > 0 else p


def verify_sequence(
    p: Tensor,
    q: Tensor,
    drafted: Tensor,
    u: Tensor,
) -> list[int]:
    """The tokens that one sequence emits in a step: 1 to K + 1 of them.

    p: [K + 1, V]; q: [K + 1, V], drafted: [K + 1], their last row is not read; u: [K + 1, 2] in
    [0, 1): u[i, 0] decides about drafted token i, u[i, 1] draws in its place.
    """
    emitted = []
    count = len(drafted) - 1
    for row in range(count):
        token = int(drafted[row])
        p_there = p[row, token]
        q_there = q[row, token]
        # min(1, p / q) > u without a division, because q may be tiny, and p = 0 never passes.
        is_accepted = u[row, 0] * q_there < p_there
        if not is_accepted:
            rest = residual(p[row], q[row])
            corrected = draw(rest, u[row, 1:])
            emitted.append(int(corrected))
            return emitted
        emitted.append(token)
    # Free, because the target has seen the last drafted token.
    bonus = draw(p[count], u[count, 1:])
    emitted.append(int(bonus))
    return emitted


def verify(
    p: Tensor,
    q: Tensor,
    drafted: Tensor,
    u: Tensor,
    cu_rows: Tensor,
) -> tuple[Tensor, Tensor]:
    """`verify_sequence` for each of B sequences, whose rows are stored one after the other.

    p, q: [R, V], drafted: [R] int64, u: [R, 2]; cu_rows: [B + 1], sequence b has the rows
    cu_rows[b] to cu_rows[b + 1]. -> tokens: [R] int64, what a sequence emits at the start of its
    rows, then -1; accepted: [B] int32, drafted tokens that stay; -1 for a sequence without rows.
    """
    tokens = torch.full_like(drafted, -1)
    accepted = torch.full_like(cu_rows[1:], -1, dtype=torch.int32)
    for b in range(len(accepted)):
        first = int(cu_rows[b])
        end = int(cu_rows[b + 1])
        if first == end:
            continue  # padding, so that a batch has a fixed size
        emitted = verify_sequence(
            p[first:end],
            q[first:end],
            drafted[first:end],
            u[first:end],
        )
        count = len(emitted)
        tokens[first : first + count] = torch.tensor(emitted)
        accepted[b] = count - 1
    return tokens, accepted


# ---------------------------------------------------------------- generation


def random_number(request: Request, index: int, purpose: int) -> Tensor:
    """What position `index` of an answer is drafted, accepted or drawn with: [1] float64."""
    stream = streams_of([request.sampling.seed])
    place = torch.tensor([3 * index + purpose])
    return uniform(stream, place)


def distribution(
    model: Decoder,
    request: Request,
    drafted: list[int],
) -> Tensor:
    """What the model would sample after the request's tokens and `drafted`: [V] float64.

    Target and draft both come through here, so temperature, top-k, top-p and penalties apply to
    both, each with the tokens before it.
    """
    text = request.tokens + drafted
    tokens = torch.tensor(text, device=model.device)
    attend = whole_sequence(model, len(tokens))
    hidden = model(tokens, attend)
    logits = model.logits(hidden[-1:])
    return probabilities(
        logits[0],
        request.sampling,
        request.prompt,
        request.output + drafted,
    )


def speculate(
    target: Decoder,
    draft: Decoder,
    request: Request,
    count: int,
) -> list[int]:
    """One step: `count` tokens are drafted, then verified. Returns what it emits."""
    drafted, p, q, u = [], [], [], []
    for row in range(count + 1):
        index = len(request.output) + row
        # One pass of the target would give all rows. generate.py does it in one.
        p.append(distribution(target, request, drafted))
        q.append(distribution(draft, request, drafted))
        accepts = random_number(request, index, ACCEPTS)
        draws = random_number(request, index, DRAWS)
        u.append(torch.cat([accepts, draws]))
        # The last row's token is not used, because the bonus token is the target's.
        number = random_number(request, index, DRAFTS)
        token = draw(q[row], number)
        drafted.append(int(token))
    return verify_sequence(
        torch.stack(p),
        torch.stack(q),
        torch.tensor(drafted),
        torch.stack(u),
    )


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    *,
    draft: Decoder,
    num_speculative_tokens: int = 4,
) -> list[list[int]]:
    """The paper's loop, one prompt after the other. draft: a smaller model of the same tokens.

    Other arguments, result and errors as in lesson 2's `generate`. A greedy request gives the same
    tokens as there. A sampled one follows the same distribution, with other random numbers.
    """
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    for request in requests:
        while not request.finished:
            left = request.max_new_tokens - len(request.output)
            # left - 1, because a step may emit one token more than it drafts
            count = min(num_speculative_tokens, left - 1)
            emitted = speculate(model, draft, request, count)
            for token in emitted:
                # Tokens after a stop token are thrown away.
                if not request.finished:
                    hand_out([token], [request], on_token)
    return [request.output for request in requests]
