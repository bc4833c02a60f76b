"""Which implementations of attention PyTorch has here, and how to force one: `sdpa_kernel`.

    python -m lessons.l09_flash_attention.lab.backends [--tokens 256]
        each backend of scaled_dot_product_attention: its milliseconds, or why it cannot run

Without a choice PyTorch takes the first that can run, and says nothing. A mask, a dtype or a head
size may so cost a hidden factor.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
"""

import argparse
import sys
import warnings
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lessons.l09_flash_attention.lab.peers import BACKENDS
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.measure.timing import measure

HEADS, HEAD_DIM = 4, 64


def attend_with(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by this backend or none. q, k, v: [B, H, T, D] -> [B, H, T, D].

    Raises RuntimeError where the backend cannot run: PyTorch then warns of each reason.
    """
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def refusal(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why a backend cannot run on q, k, v: [B, H, T, D], in a line; None where it can."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            attend_with(backend, q, k, v)
        except RuntimeError as error:
            reasons = [str(warning.message).split("(Triggered")[0].strip() for warning in said]
            return " ".join(reasons) or str(error).split(". ")[0]
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.l09_flash_attention.lab.backends",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument("--tokens", type=int, default=256, help="queries and keys (default: 256)")
    tokens = parser.parse_args(argv).tokens
    if tokens < 1:
        print(f"tokens: got {tokens}; accepted: 1 or more", file=sys.stderr)
        return 2
    device = default_device()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    q, k, v = torch.randn(3, 1, HEADS, tokens, HEAD_DIM, device=device, dtype=dtype)
    print(f"{tokens} tokens, {HEADS} heads of {HEAD_DIM}, {dtype}, causal, on {device}")
    for name, backend in BACKENDS.items():
        why = refusal(backend, q, k, v)
        if why is None:
            timing = measure(partial(attend_with, backend, q, k, v), device=device, budget_s=0.2)
            why = f"{1e3 * timing.median_s:.3f} ms"
        print(f"{name:10}{why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
