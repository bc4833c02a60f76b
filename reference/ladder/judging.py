"""Are the tokens the same? And what could no machine beat?"""

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention_per_head
from reference.features.states.generate import whole_sequence
from reference.ladder.contest import Contender

MARGIN = 1e-3  # in logits; float32 sums in another order move logits by about 1e-5


def judge(
    contender: Contender,
    rungs: list[Contender],
    model: Decoder,
    prompts,
    reference: str = "the first rung",
) -> None:
    """Compare every output with the lowest rung that served the same request. reference: what a
    verdict calls it.

    A difference is excused only within MARGIN: both tokens must be the model's two best there, and
    their logits that close.
    """
    excused = []
    for index, tokens in contender.outputs.items():
        wanted = next(r.outputs[index] for r in rungs if index in r.outputs)
        if tokens == wanted:
            continue
        at = first_difference(tokens, wanted)
        where = f"request {index}, new token {at}"
        best, margin = best_two(model, prompts[index] + wanted[:at])
        # one ended early, or took a token that nothing excuses
        if {*tokens[at : at + 1], *wanted[at : at + 1]} != best:
            contender.verdict = (
                f"differs from {reference}: {where}, where the tokens are not the two of the "
                f"best logits"
            )
            return
        if margin > MARGIN:
            contender.verdict = (
                f"differs from {reference}: {where}, where the two best logits are "
                f"{margin:.4g} apart (tolerance {MARGIN:g})"
            )
            return
        excused.append(f"{where}: best two logits only {margin:.2g} apart (tolerance {MARGIN:g})")
    if excused:
        contender.verdict = "a tie: " + "; ".join(excused)


def first_difference(tokens: list[int], wanted: list[int]) -> int:
    """The index of the first token that differs, or at which one of the two ends."""
    for index, (got, want) in enumerate(zip(tokens, wanted)):
        if got != want:
            return index
    return min(len(tokens), len(wanted))


def best_two(model: Decoder, tokens: list[int]) -> tuple[set[int], float]:
    """The two best next tokens after `tokens`, and how far apart their logits are."""
    best = logits_after(model, tokens).topk(2)
    return set(best.indices.tolist()), float(best.values[0] - best.values[1])


def logits_after(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """What may follow `tokens`, recomputed without any cache: [V]."""
    ids = torch.tensor(tokens, device=model.device)
    hidden = model(ids, whole_sequence(model, len(tokens), attention_per_head))
    return model.logits(hidden[-1:])[0]


def weight_bytes(model: Decoder) -> int:
    """Bytes of all parameters and buffers; a tied embedding counts once."""
    tensors = {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def floor_bytes(model: Decoder, prompts, outputs: dict[int, list[int]]) -> int:
    """Bytes that decoding one request at a time reads at least: for each token every weight once,
    and its context's K and V.
    """
    kv_bytes = model.config.kv_bytes_per_token(model.dtype.itemsize)
    each_token = weight_bytes(model)
    return sum(
        each_token + kv_bytes * (len(prompts[index]) + i)
        for index, tokens in outputs.items()
        for i in range(len(tokens))
    )
