"""DeepSeek-V3 on 8 to 320 GPUs: bytes, rows, seconds, tokens. Arithmetic; every time is a
prediction.

    wide = Wide(find_model("deepseek-v3"), H800, gpus=144)
    decode(wide, batch=128, context=4096, halves=2).tokens_per_s      # of one GPU

Attention, shared experts and dense layers are on every GPU, for its own tokens (data parallelism).
The routed experts and their copies are spread over all GPUs, equally many on each. Each time is a
floor, the longer of bytes over bandwidth and FLOPs over the peak. Nothing is added for launches,
for ranks that wait for the busiest, or for SMs that communicate. So real steps are longer.

- Weights are FP8, and products are FP8 by FP8; embeddings, latents and the core of attention have
  16 bits.
- Rows travel in FP8 with a scale for each 128 values, and come back in 16 bits.
- A copy counts as an expert of its own. That is exact for the bytes in memory, and nearly so for
  how many GPUs a token reaches.
- The router's groups limit the nodes of a token only where each node has whole groups. On other
  numbers of nodes EPLB ignores groups, and so do we.

Sources: DeepSeek-V3 (2024), sections 2.1, 3.3 and 3.4; DeepEP's docs/legacy.md for the links of an
H800 ("~160 GB/s NVLink", "~50 GB/s" RDMA) and its two kinds of kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import ModelShape
from lessons.l20_parallelism.planner.links import LINKS, LL, Link, Machine
from lessons.l23_experts.ranks.overlap import COMPUTE, NETWORK, Part, busy_s, end_of, schedule
from lessons.l23_experts.ranks.traffic import DTYPE, Layer, expected_ranks
from lessons.l23_experts.ranks.wire import Float8, Plain
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.model.arguments import check_whole, refuse

NVLINK_H800 = Link(
    "NVLink of an H800", 160e9, 0.6e-6, 3.4e-6, "DeepEP docs/legacy.md, ~160 GB/s", True
)
# an H100 but for its NVLink
H800 = Machine(replace(CHIPS["h100"], name="H800"), NVLINK_H800, LINKS["ndr"])
WEIGHT_BYTES, WIDE_BYTES = 1, DTYPE.itemsize  # FP8, and 16 bits


@dataclass(frozen=True)
class Wide:
    """A model with latent attention on many GPUs. redundant: copies of experts in a layer, at
    least; as many more as make the slots of all GPUs equal. num_groups, top_groups: the router's.
    """

    model: ModelShape
    machine: Machine
    gpus: int
    redundant: int = 32
    num_groups: int = 8
    top_groups: int = 4

    def __post_init__(self):
        check_whole(gpus=self.gpus)
        check_whole(0, redundant=self.redundant)
        if not self.model.num_experts or not self.model.kv_lora_rank:
            refuse("model", self.model.name, "one with experts and latent attention")

    @property
    def slots(self) -> int:
        """Experts and copies of a layer."""
        return -(-(self.model.num_experts + self.redundant) // self.gpus) * self.gpus

    @property
    def slots_per_gpu(self) -> int:
        return self.slots // self.gpus

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.machine.gpus_per_box)

    @property
    def moe_layers(self) -> int:
        return self.model.num_hidden_layers - self.model.num_dense_layers

    def reached(self, num_places: int) -> float:
        """Places, GPUs or nodes, that a token's rows go to, its own included if it is hit."""
        groups = (1, 1) if self.num_groups % self.nodes else (self.num_groups, self.top_groups)
        model = self.model
        layer = Layer(self.slots, model.num_experts_per_tok, model.hidden_size, *groups)
        return expected_ranks(layer, num_places)

    # ------------------------------------------------------------ memory

    @property
    def weight_bytes(self) -> float:
        """Of one GPU: its slots, and what every GPU has."""
        model = self.model
        experts = self.slots_per_gpu + model.num_shared_experts
        layers = self.moe_layers * (experts * model.expert_params + self.router_params)
        layers += model.num_dense_layers * self.dense_params
        layers += model.num_hidden_layers * model.attention_params
        return WEIGHT_BYTES * layers + WIDE_BYTES * 2 * model.embedding_params

    @property
    def dense_params(self) -> int:
        """Of the MLP of a layer without experts."""
        return self.model.mlp_matrices * self.model.hidden_size * self.model.intermediate_size

    @property
    def router_params(self) -> int:
        return self.model.hidden_size * self.model.num_experts

    def tokens_that_fit(self, memory_share: float = 0.9) -> int:
        """Tokens whose latents fit beside the weights of a GPU; 0 if the weights do not."""
        left = self.machine.chip.memory_bytes * memory_share - self.weight_bytes
        return max(0, int(left // calc.kv_bytes_per_token(self.model, 8 * WIDE_BYTES)))

    # ------------------------------------------------------------ when experts compute

    @property
    def ridge_rows(self) -> float:
        """Rows of an expert from which multiplying by its weights takes longer than reading them: a
        row costs 2 FLOPs a weight, a weight WEIGHT_BYTES.
        """
        chip = self.machine.chip
        return WEIGHT_BYTES * chip.fp8_flops_per_s / chip.memory_bytes_per_s / 2

    def rows_of_expert(self, batch: int) -> float:
        """Rows of a slot in a step, if loads are even. batch: tokens of a GPU."""
        return batch * self.gpus * self.model.num_experts_per_tok / self.slots

    @property
    def compute_bound_batch(self) -> float:
        """Tokens of a GPU from which its experts are bound by computing."""
        return self.ridge_rows / self.rows_of_expert(1)


# ---------------------------------------------------------------- what travels


class Sent(NamedTuple):
    """Rows that a token sends, in the mean: over NVLink within a node, and over RDMA. As many come
    back.
    """

    nvlink_rows: float
    rdma_rows: float

    def seconds(self, row_bytes: float, machine: Machine) -> float:
        """Of one token. Both links work at the same time."""
        nvlink_s = self.nvlink_rows * row_bytes / machine.inside.bytes_per_s
        return max(nvlink_s, self.rdma_rows * row_bytes / machine.between.bytes_per_s)


def forwarded(wide: Wide) -> Sent:
    """Once to each node over RDMA, and there once to each GPU over NVLink: DeepEP's normal kernels,
    for many tokens. A row crosses nodes by the GPU of the same number, which may be the right one.
    """
    nodes, box = wide.nodes, min(wide.gpus, wide.machine.gpus_per_box)
    return Sent(
        wide.reached(wide.gpus) * (box - 1) / box, wide.reached(nodes) * (nodes - 1) / nodes
    )


def direct(wide: Wide) -> Sent:
    """To each expert by itself, over RDMA if it is on another node: DeepEP's low-latency kernels,
    for few tokens. The row for an expert on the own GPU is copied there, which is not counted.
    """
    k, gpus = wide.model.num_experts_per_tok, wide.gpus
    box = min(gpus, wide.machine.gpus_per_box)
    return Sent(k * (box - 1) / gpus, k * (gpus - box) / gpus)


def row_bytes(hidden_size: int) -> tuple[int, int]:
    """Of a row on its way to an expert, in FP8 with scales, and back in 16 bits."""
    return Float8().row_bytes(hidden_size, DTYPE), Plain().row_bytes(hidden_size, DTYPE)


# ---------------------------------------------------------------- the parts of a layer


def product(wide: Wide, name: str, needs: tuple[str, ...], params: float, rows: float) -> Part:
    """FP8 products with `params` weights of a GPU, of which each of its tokens uses `rows` times
    as many.
    """
    chip = wide.machine.chip
    token_s = 2 * rows * params / chip.fp8_flops_per_s
    return Part(name, COMPUTE, needs, token_s, WEIGHT_BYTES * params / chip.memory_bytes_per_s)


def layer_parts(wide: Wide, core_s: float, sent: Sent) -> list[Part]:
    """A layer with experts. core_s: of the core of attention for each token; sent: forwarded or
    direct.
    """
    model, machine = wide.model, wide.machine
    out, back = row_bytes(model.hidden_size)
    latency_s = LL.base_s + (machine.between if wide.nodes > 1 else machine.inside).ll_hop_s
    expert = model.expert_params
    # of the GPU's slots a token's share: each GPU runs as many pairs as its own tokens make
    share = model.num_experts_per_tok / wide.slots_per_gpu
    return [
        product(wide, "projections", (), model.attention_params, 1),
        Part("attention", COMPUTE, ("projections",), core_s),
        Part("dispatch", NETWORK, ("attention",), sent.seconds(out, machine), start_s=latency_s),
        product(wide, "experts", ("dispatch",), wide.slots_per_gpu * expert, share),
        Part("combine", NETWORK, ("experts",), sent.seconds(back, machine), start_s=latency_s),
        product(wide, "shared", ("attention",), model.num_shared_experts * expert, 1),
    ]


def decode_core_s(wide: Wide, context: int) -> float:
    """A token's absorbed attention (lesson 6) over `context` latents, in one layer: it reads them
    once, and all heads use them.
    """
    model, chip = wide.model, wide.machine.chip
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    flops = 2 * model.num_attention_heads * (latent + model.kv_lora_rank)
    return context * max(
        WIDE_BYTES * latent / chip.memory_bytes_per_s, flops / chip.bf16_flops_per_s
    )


def prefill_core_s(wide: Wide, prompt: int) -> float:
    """A token's expanded attention in one layer, in the mean over a prompt."""
    pairs = (prompt + 1) / 2
    flops = calc.attention_flops(wide.model, pairs) / wide.model.num_kv_layers
    return flops / wide.machine.chip.bf16_flops_per_s


# ---------------------------------------------------------------- steps

Kernels = Callable[[Wide], Sent]  # forwarded or direct


class WideStep(NamedTuple):
    """A step of all GPUs. seconds: until it ends; compute_s, network_s: in which a lane works;
    tokens: of one GPU.
    """

    seconds: float
    compute_s: float
    network_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds


def step(wide: Wide, tokens: int, core_s: float, sent: Sent, halves: int, logits: int) -> WideStep:
    """All layers and the output head. tokens: of a GPU; halves: in how many batches they run, 1 or
    2; logits: rows that need the head. Layers without experts are not overlapped.
    """
    check_whole(tokens=tokens, halves=halves)
    parts = layer_parts(wide, core_s, sent)
    batches = [tokens * (n + 1) // halves - tokens * n // halves for n in range(halves)]
    pieces = schedule(parts, wide.moe_layers, batches)
    dense = [parts[0], parts[1], product(wide, "dense", (), wide.dense_params, 1)]
    dense_s = wide.model.num_dense_layers * sum(part.seconds(tokens) for part in dense)
    chip, head = wide.machine.chip, wide.model.embedding_params
    head_s = max(
        WIDE_BYTES * head / chip.memory_bytes_per_s, 2 * logits * head / chip.bf16_flops_per_s
    )
    compute_s, network_s = (busy_s(pieces, lane) for lane in (COMPUTE, NETWORK))
    rest_s = dense_s + head_s
    return WideStep(end_of(pieces) + rest_s, compute_s + rest_s, network_s, tokens)


def decode(
    wide: Wide, batch: int, context: int, halves: int = 2, kernels: Kernels = direct
) -> WideStep:
    """One token for each of `batch` sequences of each GPU, after `context` tokens."""
    return step(wide, batch, decode_core_s(wide, context), kernels(wide), halves, batch)


def prefill(
    wide: Wide, tokens: int, prompt: int, halves: int = 2, kernels: Kernels = forwarded
) -> WideStep:
    """`tokens` tokens on each GPU, of whole prompts of `prompt` tokens."""
    core_s = prefill_core_s(wide, prompt)
    return step(wide, tokens, core_s, kernels(wide), halves, -(-tokens // prompt))
