"""The states of sequences, in slots of one size, and what a layer does with them in a step.

Read `StatePool.attend`: convolve, cut into q, k and v, run the rule. It is what `attend` is for a
layer that has a state; lesson 6's qwen3_next.py is the other side of that seam.

Source: transformers' modeling_qwen3_next; that a state has 32 bits whatever the model has: SGLang's
documentation of Qwen3-Next, --mamba-ssm-dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lessons.l08_online_softmax.naive import wide
from lessons.l27_states.stand_ins import wrappers
from lessons.toolbox.model.state_config import Kinds, StateConfig
from reference.features.states import in_float64

LENGTH_EPS = 1e-6  # fixed in the published code, whatever rms_norm_eps says


def ops_for(device: torch.device, dtype: torch.dtype):
    """What has the four functions of a step, conv_step, conv_prompts, gated_delta_step and
    gated_delta_prompts: kernels on a GPU, their stand-ins on a CPU.
    """
    return in_float64 if dtype == torch.float64 else wrappers(device)


@dataclass(frozen=True)
class StateStep:
    """Which slot each sequence of a step has. First, `num_decodes` sequences that run one token and
    have a state; then the others, which may begin.
    """

    num_decodes: int
    decode_slots: Tensor  # [num_decodes] int64
    slots: Tensor  # [B - num_decodes] int64, of the others
    cu_seqlens: Tensor  # [B - num_decodes + 1] int32: where their tokens begin, from the first one
    has_state: Tensor  # [B - num_decodes] bool: whether tokens of it have run before
    max_seqlen: int  # of the others
    drafted: Tensor | None = None  # [D] int64: rows of tokens that may not stay


def new_state_step(
    lengths: Sequence[int], held: Sequence[int], slots: Sequence[int], device: torch.device
) -> StateStep:
    """lengths: new tokens of each sequence; held: how many have run before them."""
    pairs = list(zip(lengths, held))
    is_prompt = [new > 1 or not before for new, before in pairs]
    count = is_prompt.index(True) if True in is_prompt else len(pairs)
    rest = lengths[count:]
    starts = torch.tensor(list(accumulate(rest, initial=0)), dtype=torch.int32)
    return StateStep(
        num_decodes=count,
        decode_slots=torch.tensor(slots[:count], dtype=torch.int64).to(device),
        slots=torch.tensor(slots[count:], dtype=torch.int64).to(device),
        cu_seqlens=starts.to(device),
        has_state=torch.tensor([before > 0 for before in held[count:]]).to(device),
        max_seqlen=max(rest, default=0),
    )


def conv_weights(model: nn.Module) -> dict[int, Tensor]:
    """The convolution of each layer that has a state: [C, W]."""
    layers = model.config.state.layers
    return {layer: model.layers[layer].self_attn.conv1d.weight[:, 0] for layer in layers}


class StatePool:
    """Of each state layer, in each slot, the last inputs of the convolution, [C, W - 1] in the
    model's dtype, and the matrices of its heads, if it has any, [H, Dk, Dv] in float32 at least.

    What a slot holds before its sequence begins is not read, so no slot is ever cleared.
    """

    def __init__(
        self,
        config: Kinds,
        weights: dict[int, Tensor],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.config, self.weights, self.num_slots = config, weights, num_slots
        self.ops = ops_for(torch.device(device), dtype)
        self.at = {layer: index for index, layer in enumerate(config.layers)}
        shape, kept = (len(self.at), num_slots), torch.promote_types(dtype, torch.float32)
        self.windows = torch.zeros(*shape, *config.conv_shape, dtype=dtype, device=device)
        # no numbers where a layer has a convolution alone
        matrices = config.matrix_shape or (0,)
        self.matrices = torch.zeros(*shape, *matrices, dtype=kept, device=device)
        # {layer: what it was given for the rows `drafted` of a step}
        self.given: dict[int, tuple[Tensor | None, ...]] = {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that slots have a part of: [layers, slots, …]."""
        return self.windows, self.matrices

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self.tensors)

    def copy(self, source: int, target: int) -> None:
        """Copy a slot of all layers over another one."""
        for states in self.tensors:
            states[:, target] = states[:, source]

    def read(self, slot: int) -> list[Tensor]:
        """A slot's state in all layers: [layers, C, W - 1] and [layers, H, Dk, Dv], views."""
        return [states[:, slot] for states in self.tensors]

    def write(self, slot: int, state: list[Tensor]) -> None:
        """What `read` gave, wherever it has been meanwhile, into a slot. state: [layers, C, W - 1]
        and [layers, H, Dk, Dv].
        """
        for states, x in zip(self.tensors, state):
            states[:, slot] = x.to(states.device)

    def repeat(self, rows: Tensor, step: StateStep) -> None:
        """Run these of the rows that the last step was given once more, in the step's slots. rows:
        [D] int64.
        """
        for layer, given in self.given.items():
            self.attend(layer, *(rows_of(x, rows) for x in given), step)

    def attend(
        self,
        layer: int,
        mixed: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        step: StateStep,
    ) -> Tensor:
        """mixed: [T, C], log_decay, beta: [T, H] -> [T, H, Dv]; without the two what the
        convolution gives, [T, C]. The step's slots are the states after these tokens then.
        """
        if step.drafted is not None:
            rows = step.drafted
            self.given[layer] = tuple(rows_of(x, rows) for x in (mixed, log_decay, beta))
        ops, weight, index = self.ops, self.weights[layer], self.at[layer]
        windows, matrices, count = self.windows[index], self.matrices[index], step.num_decodes
        rest, ys, outs = (step.slots, step.cu_seqlens, step.has_state, step.max_seqlen), [], []
        if count:
            ys.append(ops.conv_step(mixed[:count], weight, windows, step.decode_slots))
        if count < len(mixed):
            ys.append(ops.conv_prompts(mixed[count:], weight, windows, *rest))
        y = joined(ys)
        if beta is None:
            return y
        each = *heads_of(y, self.config), log_decay, beta
        if count:
            decodes = (x[:count] for x in each)
            outs.append(ops.gated_delta_step(*decodes, matrices, step.decode_slots))
        if count < len(mixed):
            outs.append(ops.gated_delta_prompts(*(x[count:] for x in each), matrices, *rest))
        return joined(outs).to(mixed.dtype)


def rows_of(x: Tensor | None, rows: Tensor) -> Tensor | None:
    """x: [T, ...], or None; rows: [D] -> [D, ...], a copy."""
    return None if x is None else x[rows]


def joined(parts: list[Tensor]) -> Tensor:
    """One tensor of parts: [T1, …], [T2, …] -> [T1 + T2, …]. A single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def heads_of(y: Tensor, config: StateConfig) -> tuple[Tensor, Tensor, Tensor]:
    """What the rule reads, out of what the convolution wrote. y: [T, C] -> q, k: [T, H, Dk], v: [T,
    H, Dv], float32 at least.

    q and k have length 1, because the delta rule replaces what is read by k; q then counts by 1 /
    √Dk. A q and a k serve several heads of v.
    """
    widths = [config.key_dim, config.key_dim, config.value_dim]
    q, k, v = wide(silu(y)).split(widths, dim=-1)
    q, k = (unit(x.unflatten(-1, (-1, config.linear_key_head_dim))) for x in (q, k))
    q = q * config.linear_key_head_dim**-0.5
    q, k = (x.repeat_interleave(config.values_per_key, dim=1) for x in (q, k))
    return q, k, v.unflatten(-1, (-1, config.linear_value_head_dim))


def unit(x: Tensor) -> Tensor:
    """x: [..., D], each row with length 1 (a little less for short ones)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)
