"""The samplers that the benchmark times beside ours on a GPU: FlashInfer's, which draws by
rejection and sorts nothing, and vLLM's Triton kernel, which masks what top-k and top-p cut.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.sampling import SamplingParams


def flashinfer_top_p(logits: Tensor, params: SamplingParams) -> Tensor:
    """flashinfer.sampling: [B, V] -> [B] int32."""
    import flashinfer

    probs = torch.softmax(logits / params.temperature, dim=-1)
    return flashinfer.sampling.top_p_sampling_from_probs(probs, params.top_p)


def vllm_top_p(logits: Tensor, params: SamplingParams) -> Tensor:
    """vLLM's mask, softmax, and the draw by exponential numbers: [B, V] -> [B] int64."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    top_p = torch.full((len(logits),), params.top_p, device=logits.device)
    # It writes into the logits that it is given.
    masked = apply_top_k_top_p_triton((logits / params.temperature).float(), None, top_p)
    probs = masked.softmax(dim=-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)
