"""A step of a training of the embedded models: losses, the way backward, optimizers."""

import ctypes
import os

import torch
import torch.nn.functional as F

from lessons.l16_speculative_sampling.more.speed import acceptance


def next_token_loss(model, batch, teacher=None):
    """Mean cross-entropy of each token behind those in front of it. batch: [rows, length + 1]."""
    return F.cross_entropy(
        model(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1), batch[:, 1:].flatten()
    )


def distillation_loss(model, batch, teacher):
    """KL(teacher || student) over every position (Hinton et al. 2015, at temperature 1)."""
    return divergence(*both_logits(model, batch, teacher))


TEMPERATURES = (1.0, 1 / 3)  # the lower one stands for greedy decoding: an argmax has no gradient
DIVERGENCE = 0.1  # weight of the divergence in the loss below


def acceptance_loss(model, batch, teacher):
    """How often a token that the student drafts is rejected: 1 minus the sum over the vocabulary of
    min(p, q) (Leviathan et al. 2023, section 3.2), the mean of two temperatures; and a share of the
    divergence, because a token that the student finds hopeless gets next to no gradient of min(p,
    q).

    Zhou et al. 2023 ("DistillSpec", section 4) compare losses for drafts; the one that is called
    total variation there is the first part of this one.
    """
    return rejected(*both_logits(model, batch, teacher))


def rejected(target, student):
    """The loss above for logits of both, [rows, length, V]."""
    loss = DIVERGENCE * divergence(target, student)
    for temperature in TEMPERATURES:
        p, q = (torch.softmax(x / temperature, -1) for x in (target, student))
        loss = loss + (1 - acceptance(p, q).mean()) / len(TEMPERATURES)
    return loss


def both_logits(model, batch, teacher):
    """Logits behind batch[:, :-1] of the teacher, which learns nothing, and of the student: each
    [rows, length, V] float32. batch: [rows, length + 1].
    """
    with torch.no_grad():
        target = teacher(input_ids=batch[:, :-1], use_cache=False).logits.float()
    return target, model(input_ids=batch[:, :-1], use_cache=False).logits.float()


def divergence(target, student):
    """KL(target || student) in nats, the mean over all positions. Both: logits, [rows, length,
    V].
    """
    p, q = (torch.log_softmax(x, -1).flatten(0, 1) for x in (target, student))
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


PIECE = 1 << 20  # scores of one head and layer in a piece: about what a CPU's cache holds


def backward(step_loss, model, batch, teacher, device: str) -> torch.Tensor:
    """Add the gradient of a batch's mean loss; returns the loss. A CPU goes through the batch in
    pieces, because it then finds in its cache again what it has just written.
    """
    rows, length = len(batch), batch.shape[1] - 1
    many = rows if device == "cuda" else max(1, PIECE // length**2)
    total = torch.zeros((), device=device)
    for piece in batch.to(device).split(many):
        with torch.autocast(device, torch.bfloat16):
            loss = step_loss(model, piece, teacher) * (len(piece) / rows)
        loss.backward()
        total += loss.detach()
    return total


def keep_freed_memory() -> None:
    """Ask glibc not to hand large freed blocks back to the system, which would fill each with zeros
    before it is used again: a fifth of a step's time on a CPU.
    """
    m_trim_threshold, m_mmap_max = -1, -4  # <malloc.h>
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


LEARNING_RATE = 4e-3  # of both: Muon's updates are scaled to the size of AdamW's


def optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the tied embedding and the norms (Jordan et al.
    2024).
    """
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    return [
        torch.optim.Muon(
            hidden,
            lr=LEARNING_RATE,
            weight_decay=0.1,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(spent: float) -> float:
    """Learning-rate factor after a share `spent` of the budget: warm up 2 %, hold, then linear to
    zero over the last 45 %.
    """
    return min(spent / 0.02 + 0.01, 1.0, (1 - spent) / 0.45)


def update(model, opts, factor: float) -> None:
    """One optimizer step at `factor` times the base learning rate."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = LEARNING_RATE * factor
        opt.step()
        opt.zero_grad()


def name_of(device: str) -> str:
    """The device as the model card names it."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"
