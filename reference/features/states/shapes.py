"""The shapes of published hybrids for lesson 1's planner.

    from lessons.l01_roofline.planner.plan import make_plan
    make_plan(QWEN3_NEXT, lookup("H200"), batch=64, context=32768)
    python -m reference.features.states.shapes        # how many requests fit at once

Sources: config.json of Qwen/Qwen3-Next-80B-A3B-Instruct, ibm-granite/granite-4.0-h-small and
nvidia/Nemotron-H-8B-Base-8K, and their model cards for the parameters; Nemotron-H (2025), table 1.
"""

import sys

from lessons.l01_roofline.planner.models import ModelShape, find_model
from lessons.l01_roofline.planner.plan import make_plan
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model.mamba_config import LETTERS, MambaConfig
from lessons.toolbox.model.state_config import ATTENDS, HAS_STATE, Kinds, StateConfig

# of a token, for each number of a state, as lesson 27 counts them: fade, write, read by q; with a
# delta rule it is read by k, too
DECAYED_FLOPS, DELTA_FLOPS = 5, 7


def of_states(state: Kinds, layer_params: int, flops_each: int) -> dict[str, int]:
    """The fields of ModelShape that tell of states. layer_params: elements of the matrices of a
    layer with one; flops_each: of a token, for each number of its state.
    """
    count, (heads, key_dim, value_dim) = len(state.layers), state.matrix_shape
    return dict(
        num_state_layers=count,
        state_layer_params=layer_params,
        state_layer_bytes=state.bytes_per_sequence(2) // count,
        state_layer_flops=flops_each * heads * key_dim * value_dim,
    )


def delta_params(state: StateConfig, hidden_size: int) -> int:
    """Elements of a Gated DeltaNet's matrices: the projections in and out, and the convolution."""
    widths_in = state.conv_dim + state.value_dim + 2 * state.linear_num_value_heads
    matrices = hidden_size * (widths_in + state.value_dim)
    return matrices + state.conv_dim * state.linear_conv_kernel_dim


def mamba_params(state: MambaConfig, hidden_size: int) -> int:
    """Elements of a Mamba-2's matrices: the projections in and out, and the convolution."""
    widths_in = state.value_dim + state.conv_dim + state.mamba_n_heads
    matrices = hidden_size * (widths_in + state.value_dim)
    return matrices + state.conv_dim * state.mamba_d_conv


STATES = StateConfig(
    ((HAS_STATE,) * 3 + (ATTENDS,)) * 12,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
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
    **of_states(STATES, delta_params(STATES, 2048), DELTA_FLOPS),
)

OF_GRANITE = MambaConfig(
    ((HAS_STATE,) * 5 + (ATTENDS,) + (HAS_STATE,) * 4) * 4,
    mamba_n_heads=128,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_n_groups=1,
    mamba_d_conv=4,
)
GRANITE_4_SMALL = ModelShape(
    "granite-4.0-h-small",
    "32B",
    "ibm-granite/granite-4.0-h-small, model card",
    4096,
    40,
    32,
    8,
    128,
    1536,
    100352,
    tie_word_embeddings=True,
    num_experts=72,
    num_experts_per_tok=10,
    moe_intermediate_size=768,
    num_shared_experts=2,  # as wide as its one shared MLP
    **of_states(OF_GRANITE, mamba_params(OF_GRANITE, 4096), DECAYED_FLOPS),
)

PATTERN_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
OF_NEMOTRON_8B = MambaConfig(
    tuple(LETTERS[letter] for letter in PATTERN_8B),
    mamba_n_heads=128,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_n_groups=8,
    mamba_d_conv=4,
)
NEMOTRON_H_8B = ModelShape(
    "nemotron-h-8b",
    "8B",
    "nvidia/Nemotron-H-8B-Base-8K, model card",
    4096,
    52,
    32,
    8,
    128,
    21504,
    131072,
    mlp_matrices=2,
    num_mlp_layers=24,
    **of_states(OF_NEMOTRON_8B, mamba_params(OF_NEMOTRON_8B, 4096), DECAYED_FLOPS),
)
OF_NEMOTRON_56B = MambaConfig(
    (HAS_STATE,) * 54 + (ATTENDS,) * 10,  # counts alone matter here; 54 MLPs stand between them
    mamba_n_heads=256,
    mamba_d_head=64,
    mamba_d_state=256,
    mamba_n_groups=8,
    mamba_d_conv=4,
)
NEMOTRON_H_56B = ModelShape(
    "nemotron-h-56b",
    "56B",
    "arXiv 2504.03624, table 1",
    8192,
    118,
    64,
    8,
    128,
    32768,
    131072,
    mlp_matrices=2,
    num_mlp_layers=54,
    **of_states(OF_NEMOTRON_56B, mamba_params(OF_NEMOTRON_56B, 8192), DECAYED_FLOPS),
)

# ---------------------------------------------------------------- requests at once

HYBRIDS = (NEMOTRON_H_8B, GRANITE_4_SMALL, NEMOTRON_H_56B, QWEN3_NEXT)
BESIDE = (find_model("llama-3-8b"), find_model("llama-3-70b"), find_model("qwen3-30b-a3b"))
CONTEXT, GPUS = 32768, 2


def requests_at_once() -> str:
    """How many requests of CONTEXT tokens fit on GPUS H200, in Markdown. Counted from shapes."""
    lines = [
        "| model | state of a request | its K and V | requests at once "
        "| FLOPs of a token, states |",
        "|---|---|---|---|---|",
    ]
    for shape in (*HYBRIDS, *BESIDE):
        plan = make_plan(shape, lookup("H200"), 1, CONTEXT, GPUS)
        state, cached = shape.state_bytes / 1e6, CONTEXT * plan.kv_bytes_per_token / 1e6
        whole, states = plan.decode.flops / 1e9, shape.state_flops / 1e9
        lines.append(
            f"| {shape.name} | {state:,.1f} MB | {cached:,.0f} MB | {plan.sequences:,} | "
            f"{whole:,.1f} G, {states:.2f} G |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    print(requests_at_once())
    return 0


if __name__ == "__main__":
    sys.exit(main())
