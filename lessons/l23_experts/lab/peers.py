"""The libraries of the benchmark: PyTorch's grouped product, transformers'
Mixtral and vLLM's fused experts.

Each function takes x: [T, H], weights and chosen: [T, k], gate_up: [E, 2I, H] and down: [E, H, I],
and returns a function of no arguments that gives [T, H]. They raise Unavailable where they cannot
run.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from lessons.toolbox.measure.bench import Unavailable, needs


def grouped_product() -> Callable:
    """PyTorch's product of groups of rows, each with its own matrix. Raises Unavailable."""
    found = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
    if found is None:
        raise Unavailable("needs torch.nn.functional.grouped_mm, of PyTorch 2.10 or later")
    return found


def grouped_mm(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor
) -> Callable[[], Tensor]:
    """Rows sorted by expert, two of PyTorch's grouped products, silu and sum in eager mode: [T, H]
    -> [T, H]. Nothing waits for the GPU.
    """
    product, top_k = grouped_product(), chosen.shape[1]
    expert = torch.arange(len(down), device=x.device)

    def run() -> Tensor:
        own, pairs = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(own, expert, right=True).int()  # of each expert's rows
        gate, up = product(x[pairs // top_k], gate_up.mT, offs=ends).chunk(2, dim=-1)
        rows = product(silu(gate) * up, down.mT, offs=ends)
        y = torch.empty_like(rows).index_copy_(0, pairs, rows)
        return (y.unflatten(0, chosen.shape) * weights[..., None]).sum(1).to(x.dtype)

    return checked(run)


def transformers_mixtral(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor
) -> Callable[[], Tensor]:
    """transformers' experts by its grouped product: [T, H] -> [T, H]."""
    with needs("transformers 5 or later"):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    num_experts, size, inner = down.shape
    config = MixtralConfig(
        hidden_size=size,
        intermediate_size=inner,
        num_local_experts=num_experts,
        num_experts_per_tok=chosen.shape[1],
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        layer = MixtralExperts(config).requires_grad_(False)
    layer.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    layer.down_proj = torch.nn.Parameter(down, requires_grad=False)
    return checked(lambda: layer(x, chosen, weights.to(x.dtype)))


def vllm_fused_experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor
) -> Callable[[], Tensor]:
    """vLLM's Triton kernel, with the tiles that it ships for this GPU if it has any: [T, H] ->
    [T, H].
    """
    if not x.is_cuda:
        raise Unavailable("needs a GPU")
    with needs("vllm"):
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    ids = chosen.int()
    return checked(lambda: fused_experts(x, gate_up, down, weights.float(), ids))


def checked(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`run`, which gives [T, H], if it runs. Raises Unavailable with its reason, but not for too
    little memory.
    """
    try:
        with torch.inference_mode():
            run()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if "out of memory" in str(error).lower():
            raise
        raise Unavailable(str(error).split("\n")[0][:120]) from None
    return run
