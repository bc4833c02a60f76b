"""What others make of the same step: torch.compile in mode "reduce-overhead", which captures by
itself, ours and transformers'.

Both need a GPU; what cannot be compiled there says why in one line.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import StaticCache

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.lab.peers import peer_of
from lessons.l11_cuda_graphs.slots import SlotCache, decode_logits
from lessons.toolbox.measure.bench import Unavailable


def on_torch(cache: SlotCache) -> SlotCache:
    """The same rows, written and read by PyTorch's operations, which the compiler can fuse."""
    twin = SlotCache(cache.config, 1, 1)
    twin.rows, twin.capacity, twin.keys, twin.values = (
        cache.rows,
        cache.capacity,
        cache.keys,
        cache.values,
    )
    for buffer in (twin.keys, twin.values):
        # otherwise writing into it keeps the compiler from capturing
        torch._dynamo.mark_static_address(buffer)
    return twin


def compiled_step(model: Decoder, cache: SlotCache, inputs: Tensor) -> Callable[[], Tensor]:
    """Lesson 2's decoder over PyTorch's attention, compiled. inputs: [4, B] -> a function that
    returns logits: [B, V].
    """
    twin, inputs = on_torch(cache), inputs.to(model.device)
    step = torch.compile(
        lambda given: decode_logits(model, twin, given, twin.capacity),
        mode="reduce-overhead",
        dynamic=False,
    )
    return tried(lambda: step(inputs).clone())


def transformers_step(model: Decoder, cache: SlotCache, inputs: Tensor) -> Callable[[], Tensor]:
    """transformers' Llama with its static cache, compiled. inputs: [4, B], of equal lengths ->
    returns logits: [B, V].
    """
    peer, (tokens, positions, _, _) = peer_of(model), inputs.to(model.device)
    static, past = StaticCache(config=peer.config, max_cache_len=cache.capacity), int(inputs[1, 0])
    for layer in range(model.config.num_hidden_layers):
        k, v = (
            x[layer, :-1].unflatten(0, (cache.rows, cache.capacity))[:, :past].transpose(1, 2)
            for x in (cache.keys, cache.values)
        )
        static.update(k, v, layer)
    forward = torch.compile(peer.forward, mode="reduce-overhead", dynamic=False)

    def step() -> Tensor:
        for layer in static.layers:  # takes the step before back
            layer.cumulative_length.fill_(past)
        out = forward(
            tokens[:, None], position_ids=positions[:, None], past_key_values=static, use_cache=True
        )
        return out.logits[:, 0].clone()

    return tried(step)


def tried(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """step, called three times to compile and capture. step() returns logits: [B, V]. Raises
    Unavailable where that fails.
    """

    def run() -> Tensor:
        # the compiler marks tensors, which inference tensors do not allow
        with torch.inference_mode(False), torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            return step()

    try:
        for _ in range(3):
            run()
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        raise Unavailable(f"not compiled here: {type(error).__name__}: {first}"[:200]) from error
    return run
