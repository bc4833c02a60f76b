"""transformers' Qwen3-Next computes what the lesson's rules do, token by token and in chunks."""

import pytest
import torch

from lessons.l27_states.lab.testing import inputs, new_states
from lessons.l27_states.naive import gated_delta_rule

PEER = "transformers.models.qwen3_next.modeling_qwen3_next"


@pytest.mark.parametrize(
    "way", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"]
)
def test_transformers_computes_the_same(way, seed):
    """It has batches first, scales q itself, and keeps the state as [B, H, Dk, Dv], too."""
    modeling = pytest.importorskip(PEER, reason="NOT RUN: transformers is not installed")
    q, k, v, g, beta = (x.cpu() for x in inputs(70, 2, 16, 24, seed=seed))
    state = new_states(1, 2, 16, 24, seed).cpu()
    scaled = q * q.shape[-1] ** -0.5
    want, last = gated_delta_rule(*(x.double() for x in (scaled, k, v, g, beta)), state[0].double())
    out, after = getattr(modeling, way)(
        *(x[None] for x in (q, k, v)),
        g=g[None],
        beta=beta[None],
        initial_state=state,
        output_final_state=True,
    )
    torch.testing.assert_close(out[0].double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after[0].double(), last, atol=1e-5, rtol=1e-5)
