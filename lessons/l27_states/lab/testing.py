"""What the tests of this lesson share: inputs as layers make them, and the naive rules over slots
and packed prompts, as the kernels are called.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lessons.l27_states import naive
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.inputs import apart
from lessons.toolbox.proof.numerics import poison_, poisoned

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
KINDS = ("normal", "same key", "forgets", "keeps", "large values")


def inputs(
    num_tokens: int,
    heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
    seed: int = 0,
) -> list[Tensor]:
    """q, k: [T, H, Dk], v: [T, H, Dv], log_decay, beta: [T, H] as such layers compute them: keys
    and queries of length 1, betas between 0 and 1.

    They are `apart`. kind: "normal"; "same key" (all keys are equal and beta is 1: a product of
    many large terms would overflow); "forgets" (now and then a decay of exp(−3000), and hardly any
    between); "keeps" (no decay); "large values" (a thousand times as large).
    """
    drawn = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    q, k = (normalize(draw(num_tokens, heads, key_dim), dim=-1) for _ in range(2))
    v = draw(num_tokens, heads, value_dim)
    log_decay = -0.3 * draw(num_tokens, heads).exp()
    beta = draw(num_tokens, heads).sigmoid()
    if kind == "same key":
        k, beta = k[:1].expand_as(k).clone(), torch.ones_like(beta)
        log_decay = log_decay * 0.01
    elif kind == "forgets":
        is_hard = draw(num_tokens, heads) > 1
        log_decay = torch.where(is_hard, -3000.0, log_decay * 0.01)
    elif kind == "keeps":
        log_decay = torch.zeros_like(log_decay)
    elif kind == "large values":
        v = 1000 * v
    of_tokens = (x.to(DEVICE, dtype) for x in (q, k, v))
    return [*apart(*of_tokens, log_decay.to(DEVICE), beta.to(DEVICE))]


def new_states(slots: int, heads: int, key_dim: int, value_dim: int, seed: int = 0) -> Tensor:
    """[slots, H, Dk, Dv] float32, random."""
    drawn = torch.Generator().manual_seed(seed + 1000)
    return torch.randn(slots, heads, key_dim, value_dim, generator=drawn).to(DEVICE)


def in_pool(states: Tensor) -> Tensor:
    """The same slots, each [...] dense, as every second one of a pool whose others are poison."""
    pool = poisoned((2 * len(states), *states.shape[1:]), states.dtype, states.device)
    pool[::2] = states
    return pool[::2]


def on_device(values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
    """Slots, or where sequences begin, or whether they have a state: [len(values)]."""
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def starts(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens of these lengths: [len(lengths) + 1] int32."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(DEVICE, torch.int32)


def packed_by(rule: Callable) -> Callable:
    """A naive rule as the kernels of packed prompts are called: prompt after prompt, states in
    slots, written in place; their output has the shape of the last of the tensors with three
    dimensions.
    """

    def prompts(*arguments) -> Tensor:
        *tensors, states, slots, cu_seqlens, has_state = arguments
        out = torch.zeros_like([x for x in tensors if x.ndim == 3][-1])
        for b, slot in enumerate(slots.tolist()):
            rows = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
            before = states[slot] if has_state is None or has_state[b] else None
            if slot >= 0:
                out[rows], states[slot] = rule(*(x[rows] for x in tensors), before)
        return out

    return prompts


def step_by(rule: Callable) -> Callable:
    """A naive rule as the kernels of a step are called: each prompt has one token, and a state."""

    def step(*arguments) -> Tensor:
        slots = arguments[-1]
        return packed_by(rule)(*arguments, torch.arange(len(slots) + 1), None)

    return step


def conv_by_heads(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
    """naive.causal_conv as conv_prompts is called, or as conv_step if `rest` are states and slots
    alone. x: [T, C] -> [T, C].
    """

    def rule(channels: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        y, state = naive.causal_conv(channels[:, 0], weight, state)
        return y[:, None], state

    call = step_by(rule) if len(rest) == 2 else packed_by(rule)
    return call(x[:, None], *rest)[:, 0]


def step_inputs(batch, heads, key_dim, value_dim, dtype=torch.float32, kind="normal", seed=0):
    """The tensors of a step, its states, and slots in no order, of which the second is no slot."""
    tensors = inputs(batch, heads, key_dim, value_dim, dtype, kind, seed)
    states = in_pool(new_states(batch + 2, heads, key_dim, value_dim, seed))
    slots = torch.randperm(batch + 2)[:batch]
    unused = [s for s in range(batch + 2) if s not in slots[[b != 1 for b in range(batch)]]]
    if batch > 1:
        slots[1] = -1
    poison_(states[unused[0]])
    return [*tensors, states, slots.to(DEVICE)]


def prompt_inputs(lengths, heads, key_dim, value_dim, dtype=torch.float32, kind="normal", seed=0):
    """Every second prompt begins without a state, and its slot holds poison."""
    count = len(lengths)
    tensors = inputs(sum(lengths), heads, key_dim, value_dim, dtype, kind, seed)
    states = in_pool(new_states(count + 2, heads, key_dim, value_dim, seed))
    slots = torch.randperm(count + 2)
    has_state = torch.tensor([b % 2 == 0 for b in range(count)])
    for slot in (*slots[count:], *slots[:count][~has_state]):
        poison_(states[slot])
    return [*tensors, states, slots[:count].to(DEVICE), starts(lengths), has_state.to(DEVICE)]


def conv_inputs(lengths, channels, width, dtype=torch.float32, seed=0):
    """Every second prompt begins without a state, and its slot holds poison."""
    drawn, count = torch.Generator().manual_seed(seed), len(lengths)
    x = torch.randn(sum(lengths), channels, generator=drawn)
    weight = torch.randn(channels, width, generator=drawn)
    states = torch.randn(count + 2, channels, width - 1, generator=drawn)
    slots = torch.randperm(count + 2, generator=drawn)
    has_state = torch.tensor([b % 2 == 0 for b in range(count)])
    for slot in (*slots[count:], *slots[:count][~has_state]):
        poison_(states[slot])
    x, weight, states = (each.to(DEVICE, dtype) for each in (x, weight, states))
    return [
        *apart(x),
        weight,
        in_pool(states),
        slots[:count].to(DEVICE),
        starts(lengths),
        has_state.to(DEVICE),
    ]
