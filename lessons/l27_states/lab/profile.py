"""What `make profile LESSON=27` runs: a step of eight sequences, then a prompt of two chunks."""

import torch

from lessons.l27_states import naive as rules
from lessons.l27_states import optimized as step
from lessons.l27_states import prompts
from lessons.l27_states.lab.testing import inputs, new_states, on_device, packed_by, starts, step_by

HEADS, DIM, BATCH = 4, 128, 8
STEP = inputs(BATCH, HEADS, DIM, DIM, torch.bfloat16, seed=27)
PROMPT = inputs(2 * prompts.CHUNK, HEADS, DIM, DIM, torch.bfloat16, seed=27)
STATES = new_states(BATCH, HEADS, DIM, DIM)
SLOTS, FIRST = on_device(list(range(BATCH))), on_device([0])
STARTS = starts([2 * prompts.CHUNK])


def optimized():
    """One launch, then three."""
    step.gated_delta_step(*STEP, STATES, SLOTS)
    prompts.gated_delta_prompts(*PROMPT, STATES, FIRST, STARTS)


def naive():
    """Token by token, one sequence after the other."""
    step_by(rules.gated_delta_rule)(*STEP, STATES, SLOTS)
    packed_by(rules.gated_delta_rule)(*PROMPT, STATES, FIRST, STARTS, None)
