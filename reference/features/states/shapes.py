"""The shape of a published hybrid for lesson 1's planner.

    from lessons.l01_roofline.planner.plan import make_plan
    make_plan(QWEN3_NEXT, lookup("H200"), batch=64, context=32768)

Source: config.json of Qwen/Qwen3-Next-80B-A3B-Instruct; its model card for the parameters.
"""

from lessons.l01_roofline.planner.models import ModelShape
from lessons.toolbox.model.state_config import ATTENDS, HAS_STATE, StateConfig

KINDS = ((HAS_STATE,) * 3 + (ATTENDS,)) * 12
STATES = StateConfig(
    KINDS,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)


def layer_params(state: StateConfig, hidden_size: int) -> int:
    """Elements of a state layer's matrices: the projections in and out, and the convolution."""
    widths_in = state.conv_dim + state.value_dim + 2 * state.linear_num_value_heads
    matrices = hidden_size * (widths_in + state.value_dim)
    return matrices + state.conv_dim * state.linear_conv_kernel_dim


QWEN3_NEXT = ModelShape(
    "qwen3-next-80b-a3b",
    "80B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct, model card",
    2048,
    48,
    16,
    2,
    256,
    5120,
    151936,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    num_shared_experts=1,
    attention_gate=True,
    num_state_layers=len(STATES.layers),
    state_layer_params=layer_params(STATES, 2048),
    state_layer_bytes=STATES.bytes_per_sequence(2) // len(STATES.layers),
)
