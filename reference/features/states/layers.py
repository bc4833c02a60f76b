"""The states of sequences, in slots of one size, and what a layer does with them in a step.

Read `StatePool.attend`: convolve, then do what rules.py says of this kind of layer: cut into q, k
and v, run the rule. It is what `attend` is for a layer that has a state; lesson 6's variants/ and
mamba/ are the other side of that seam.

Source: that a state has 32 bits whatever the model has: SGLang's documentation of Qwen3-Next,
--mamba-ssm-dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from lessons.l27_states.stand_ins import wrappers
from lessons.toolbox.model.state_config import Kinds
from reference.features.states import in_float64
from reference.features.states.rules import after_convolution


def ops_for(device: torch.device, dtype: torch.dtype):
    """What has the functions of a step, conv_step and conv_prompts, and of each rule so named,
    gated_delta_step, decayed_prompts: kernels on a GPU, their stand-ins on a CPU.
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

    @property
    def of_prompts(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """What a function over packed prompts takes of the others: [B], [B + 1], [B]."""
        return self.slots, self.cu_seqlens, self.has_state, self.max_seqlen


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
    model's dtype, and the matrices of its heads, if it has any, [H, Dk, Dv]. of_matrices: their
    dtype; None: float32 at least.

    What a slot holds before its sequence begins is not read, so no slot is ever cleared.
    """

    def __init__(
        self,
        config: Kinds,
        weights: dict[int, Tensor],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        of_matrices: torch.dtype | None = None,
    ):
        self.config, self.weights, self.num_slots = config, weights, num_slots
        self.ops = ops_for(torch.device(device), dtype)
        self.at = {layer: index for index, layer in enumerate(config.layers)}
        shape = len(self.at), num_slots
        kept = of_matrices or torch.promote_types(dtype, torch.float32)
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
            self.attend(layer, *(rows_of(x, rows) for x in given), step=step)

    def attend(self, layer: int, mixed: Tensor, *inputs: Tensor | None, step: StateStep) -> Tensor:
        """mixed: [T, C], inputs: what else the layer hands over -> [T, H, Dv]; of a layer with a
        convolution alone what that gives, [T, C]. The step's slots are the states after these
        tokens then.
        """
        if step.drafted is not None:
            self.given[layer] = tuple(rows_of(x, step.drafted) for x in (mixed, *inputs))
        y = self.convolved(layer, mixed, step)
        run = partial(self.run_rule, self.at[layer], step)
        return after_convolution(self.config, y, run, *inputs).to(mixed.dtype)

    def convolved(self, layer: int, mixed: Tensor, step: StateStep) -> Tensor:
        """The convolution of a layer, and its windows after these tokens. mixed: [T, C] -> [T,
        C].
        """
        weight, windows = self.weights[layer], self.windows[self.at[layer]]
        count, ys = step.num_decodes, []
        if count:
            ys.append(self.ops.conv_step(mixed[:count], weight, windows, step.decode_slots))
        if count < len(mixed):
            ys.append(self.ops.conv_prompts(mixed[count:], weight, windows, *step.of_prompts))
        return joined(ys)

    def run_rule(self, index: int, step: StateStep, rule: str, *each: Tensor) -> Tensor:
        """A rule of lesson 27 over the matrices of one layer, by its number among those with a
        state. each: q, k: [T, H, Dk], v: [T, H, Dv], and what the rule has beside them: [T, H] ->
        [T, H, Dv].
        """
        matrices, count, outs = self.matrices[index], step.num_decodes, []
        if count:
            run = getattr(self.ops, f"{rule}_step")
            outs.append(run(*(x[:count] for x in each), matrices, step.decode_slots))
        if count < len(each[0]):
            run = getattr(self.ops, f"{rule}_prompts")
            outs.append(run(*(x[count:] for x in each), matrices, *step.of_prompts))
        return joined(outs)


def rows_of(x: Tensor | None, rows: Tensor) -> Tensor | None:
    """x: [T, H] -> [D, H], a copy; rows: [D]. Weights of the layer, [C], and None stay."""
    return x if x is None or x.ndim == 1 else x[rows]


def joined(parts: list[Tensor]) -> Tensor:
    """One tensor of parts: [T1, …], [T2, …] -> [T1 + T2, …]. A single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
