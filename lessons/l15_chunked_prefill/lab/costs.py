"""What a step costs on a GPU, as a formula: bytes and FLOPs of lesson 1, and a fixed part for each
step. Everything that follows from it is predicted, not measured.

Read `floor`. A step with long prompts is bound by FLOPs, a step with decodes alone by bytes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lessons.l01_roofline.calculators import (
    Floor,
    attention_flops,
    kv_bytes_per_token,
    weight_bytes,
)
from lessons.l01_roofline.planner.models import ModelShape, find_model
from lessons.l01_roofline.planner.windows import page_values
from lessons.l14_continuous_batching.sequence import Step
from lessons.toolbox.measure.hardware import CHIPS, Chip

EFFICIENCY = 0.6  # of the data sheet's rates, an assumption
OVERHEAD_S = 3e-3  # of each step: scheduler, launches, sampling; an assumption
LLAMA_3_8B = find_model("llama-3-8b")
PCIE_BYTES_PER_S = 64e9  # PCIe 5.0, 16 lanes, one direction
LINKS_BYTES_PER_S = {"NVLink": 450e9, "InfiniBand": 50e9, "10 Gbit/s Ethernet": 1.25e9}


class Work(NamedTuple):
    """What a pass has to do: tokens to compute, (query, key) pairs, tokens of context whose K and V
    are read, sequences that are sampled.
    """

    tokens: int
    pairs: int
    context: int
    sampled: int


def work_of(step: Step) -> Work:
    """The work of a step, counted from its chunks."""
    tokens, pairs, context, sampled = 0, 0, 0, 0
    for chunk in step.chunks:
        held, count = chunk.sequence.computed, chunk.count
        tokens += count
        pairs += count * held + count * (count + 1) // 2  # token t sees t keys
        context += held + count
        sampled += chunk.is_sampled
    return Work(tokens, pairs, context, sampled)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of this model on this chip."""

    model: ModelShape = LLAMA_3_8B
    chip: Chip = CHIPS["h100"]
    overhead_s: float = OVERHEAD_S
    efficiency: float = EFFICIENCY

    def __call__(self, step: Step) -> float:
        return self.overhead_s + self.step_floor(step).seconds / self.efficiency

    def step_floor(self, step: Step) -> Floor:
        """Bytes and FLOPs of a pass."""
        return self.floor(work_of(step))

    def floor(self, work: Work) -> Floor:
        """Weights once, the cache of each sequence once, the output head for the sequences that are
        sampled.
        """
        model, kv_bytes = self.model, kv_bytes_per_token(self.model)
        body = 2 * work.tokens * (model.active_params - model.embedding_params)
        head = 2 * work.sampled * model.embedding_params
        moved = model.params_read(work.tokens) * 2 + work.context * kv_bytes
        flops = body + head + attention_flops(model, work.pairs)
        return Floor(moved, flops, self.chip.memory_bytes_per_s, self.chip.bf16_flops_per_s)

    def recompute_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` tokens again, bound by FLOPs as in a large chunk."""
        body = 2 * tokens * (self.model.active_params - self.model.embedding_params)
        flops = body + attention_flops(self.model, tokens * (tokens + 1) / 2)
        return flops / self.chip.bf16_flops_per_s / self.efficiency

    def swap_s(self, tokens: int, bytes_per_s: float = PCIE_BYTES_PER_S) -> float:
        """Seconds to bring the K and V of `tokens` tokens to the host and back."""
        return 2 * self.transfer_s(tokens, bytes_per_s)

    def transfer_s(self, tokens: int, bytes_per_s: float) -> float:
        """Seconds to send the K and V of `tokens` tokens over a link once."""
        return tokens * kv_bytes_per_token(self.model) / bytes_per_s

    def kv_blocks(self, block_size: int) -> int:
        """Blocks beside the weights in 90 % of the chip's memory; where some layers see a window,
        of each group of layers (lesson 27).
        """
        room = 0.9 * self.chip.memory_bytes - weight_bytes(self.model)
        return int(room / (2 * page_values(self.model, block_size)))
