"""What one GPU of many holds: weights, KV cache and buffers, of a model that is only a shape.

    layout = Layout(tp=8, pp=2)
    part = part_of(model, layout, stage)      # a ModelShape again, of what one GPU has

A rank's part of a model is a model of a smaller shape (sharding.py does the same to real weights).
So lesson 1's formulas count it, with nothing added but what does *not* shrink:

- KV heads: below one a GPU there is no less, so beyond Hkv GPUs they are copies.
- MLA's latents and the matrices that make them are the same for all heads, so every GPU has them.
- The router is on every GPU. So are the experts that all tokens use, where tokens travel to the
  others (ep = tp · dp); elsewhere they are cut like a dense MLP.
- The vocabulary is rounded up, and so are experts that do not divide evenly.

Lesson 1's plan.py shares everything evenly, without copies and without communication.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import ModelShape
from lessons.l20_parallelism.pipeline import split_layers
from lessons.l20_parallelism.processes.mesh import Mesh
from lessons.toolbox.model.arguments import check_whole, refuse


@dataclass(frozen=True)
class Layout(Mesh):
    """How GPUs share a model. ep: over how many GPUs its experts are spread, whole. 1: each expert
    is cut into tp strips, like a dense MLP; tp: within a replica; tp · dp: all replicas share them.
    """

    ep: int = 1

    @property
    def shares_experts(self) -> bool:
        """Whether tokens of several replicas meet in the experts, so that tokens travel."""
        return self.ep > self.tp

    def __str__(self) -> str:
        names = {"TP": self.tp, "PP": self.pp, "DP": self.dp, "EP": self.ep}
        return " × ".join(f"{name}{size}" for name, size in names.items() if size > 1) or "one GPU"


def check_layout(model: ModelShape, layout: Layout) -> None:
    """Raise ValueError in one line if the model cannot be cut so."""
    tp, pp, dp, ep = layout.tp, layout.pp, layout.dp, layout.ep
    check_whole(tp=tp, pp=pp, dp=dp, ep=ep)
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % tp:
        refuse("tp", tp, f"a divisor of {heads}, the heads of {model.name}")
    if not model.kv_lora_rank and kv_heads % tp and tp % kv_heads:
        refuse("tp", tp, f"a divisor or a multiple of {kv_heads}, the KV heads of {model.name}")
    widths = {model.intermediate_size} | ({model.moe_intermediate_size} if ep == 1 else set())
    for width in widths - {0}:
        if width % tp:
            refuse("tp", tp, f"a divisor of {width}, a width of {model.name}")
    if model.num_state_layers:
        refuse("model", model.name, "one whose layers all keep K and V, because no state is cut")
    if pp > model.num_hidden_layers:
        refuse("pp", pp, f"1 to {model.num_hidden_layers}, the layers of {model.name}")
    if ep > 1 and not model.num_experts:
        refuse("ep", ep, f"1, because {model.name} has no experts")
    if ep not in (1, tp, tp * dp):
        refuse("ep", ep, f"1, tp = {tp} or tp · dp = {tp * dp}")
    if ep > 1 and pp > 1 and layout.shares_experts:
        refuse("ep", ep, f"1 or tp = {tp} where there are stages")


def stages_of(model: ModelShape, layout: Layout) -> list[range]:
    """The layers of each stage, as optimized.py splits them: evenly, so the ends hold more."""
    return split_layers(model.num_hidden_layers, layout.pp)


def part_of(model: ModelShape, layout: Layout, stage: range) -> ModelShape:
    """The shape of what one GPU has of these layers. Its num_experts are those of the whole layer,
    because the router chooses among all: `experts_held` says how many it has.
    """
    tp = layout.tp
    return replace(
        model,
        num_hidden_layers=len(stage),
        num_dense_layers=len(range(stage.start, min(stage.stop, model.num_dense_layers))),
        num_attention_heads=model.num_attention_heads // tp,
        num_key_value_heads=max(1, model.num_key_value_heads // tp),
        intermediate_size=model.intermediate_size // tp,
        moe_intermediate_size=model.moe_intermediate_size // (tp if layout.ep == 1 else 1),
        # a strip of a whole expert, counted as a part of one
        num_shared_experts=model.num_shared_experts / (tp if layout.ep == tp else 1),
        vocab_size=-(-model.vocab_size // tp),
    )


def experts_held(model: ModelShape, layout: Layout) -> int:
    """Routed experts of a layer on one GPU, whole ones or strips. More GPUs than experts: one each,
    and the busiest are on several.
    """
    return model.num_experts if layout.ep == 1 else -(-model.num_experts // layout.ep)


@dataclass(frozen=True)
class Share:
    """What one GPU of a stage holds, in bytes; of every sequence it holds kv_bytes_per_token."""

    stage: range
    weight_bytes: float
    kv_bytes_per_token: float
    buffer_bytes: float


def shares(
    model: ModelShape,
    layout: Layout,
    batch: int,
    bits_per_weight: float = 16,
    bits_per_kv: float = 16,
    batched_tokens: int = 2048,
) -> Iterator[Share]:
    """A GPU of each stage. batch: sequences of a replica; batched_tokens: new tokens of one pass,
    whose activations and messages need buffers. Raises ValueError for a layout that cannot be.
    """
    check_layout(model, layout)
    held = experts_held(model, layout)
    stages = stages_of(model, layout)
    for number, stage in enumerate(stages):
        part = part_of(model, layout, stage)
        is_first, is_last = number == 0, number == len(stages) - 1
        both = is_first and is_last and model.tie_word_embeddings
        ends = 1 if both else is_first + is_last
        params = part.layer_params(held) + ends * part.embedding_params
        yield Share(
            stage,
            params * calc.positive("bits_per_weight", bits_per_weight) / 8,
            calc.kv_bytes_per_token(part, bits_per_kv),
            buffer_bytes(part, layout, batch, batched_tokens),
        )


def buffer_bytes(part: ModelShape, layout: Layout, batch: int, batched_tokens: int) -> float:
    """Bytes that a pass needs beside weights and cache, on one GPU: activations as in lesson 1, of
    the part, and a [T, hidden_size] in 16 bits for each kind of message that is under way.
    """
    row = 2 * part.hidden_size
    messages = (layout.tp > 1) + (layout.pp > 1)
    if layout.shares_experts:  # a token goes to several experts, and as many answers come back
        messages += 2 * part.num_experts_per_tok / layout.tp
    return calc.activation_bytes(part, batched_tokens, batch) + messages * batched_tokens * row
