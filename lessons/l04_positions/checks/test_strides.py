"""Each tensor is read by its own strides: q, k, v and the caches are slices of wider storage, each
of another width. Bugs that mix them up are seen.
"""

import pytest
import torch

from lessons.l04_positions import optimized
from lessons.l04_positions.optimized import rope_cache_kernel
from lessons.l04_positions.test_equivalence import inputs_for, rotate_and_write
from lessons.toolbox.proof.numerics import NotEquivalent, poisoned, prove
from lessons.toolbox.proof.planted import with_bug


def within(x, more_heads):
    """The same values, between NaN: [T, H, D]. There are 4 T rows and `more_heads` heads in its
    storage, so that other strides stay within it.
    """
    num_tokens, num_heads, head_dim = x.shape
    larger = poisoned((4 * num_tokens, num_heads + more_heads, head_dim), x.dtype, x.device)
    inner = larger[:num_tokens, 1 : num_heads + 1]
    inner.copy_(x)
    return inner


def laid_out(seed):
    """rope_cache's tensors, of which no two but the caches have tokens at the same distance."""
    q, k, v, k_cache, v_cache, *rest = inputs_for(7, 6, 3, 20, seed=seed)
    caches = [within(x, 4) for x in (k_cache, v_cache)]
    return [within(q, 2), within(k, 3), within(v, 6), *caches, *rest]


def prove_module(module, inputs):
    def fused(*x):
        module.rope_cache(*x, last_position=63)

    return prove(fused, rotate_and_write, inputs, mutates=(0, 3, 4))


def test_each_tensor_is_read_by_its_own_strides(seed, proof):
    inputs = laid_out(seed)
    assert len({x.stride(0) for x in inputs[:4]}) == 4
    proof.record(rope_cache_kernel, prove_module(optimized, inputs))


BUGS = {  # name: (the code as it is, the code with the bug)
    "q with k's stride": ("token * stride_qt", "token * stride_kt"),
    "k with q's stride": ("token * stride_kt", "token * stride_qt"),
    "k with v's stride": ("token * stride_kt", "token * stride_vt"),
    "v with q's stride": ("token * stride_vt", "token * stride_qt"),
    "v with k's stride": ("token * stride_vt", "token * stride_kt"),
    "slots with k's stride": ("slot * stride_slot", "slot * stride_kt"),
    "slots as if they were dense": ("slot * stride_slot", "slot * num_kv_heads * HEAD_DIM"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_mix_up_of_strides_is_seen(name, seed, tmp_path):
    inputs = laid_out(seed)
    inputs[6] = torch.arange(7, device=inputs[0].device) + 4  # none skipped
    with pytest.raises(NotEquivalent):
        prove_module(with_bug(optimized, tmp_path, *BUGS[name]), inputs)
