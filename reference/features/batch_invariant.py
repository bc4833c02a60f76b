"""batch_invariant=True: a request gets the same bits whatever runs beside it, however its prompt is
cut into chunks, and whether its first blocks were computed or found.

Two things of a step add numbers across tokens' shapes: its products and its attention. Both take
one order for all shapes here (lesson 25, `same_bits`). The norms, the activations and the sampler
work row by row.
"""

from torch import nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.generate import Rung
from lessons.l25_one_step_ahead.same_bits.attention import SAME_BITS
from lessons.l25_one_step_ahead.same_bits.linear import with_same_bits
from lessons.toolbox.model.arguments import refuse
from reference.engine.engine_args import EngineArgs
from reference.engine.packed import PackedLinear, has_own_product, packed
from reference.features.composition import ORDER


def invariant(model: Decoder, args: EngineArgs) -> tuple[Decoder, Rung]:
    """The model with products of a fixed order, and the rung whose attention has one. Raises
    ValueError for what has no fixed order yet.
    """
    check(model, args)
    model = packed(SAME_BITS.prepare(model))
    return with_same_bits(model, (nn.Linear, PackedLinear)), SAME_BITS


def check(model: Decoder, args: EngineArgs) -> None:
    """Raise ValueError for a feature or a model of which a part adds in an order of its own."""
    config = model.config
    others = {
        "enable_lora": args.enable_lora,
        f"kv_cache_dtype {args.kv_cache_dtype}": args.kv_cache_dtype != "auto",
        "quantized weights": any(map(has_own_product, model.modules())),
        "latent attention": config.mla is not None,
        "experts": config.moe is not None,
        "a soft cap or sinks": config.has_score_rules,
        # their last matrix is a layer of its own, which `with_same_bits` does not know
        "logits that are capped or divided": config.multipliers is not None
        or config.final_logit_softcapping is not None,
    }
    for name, is_there in others.items():
        if is_there:
            refuse("batch_invariant", True, f"False with {name}, because {ORDER}")
