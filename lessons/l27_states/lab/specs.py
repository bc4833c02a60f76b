"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l27_states.lab.specs
"""

from lessons.l27_states import convolution, optimized, prompts
from lessons.toolbox.kernels.compile_check import KernelSpec
from lessons.toolbox.kernels.triton_ import triton

ROOM = "lessons.l27_states"
KEY_DIM = VALUE_DIM = 128  # of a head of Qwen3-Next; Mamba-2's states are 128 by 64
WIDTH = 4
WITH_MATRIX_UNITS = (80, 89, 90, 100)  # a T4 has none for tf32
SIZES = {"KEY_DIM": KEY_DIM, "VALUE_DIM": VALUE_DIM, "BLOCK_K": KEY_DIM}


def strides(tensors: str, of: str = "th") -> tuple[str, ...]:
    """qk -> stride_qt, stride_qh, stride_kt, stride_kh."""
    return tuple(f"stride_{x}{which}" for x in tensors for which in of)


def step_spec(dtype: str, delta: bool) -> KernelSpec:
    """state_step_kernel, with the delta rule or without."""
    counts = strides("qkv", "bh")
    numbers = {"log_decay_ptr": "*fp32"}
    constexprs = {**SIZES, "BLOCK_V": optimized.COLUMNS, "DELTA": delta}
    if delta:
        numbers["beta_ptr"] = "*fp32"
    else:
        constexprs["beta_ptr"] = None
    return KernelSpec(
        f"{ROOM}.optimized:state_step_kernel",
        name=f"step_{'delta' if delta else 'decay'}_{dtype}",
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}"),
            **numbers,
            "states_ptr": "*fp32",
            "slots_ptr": "*i64",
            "num_heads": "i32",
            **dict.fromkeys((*counts, "stride_slot"), "i32"),
        },
        constexprs=constexprs,
        num_warps=optimized.NUM_WARPS,
        divisible_by_16=(*counts, "stride_slot"),
    )


def chunk_spec(kernel: str, dtype: str, delta: bool = True) -> KernelSpec:
    """prepare, states or outputs, as prompts.py launches them."""
    pointers = {"log_decay_ptr": "*fp32", "cu_seqlens_ptr": "*i32", "num_tokens": "i32"}
    written = "*fp32" if delta else f"*{dtype}"
    tile = {"prepare": prompts.PREPARE, "states": prompts.STATES, "outputs": prompts.OUTPUTS}[
        kernel
    ]
    constexprs = {**SIZES, "SIZE": prompts.CHUNK, "BLOCK_V": tile.columns}
    constexprs["BLOCK_K"] = tile.rows or KEY_DIM
    if kernel == "prepare":
        of = strides("kv")
        pointers |= {"k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "beta_ptr": "*fp32"}
        pointers |= {"u_ptr": "*fp32", "w_ptr": "*fp32"}
    elif kernel == "states":
        of = (*strides("ku"), "stride_slot")
        pointers |= {"k_ptr": f"*{dtype}", "u_ptr": written, "has_state_ptr": "*i1"}
        pointers |= {"states_ptr": "*fp32", "slots_ptr": "*i64", "before_ptr": "*fp32"}
        constexprs |= {"DELTA": delta, "HAS_STATE": True}
        if delta:
            pointers["w_ptr"] = "*fp32"
        else:
            constexprs["w_ptr"] = None
    else:
        of = strides("qku")
        pointers |= {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "u_ptr": written}
        pointers |= {"before_ptr": "*fp32", "out_ptr": f"*{dtype}", "num_heads": "i32"}
    return KernelSpec(
        f"{ROOM}.chunk_kernels:{kernel}_kernel",
        name=f"{kernel}_{'delta' if delta else 'decay'}_{dtype}",
        signature=pointers | dict.fromkeys(of, "i32"),
        constexprs=constexprs,
        num_warps=tile.num_warps,
        num_stages=prompts.NUM_STAGES,
        divisible_by_16=of,
        chips=WITH_MATRIX_UNITS,
    )


def conv_spec(kernel: str, dtype: str) -> KernelSpec:
    """conv_step or conv_prompts."""
    counts = ("stride_x", "stride_slot")
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "states_ptr", "y_ptr"), f"*{dtype}")
    constexprs = {"WIDTH": WIDTH, "BLOCK": convolution.CHANNELS}
    num_warps = 2
    if kernel == "conv_prompts":
        pointers |= {"cu_seqlens_ptr": "*i32", "has_state_ptr": "*i1", "num_tokens": "i32"}
        constexprs |= {"HAS_STATE": True, "BLOCK_T": convolution.TOKENS}
        constexprs["BLOCK_W"] = triton.next_power_of_2(WIDTH)
        num_warps = 4
    return KernelSpec(
        f"{ROOM}.convolution:{kernel}_kernel",
        name=f"{kernel}_{dtype}",
        signature=pointers
        | {"slots_ptr": "*i64", "channels": "i32"}
        | dict.fromkeys(counts, "i32"),
        constexprs=constexprs,
        num_warps=num_warps,
        divisible_by_16=("channels", *counts),
    )


KERNELS = [
    *(step_spec(dtype, delta) for dtype in ("bf16", "fp32") for delta in (True, False)),
    *(chunk_spec(kernel, "bf16") for kernel in ("prepare", "states", "outputs")),
    *(chunk_spec(kernel, "bf16", delta=False) for kernel in ("states", "outputs")),
    *(conv_spec(kernel, "bf16") for kernel in ("conv_step", "conv_prompts")),
]
