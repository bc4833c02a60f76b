"""Attention by another rung than the model's own: in a fixed order, or by products of FP8."""

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.generate import Rung
from lessons.l12_paged_kv.runner import paged_rung_of
from lessons.l19_kv_quantization.activations.attention.pool import CHOICE, products_rung_of
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.window_groups import WindowGroups
from reference.engine.engine_args import EngineArgs
from reference.engine.packed import packed
from reference.features.batch_invariant import invariant


def prepared_for(
    model: Decoder, args: EngineArgs, groups: WindowGroups | None
) -> tuple[Decoder, Rung]:
    """The model, prepared for the rung that its arguments ask for. groups: of its layers, None:
    one. Raises ValueError for a model that this rung does not serve.
    """
    if args.batch_invariant:
        return invariant(model, args)
    if groups is not None:
        refuse(CHOICE, True, "False, or disable_hybrid_kv_cache_manager=True with such windows")
    return packed(paged_rung_of(model).prepare(model)), products_rung_of(model)
