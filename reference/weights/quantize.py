"""Write a checkpoint with its weights in fewer bits, in a form that other programs read.

python -m reference.weights.quantize --method gptq --group-size 32 --out build/tiny-gptq
python -m reference.weights.quantize --method fp8 --out build/tiny-fp8
python -m reference.weights.quantize --method int4 --activations int8 --out build/tiny-w4a8
python -m reference.weights.quantize --method q4_k_m --out build/tiny-q4_k_m.gguf
python -m reference.generate --model build/tiny-fp8 "def quicksort("
"""

import argparse
import sys
import time
from pathlib import Path

METHODS = """methods:
  int8   round to nearest, 8 bits, a scale for each row
  int4   round to nearest, 4 bits, a scale and a zero point for each group
  fp8    E4M3, a scale for each row, or for each tile of 128 x 128 with --format fp8
  nvfp4  4-bit floats, an E4M3 scale for 16 of them and one scale for the matrix
  nf4    16 values that suit normally distributed weights, as QLoRA uses them
  awq    int4 after scaling the columns that meet large inputs (needs a text: a built-in one)
  gptq   int4 whose later columns make up for the error of earlier ones (the same text)
  q4_k_m and the other names of GGUF: a mixture of llama.cpp's formats, in one .gguf file

formats: who reads them
  gptq                AutoGPTQ, GPTQModel, vLLM, SGLang       of gptq, int4, int8
  awq                 AutoAWQ, vLLM, SGLang                   of awq, int4, gptq without --act-order
  compressed-tensors  transformers, vLLM, SGLang              of all but nf4 and --act-order
  fp8                 transformers, vLLM (DeepSeek-V3's form) of fp8
  modelopt            vLLM, SGLang, TensorRT-LLM              of nvfp4, fp8
  bitsandbytes        transformers, vLLM                      of nf4
  (a .gguf file)      llama.cpp, Ollama, transformers         of q2_k ... q8_0, f16, bf16, f32

lm_head and the embedding stay in 16 bits, but not in a .gguf file. This project's engine reads
every file that is written here: LLM("build/tiny-fp8"). To quantize a model only for one run, there
is LLM("models/tiny", quantization="int4").

"""
SAFETENSORS = ("int8", "int4", "fp8", "nvfp4", "nf4", "awq", "gptq")
GGUF = ("q2_k", "q3_k_s", "q3_k_m", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "q5_0", "q5_1", "q5_k_s")
GGUF += ("q5_k_m", "q6_k", "q8_0", "f16", "bf16", "f32")
# method -> the format that is usual for it
FORMAT = {"gptq": "gptq", "awq": "awq", "nf4": "bitsandbytes"}
# format -> the methods whose matrices it holds
FORMATS = {
    "gptq": ("gptq", "int4", "int8"),
    "awq": ("awq", "int4", "gptq"),
    "compressed-tensors": ("int8", "int4", "fp8", "nvfp4", "awq", "gptq"),
    "fp8": ("fp8",),
    "modelopt": ("nvfp4", "fp8"),
    "bitsandbytes": ("nf4",),
}
# option -> the methods that have it
TAKES = {
    "bits": ("gptq", "awq"),
    "windows": ("gptq", "awq"),
    "group_size": ("int4", "int8", "gptq", "awq"),
    "symmetric": ("int4", "gptq", "awq"),
    "act_order": ("gptq",),
    "no_double_quant": ("nf4",),
    "activations": ("int8", "int4", "fp8", "awq", "gptq"),
    "format": SAFETENSORS,
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m reference.weights.quantize",
        description=__doc__.split("\n")[0],
        epilog=METHODS + "examples:\n" + __doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="models/tiny", help="folder or hub name of a checkpoint in 16 bits")
    add(
        "--method",
        required=True,
        type=str.lower,
        choices=(*SAFETENSORS, *GGUF),
        metavar="METHOD",
        help="one of the list below",
    )
    add(
        "--out",
        required=True,
        help="folder to write, empty or new; for GGUF a new file whose name ends in .gguf",
    )
    add(
        "--format",
        choices=tuple(FORMATS),
        metavar="FORMAT",
        help="default: the method's own, else compressed-tensors",
    )
    add("--bits", type=int, choices=(4, 8), help="of awq and gptq; default 4")
    add(
        "--group-size",
        type=int,
        help="inputs that share a scale, for int4, int8, awq and gptq; 0 for whole rows; default: "
        "128, or what of it divides every layer; rows for int8",
    )
    add(
        "--symmetric",
        action=argparse.BooleanOptionalAction,
        help="no zero points; default for gptq, as in AutoGPTQ; int8 always is",
    )
    add("--act-order", action="store_true", help="gptq: the columns with large inputs first")
    add("--no-double-quant", action="store_true", help="nf4: keep the scales in 32 bits")
    add(
        "--activations",
        choices=("int8", "fp8"),
        help="inputs of the quantized layers in 8 bits, too (W8A8, W4A8); whole numbers are then "
        "symmetric by default; fp8 alone for fp8",
    )
    add("--windows", type=int, help="awq, gptq: stretches of the built-in text to look at")
    add("--device", help="where to quantize; default: the GPU if there is one")
    return parser.parse_args(argv)


def settings_of(options: argparse.Namespace):
    """The reference.weights.quantization.Settings that were asked for. Raises ValueError for
    options that the method or the format does not have.
    """
    from reference.weights.quantization import Settings

    for name, methods in TAKES.items():
        value = getattr(options, name)
        is_given = value is not None and value is not False  # 0 is a group size
        if is_given and options.method not in methods:
            flag, got = name.replace("_", "-"), options.method
            raise ValueError(f"--{flag}: got {got} as --method; accepted: {', '.join(methods)}")
    form = format_of(options)
    if options.method not in FORMATS.get(form, GGUF):
        fit = ", ".join(name for name, methods in FORMATS.items() if options.method in methods)
        raise ValueError(f"--format: got {form} for {options.method}; accepted: {fit}")
    if options.act_order and form != "gptq":
        raise ValueError(f"--format: got {form} with --act-order; accepted: gptq")
    if options.bits == 8 and form == "awq":
        raise ValueError("--bits: got 8 for the format awq; accepted: 4")
    if options.activations is not None and form != "compressed-tensors":
        raise ValueError(f"--format: got {form} with --activations; accepted: compressed-tensors")
    if options.activations == "int8" and options.method == "fp8":
        raise ValueError("--activations: got int8 for fp8; accepted: fp8")
    given = {name: getattr(options, name) for name in ("bits", "group_size", "windows")}
    is_symmetric = options.method == "gptq" or options.activations is not None
    symmetric = is_symmetric if options.symmetric is None else options.symmetric
    return Settings(
        **{name: value for name, value in given.items() if value is not None},
        symmetric=symmetric,
        act_order=options.act_order,
        double_quantization=not options.no_double_quant,
        fp8_per="block" if form == "fp8" else "row",
    )


def format_of(options: argparse.Namespace) -> str:
    """The format that was asked for, or the method's own."""
    if options.method not in SAFETENSORS:
        return "gguf"
    return options.format or FORMAT.get(options.method, "compressed-tensors")


def write_gguf(options: argparse.Namespace) -> None:
    """A .gguf file. Raises ValueError, in one line."""
    from lessons.l06_mla.deepseek import load_decoder
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.checkpoints.gguf.gguf_model import save_gguf

    settings_of(options)  # no option is GGUF's
    out = Path(options.out)
    if out.suffix != ".gguf" or out.exists():
        raise ValueError(f"--out: got {options.out}; accepted: a new file that ends in .gguf")
    began = time.perf_counter()
    model = load_decoder(options.model, options.device or "cpu")
    out.parent.mkdir(parents=True, exist_ok=True)
    save_gguf(out, model, load_tokenizer(options.model), options.method.upper())
    seconds = time.perf_counter() - began
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, {options.method.upper()}, {seconds:.0f} s")


def write_safetensors(options: argparse.Namespace) -> None:
    """A folder with config.json and tokenizer. Raises ValueError, in one line."""
    # here, because they take seconds, and --help should not
    from lessons.l06_mla.deepseek import load_decoder
    from lessons.toolbox.measure.device import default_device
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.checkpoints.write_checkpoint import (
        check_new_folder,
        quantized_layers,
        save_quantized,
    )
    from reference.weights.quantization import quantize_model

    settings, form = settings_of(options), format_of(options)
    check_new_folder(options.out)
    began = time.perf_counter()
    device = default_device() if options.device is None else options.device
    model = load_decoder(options.model, device)
    twin = quantize_model(model, options.method, lambda: load_tokenizer(options.model), settings)
    save_quantized(twin, options.model, options.out, form, options.activations)
    weights = quantized_layers(twin).values()
    numbers = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    bits = 8 * sum(weight.nbytes for weight in weights) / numbers
    size = Path(options.out, "model.safetensors").stat().st_size
    print(
        f"{options.out}: {len(weights)} layers, {bits:.2f} bits a weight with their scales, "
        f"{size / 1e6:.1f} MB in all, format {form}, {time.perf_counter() - began:.0f} s"
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        write = write_safetensors if options.method in SAFETENSORS else write_gguf
        write(options)
    except ValueError as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quantize: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
