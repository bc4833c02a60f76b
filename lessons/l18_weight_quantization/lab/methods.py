"""Every method and format on the embedded model: bits a weight beside what they cost in quality.
Nothing is timed, so the counts are the same on every machine, up to the rounding of sums.

    python -m lessons.l18_weight_quantization.lab.methods [NAME …]

counts the methods of these names again, or all of METHODS and then "qat" and "qlora" (a quarter of
an hour on one core), and writes each to results/counted/l18_quality.json, which the README quotes.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.gguf.gguf_blocks import FORMATS
from lessons.l18_weight_quantization.gguf.gguf_encode import to_gguf
from lessons.l18_weight_quantization.gguf.gguf_mixture import FALLBACKS
from lessons.l18_weight_quantization.lab import training
from lessons.l18_weight_quantization.lab.quality import (
    bits_per_weight,
    greedy_answers,
    held_out_windows,
    predictions,
    quality,
)
from lessons.l18_weight_quantization.linear import QuantizedLinear, dequantized, quantized
from lessons.l18_weight_quantization.methods.awq import awq
from lessons.l18_weight_quantization.methods.calibration import MODULES, WINDOW, calibration_windows
from lessons.l18_weight_quantization.methods.gptq import gptq
from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
from lessons.l18_weight_quantization.naive import (
    dequantize_matmul,
    per_tensor,
    round_to_nearest,
    to_float8,
    to_mxfp4,
    to_nf4,
)
from lessons.l18_weight_quantization.weights import QuantizedWeight
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.checkpoint import REPOSITORY, load_tokenizer

FILE = REPOSITORY / "results" / "counted" / "l18_quality.json"
TINY = str(REPOSITORY / "models" / "tiny")
CALIBRATION = 16  # windows of 512 tokens


class Method(NamedTuple):
    """A row of the table. build: (model, calibration windows) -> the quantized twin."""

    name: str  # in the record
    way: str  # "rounding", "GGUF", "AWQ" or "GPTQ"
    format: str  # as a reader knows it
    build: Callable[[Decoder, Tensor], Decoder]


def rounded(name: str, format: str, quantize: Callable[[Tensor], QuantizedWeight]) -> Method:
    """A method that looks at nothing but each matrix, [N, K]."""

    def of_layer(_: str, linear: nn.Linear) -> QuantizedWeight:
        return quantize(linear.weight)

    def build(model: Decoder, windows: Tensor) -> Decoder:
        return quantized(model, of_layer, dequantize_matmul)

    return Method(name, "rounding", format, build)


def calibrated(name: str, way: str, format: str, method: Callable, **options) -> Method:
    """A method that reads the calibration text."""
    return Method(name, way, format, partial(method, **options))


def gguf(format: str) -> Method:
    """A format of llama.cpp, with its own choice for rows that its blocks do not fill: 384 columns
    are no multiple of 256, so only down_proj has what the name says.
    """

    def quantize(weight: Tensor) -> QuantizedWeight:
        fits = weight.shape[1] % FORMATS[format].values == 0
        return to_gguf(weight, format if fits else FALLBACKS[format])

    method = rounded(f"gguf-{format.lower()}", format, quantize)
    return method._replace(way="GGUF")


E5M2 = torch.float8_e5m2
METHODS = (
    rounded("fp8-row", "FP8 E4M3, row", to_float8),
    rounded("fp8-tensor", "FP8 E4M3, tensor", partial(to_float8, per="tensor")),
    rounded("fp8-block", "FP8 E4M3, 128 × 128", partial(to_float8, per="block")),
    rounded("fp8-e5m2", "FP8 E5M2, row", partial(to_float8, dtype=E5M2)),
    rounded("int8-tensor", "INT8, tensor", per_tensor),
    rounded(
        "int8-row", "INT8, row", partial(round_to_nearest, bits=8, group_size=None, symmetric=True)
    ),
    rounded("int8-g128", "INT8 g128", partial(round_to_nearest, bits=8, symmetric=True)),
    rounded("int4-tensor", "INT4, tensor", partial(per_tensor, bits=4, symmetric=False)),
    rounded("int4-row", "INT4, row", partial(round_to_nearest, group_size=None)),
    rounded(
        "int4-g128-symmetric", "INT4 g128, symmetric", partial(round_to_nearest, symmetric=True)
    ),
    rounded("int4-g128", "INT4 g128", round_to_nearest),
    rounded("int4-g32", "INT4 g32", partial(round_to_nearest, group_size=32)),
    rounded("nf4", "NF4", partial(to_nf4, double_quantization=False)),
    rounded("nf4-double", "NF4, double", to_nf4),
    rounded("mxfp4", "MXFP4", to_mxfp4),
    rounded("nvfp4", "NVFP4", to_nvfp4),
    *map(gguf, ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q2_K")),
    calibrated("awq-int4-row", "AWQ", "INT4, row", awq, group_size=None),
    calibrated("awq-int4-g128", "AWQ", "INT4 g128", awq),
    calibrated("awq-int4-g32", "AWQ", "INT4 g32", awq, group_size=32),
    calibrated("gptq-int4-row", "GPTQ", "INT4, row", gptq, group_size=None),
    calibrated("gptq-int4-g128", "GPTQ", "INT4 g128", gptq),
    calibrated("gptq-int4-g128-order", "GPTQ", "INT4 g128, act-order", gptq, act_order=True),
    calibrated("gptq-int4-g32", "GPTQ", "INT4 g32", gptq, group_size=32),
)


def recorded() -> dict:
    """What was counted last."""
    return json.loads(FILE.read_text(encoding="utf-8"))


class Yardstick:
    """The embedded model as it was trained, and its predictions and answers on held-out text, made
    once.
    """

    def __init__(self, windows: int = 24):
        self.model = Decoder.from_pretrained(TINY)
        self.tokenizer = load_tokenizer(TINY)
        self.windows = held_out_windows(self.tokenizer, windows)
        self.predictions = list(predictions(self.model, self.windows))
        self.answers = greedy_answers(self.model, self.windows)

    def judge(self, model: Decoder) -> dict:
        """The five measures of a model."""
        found = quality(dequantized(model), self.windows, self.predictions, self.answers)
        return asdict(found)


def weight_error(model: Decoder, original: Decoder) -> float:
    """|Ŵ − W| / |W| in the Frobenius norm, over all quantized matrices."""
    moved = size = 0.0
    for name, part in model.named_modules():
        if isinstance(part, QuantizedLinear):
            weight = original.get_submodule(name).weight
            moved += float((part.quantized.dequantize() - weight).square().sum())
            size += float(weight.square().sum())
    return (moved / size) ** 0.5


def count(method: Method, yardstick: Yardstick) -> dict:
    """One row of the record."""
    model = method.build(yardstick.model, calibration_windows(yardstick.tokenizer, CALIBRATION))
    row = {"name": method.name, "way": method.way, "format": method.format}
    row["bits"] = bits_per_weight(model)
    if method.way != "AWQ":  # whose matrices are scaled, so they cannot be compared
        row["weight_error"] = weight_error(model, yardstick.model)
    return row | yardstick.judge(model)


def facts(yardstick: Yardstick) -> dict:
    """What all rows have in common."""
    return {
        "calibration": {"modules": list(MODULES), "tokens": CALIBRATION * WINDOW},
        "held_out_tokens": yardstick.windows[:, 1:].numel(),
        "reference": {"bits": 16, **yardstick.judge(yardstick.model)},
    }


def four_digits(found):
    """The record with four significant digits, so that rounding of sums does not change it."""
    if isinstance(found, dict):
        return {key: four_digits(value) for key, value in found.items()}
    if isinstance(found, list):
        return [four_digits(value) for value in found]
    return float(f"{found:.4g}") if isinstance(found, float) else found


def write(found: dict) -> None:
    """Put these parts into the file, in place of their last counts. Rows stay in the order of
    METHODS.
    """
    record = (recorded() if FILE.exists() else {"rows": []}) | four_digits(found)
    order = [method.name for method in METHODS]
    record["rows"] = sorted(record["rows"], key=lambda row: order.index(row["name"]))
    write_json(FILE, record)


def main(names: list[str]) -> int:
    methods = {method.name: method for method in METHODS}
    trainings = {"qat": training.count_qat, "qlora": training.count_qlora}
    if unknown := set(names) - {*methods, *trainings}:
        accepted = ", ".join([*methods, *trainings])
        print(f"NAME: got {', '.join(sorted(unknown))}; accepted: {accepted}", file=sys.stderr)
        return 2
    yardstick = Yardstick()
    if not names or not FILE.exists() or "reference" not in recorded():
        write(facts(yardstick))
    for name in names or [*methods, *trainings]:
        print(name, flush=True)
        if name in trainings:
            write({name: trainings[name](yardstick)})
            continue
        row = count(methods[name], yardstick)  # first, because it takes a minute
        write({"rows": [*(old for old in recorded()["rows"] if old["name"] != name), row]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
