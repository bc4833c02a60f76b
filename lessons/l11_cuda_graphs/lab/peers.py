"""What others make of the same step: torch.compile in mode "reduce-overhead", which captures by
itself, ours and transformers'.

Both need a GPU; what cannot be compiled there says why in one line.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import StaticCache

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.lab.peers import peer_of
from lessons.l11_cuda_graphs.naive import LOCKSTEP, decode_batch
from lessons.toolbox.measure.bench import Unavailable


def attending(pool: KVPool, batch: Batch) -> Attend:
    """As pool.attending, by PyTorch's operations, which the compiler can fuse.

    It counts no bytes, because the compiler would compile again for every new count.
    """
    ops = LOCKSTEP.stand_ins

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_slots, v_slots = pool.k_slots[layer], pool.v_slots[layer]
        q = ops.write(q, k, v, k_slots, v_slots, batch, pool.cos_sin_cache)
        k_cache, v_cache = pool.blocks(k_slots), pool.blocks(v_slots)
        window = pool.config.sliding_window(layer)
        return ops.decode(q, k_cache, v_cache, batch, pool.config.softmax_scale, window)

    return attend


def compiled_step(model: Decoder, pool: KVPool, inputs: Tensor) -> Callable[[], Tensor]:
    """Lesson 2's decoder over PyTorch's attention, compiled. inputs: [4, B] -> a function that
    returns logits: [B, V].
    """
    inputs = inputs.to(model.device)
    for slots in (pool.k_slots, pool.v_slots):
        # otherwise writing into it keeps the compiler from capturing
        torch._dynamo.mark_static_address(slots)

    def step(given: Tensor) -> Tensor:
        batch = decode_batch(given, pool.block_size)
        return model.logits(model(batch.tokens, attending(pool, batch)))

    compiled = torch.compile(step, mode="reduce-overhead", dynamic=False)
    return tried(lambda: compiled(inputs).clone())


def transformers_step(model: Decoder, pool: KVPool, inputs: Tensor) -> Callable[[], Tensor]:
    """transformers' Llama with its static cache, compiled. inputs: [4, B], of equal lengths ->
    returns logits: [B, V].
    """
    peer, (tokens, positions, _, _) = peer_of(model), inputs.to(model.device)
    static, past = StaticCache(config=peer.config, max_cache_len=pool.block_size), int(inputs[1, 0])
    k_cache, v_cache = pool.blocks(pool.k_slots), pool.blocks(pool.v_slots)
    for layer in range(model.config.num_hidden_layers):
        k = k_cache[layer, :, :past].transpose(1, 2)
        v = v_cache[layer, :, :past].transpose(1, 2)
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
