"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l19_kv_quantization.lab.specs
"""

from dataclasses import replace

from lessons.l12_paged_kv.lab.specs import WITH_MATRIX_UNITS, decode_spec
from lessons.l19_kv_quantization import hooks
from lessons.toolbox.kernels.compile_check import KernelSpec

# what a cache holds -> (hook, Triton's type of its codes, the chips that it is for)
FORMATS = {
    "fp8": (hooks.scaled_load, "*fp8e4nv", (89, 90, 100)),
    "fp8bits": (hooks.e4m3_bits_load, "*u8", (80,)),
    "int8": (hooks.scaled_load, "*i8", WITH_MATRIX_UNITS),
    "int4": (hooks.int4_load, "*u8", WITH_MATRIX_UNITS),
}


def quantized(spec: KernelSpec, name: str, load, load_v, codes: str, scales: str) -> KernelSpec:
    """One of lesson 12's specs over codes of this type, with other hooks."""
    pointers = {"k_ptr": codes, "v_ptr": codes, "k_scale_ptr": scales, "v_scale_ptr": scales}
    constexprs = {key: x for key, x in spec.constexprs.items() if key not in pointers}
    return replace(
        spec,
        name=f"{spec.name}_{name}",
        signature=spec.signature | pointers,
        constexprs=constexprs | {"LOAD": load, "LOAD_V": load_v},
        divisible_by_16=(*spec.divisible_by_16, "stride_sh"),
    )


KERNELS = [
    quantized(decode_spec("bf16", group, dim, chips), name, load, load, codes, "*bf16")
    for name, (load, codes, chips) in FORMATS.items()
    for group, dim in ((4, 128), (3, 64))
]
