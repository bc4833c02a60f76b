"""Proves that a folder of numbers, a folder of codes and a .gguf file are told apart and each read
by its loader, also by the command that measures quality.
"""

import pytest
import torch

from lessons.l18_weight_quantization.gguf.gguf_blocks import GgufWeight
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.toolbox.model.config_json import CheckpointError
from reference.checkpoints import any_checkpoint, quality
from reference.checkpoints.any_checkpoint import load_any, stored_method
from reference.checkpoints.gguf.gguf_model import save_gguf
from reference.checkpoints.write_checkpoint import save_quantized

TINY = "models/tiny-draft"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """{how it is stored: where}."""
    folder, model = tmp_path_factory.mktemp("stored"), load_any(TINY)
    save_gguf(folder / "Model.GGUF", model, None, "Q8_0")
    twin = quantized(
        model, lambda _, part: round_to_nearest(part.weight, 8, 32, True), dequantize_matmul
    )
    save_quantized(twin, TINY, folder / "codes", "compressed-tensors")
    return {
        None: TINY,
        "gguf": folder / "Model.GGUF",
        "compressed-tensors": folder / "codes",
    }


@pytest.mark.parametrize(
    "stored, kind", [(None, None), ("gguf", GgufWeight), ("compressed-tensors", GroupedInt)]
)
def test_each_is_read_by_its_loader(stored, kind, places):
    assert stored_method(places[stored]) == stored
    model, plain = load_any(places[stored], dtype=torch.float64), load_any(TINY)
    layer = model.layers[0].mlp.up_proj
    codes = layer.quantized if isinstance(layer, QuantizedLinear) else None
    assert type(codes) is (kind or type(None)) and model.norm.weight.dtype == torch.float64
    matrix = layer.weight if codes is None else codes.dequantize()
    torch.testing.assert_close(
        matrix.float(), plain.layers[0].mlp.up_proj.weight, atol=0.01, rtol=0
    )


def test_products_reach_the_layers(places):
    """Each kind of checkpoint has its own."""

    def one(*_):
        pass

    def other(*_):
        pass

    for stored, product in {"gguf": other, "compressed-tensors": one}.items():
        model = load_any(places[stored], "cpu", torch.float32, one, dict(multiply=other))
        assert model.layers[0].mlp.up_proj.multiply is product


def test_quality_measures_all_of_them(places, monkeypatch, capsys):
    monkeypatch.setattr(quality, "greedy_answers", lambda model, *_: [[1]])
    monkeypatch.setattr(quality, "load_tokenizer", lambda name: None)
    monkeypatch.setattr(quality, "held_out_windows", lambda *_: torch.randint(99, (1, 9)))
    for stored in ("gguf", "compressed-tensors"):
        assert quality.main([str(places[stored]), "--reference", TINY]) == 0
        assert "8.500 bits a weight" in capsys.readouterr().out


def test_a_missing_one_is_one_line(tmp_path):
    for name in ("none.gguf", "none"):
        with pytest.raises(CheckpointError) as refused:
            any_checkpoint.load_any(str(tmp_path / name))
        assert "\n" not in str(refused.value)
