"""GPTQModel's and AutoRound's files: widths of 2, 3, 4 and 8 bits, and layers that have a width or
a group of their own; number by number, and as whole models.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.toolbox.model.checkpoint import REPOSITORY
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.proof.planted import with_bug
from reference.checkpoints import per_layer, words
from reference.checkpoints.any_checkpoint import stored_method
from reference.checkpoints.layouts import AWQ_ORDER, gptq
from reference.checkpoints.quantization_config import METHODS, PACKINGS, read_layouts
from reference.checkpoints.quantized_checkpoint import load_quantized
from tests.test_deepseek import random_model
from tests.test_quantized_checkpoints import CONFIGS, GPTQ, logits_of, with_config

pytestmark = pytest.mark.usefixtures("seed")
N, K, GROUP = 32, 64, 32


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes: [rows, n] -> [rows, n · bits / 32] int32: all bits of a row as one long number, cut
    into words.
    """
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * place for place, code in enumerate(row))
        cut = [number >> at & 2**32 - 1 for at in range(0, bits * len(row), 32)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in cut])
    return torch.tensor(rows, dtype=torch.int32)


def by_stream(shape: tuple[int, int], bits: int, group: int, lag: int, symmetric: bool = False):
    """Random parts as AutoGPTQ and GPTQModel store them, and the numbers that they mean: [N, K].
    lag: what is stored of a zero is that much less.
    """
    rows, columns = shape
    size = columns if group == -1 else group
    codes = torch.randint(2**bits, shape)
    zeros = torch.randint(lag, 2**bits, (rows, columns // size))
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    scales = torch.rand(zeros.shape).half() + 0.01
    parts = {
        "qweight": stream(codes, bits).T.contiguous(),
        "qzeros": stream((zeros - lag).T, bits),
        "scales": scales.T.contiguous(),
    }
    wide = (x.repeat_interleave(size, 1) for x in (zeros, scales.float()))
    zero, scale = wide
    return parts, (codes - zero) * scale


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("group", [GROUP, -1])
def test_every_width_is_read_number_by_number(bits, lag, group):
    for symmetric in (False, True):
        parts, wanted = by_stream((N, K), bits, group, lag, symmetric)
        found = gptq(bits, group, lag == 1).read(parts, (N, K))
        assert torch.equal(found.dequantize(), wanted)
        assert found.bits == max(4, bits) and (found.zeros is None) == symmetric


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_act_order_in_every_width(bits):
    """Groups of columns that are no neighbours (desc_act), number by number."""
    parts, _ = by_stream((N, K), bits, GROUP, 1)
    g_idx = (torch.randperm(K) // GROUP).int()
    found = gptq(bits, GROUP).read(parts | {"g_idx": g_idx}, (N, K)).dequantize()
    words = [[int(word) % 2**32 for word in column] for column in parts["qweight"].T.tolist()]
    zeros = [[int(word) % 2**32 for word in row] for row in parts["qzeros"].tolist()]
    for n, k in ((0, 0), (3, 10), (17, 21), (N - 1, K - 1), (N // 2, 42)):
        code = sum(word << 32 * i for i, word in enumerate(words[n])) >> bits * k & 2**bits - 1
        group = int(g_idx[k])
        whole = sum(word << 32 * i for i, word in enumerate(zeros[group]))
        zero = ((whole >> bits * n & 2**bits - 1) + 1) % 2**bits
        assert float(found[n, k]) == (code - zero) * float(parts["scales"][group, n])


BUGS = {
    "codes in two words": ("if shift + bits > WORD:", "if False:"),
    "the bits of the next word": ("<< WORD - shift", "<< shift"),
    "signs that spread": (" & 2**WORD - 1", ""),
}


@pytest.mark.parametrize("name", BUGS)
def test_wrong_words_are_seen(name, tmp_path, monkeypatch):
    buggy = with_bug(words, tmp_path, *BUGS[name])
    monkeypatch.setattr("reference.checkpoints.layouts.from_words", buggy.from_words)
    parts, wanted = by_stream((N, K), 3, GROUP, 1)
    assert not torch.equal(gptq(3, GROUP).read(parts, (N, K)).dequantize(), wanted)


def test_three_bits_fill_words_or_are_refused():
    parts, _ = by_stream((N, K), 3, GROUP, 1)
    with pytest.raises(ValueError, match=r"multiples of 32, because 3 int32 hold 32 codes"):
        gptq(3, -1).read(parts, (N, K - 16))


# ---------------------------------------------------------------- whole models


def awq_parts(shape: tuple[int, int], group: int):
    """As AutoAWQ stores 4 bits."""
    rows, columns = shape
    codes, zeros = torch.randint(16, shape), torch.randint(16, (rows, columns // group))
    scales = torch.rand(zeros.shape).half() + 0.01

    def packed(numbers):  # [n, rows] -> [n, rows / 8]
        return stream(numbers.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1), 4)

    parts = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.contiguous()}
    numbers = codes - zeros.repeat_interleave(group, 1)
    return parts, numbers * scales.float().repeat_interleave(group, 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    random_model(CONFIGS["llama"]).save_pretrained(folder)
    return folder


def written(source, folder, config, of_layer):
    """The model of `source` in `folder`, its projections by of_layer(name, shape), which returns
    parts and numbers, or None for a layer that stays; and with these numbers under plain/.
    """
    tensors = load_file(source / "model.safetensors")
    plain, codes = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        found = of_layer(layer, tuple(tensor.shape)) if layer.endswith("_proj") else None
        if found is not None:
            factor = tensor.std() / found[1].std()
            parts, plain[name] = found[0], found[1] * factor
            parts["scales"] = parts["scales"].float() * factor
            del codes[name]
            codes |= {f"{layer}.{end}": x.contiguous() for end, x in parts.items()}
    for kind, content in (("quantized", codes), ("plain", plain)):
        (folder / kind).mkdir()
        save_file(content, folder / kind / "model.safetensors", metadata={"format": "pt"})
        (folder / kind / "config.json").write_text((source / "config.json").read_text())
    with_config(folder / "quantized", quantization_config=config)
    return folder / "quantized"


def widths(model) -> dict[str, tuple[int, int]]:
    """Of each quantized layer its bits and its group size."""
    return {
        name: (part.quantized.bits, part.quantized.group_size)
        for name, part in model.named_modules()
        if isinstance(part, QuantizedLinear)
    }


def assert_same_model(folder, count: int, **found) -> None:
    ours, plain = load_quantized(folder), load_decoder(folder.parent / "plain")
    assert len(widths(ours)) == count
    for name, width in found.items():
        assert widths(ours)[name.replace("__", ".")] == width
    tokens = torch.randint(97, (19,))
    wanted = logits_of(plain, tokens)
    assert wanted.std() > 0.1, "the model under test must say something"
    torch.testing.assert_close(logits_of(ours, tokens), wanted, atol=1e-4, rtol=1e-4)


# GPTQModel writes such rules: 8 bits for down_proj, groups of 64 in layer 1, k_proj left alone
DYNAMIC = {
    "-:.*k_proj": {},
    r"+:model\.layers\.1\.mlp\..*": {"group_size": 64},
    r".*\.down_proj": {"bits": 8, "desc_act": False},
}


def by_dynamic(name: str, shape):
    if name.endswith("k_proj"):
        return None
    if re.match(r"model\.layers\.1\.mlp", name):
        return by_stream(shape, 3, 64, 0)
    return by_stream(shape, 8 if name.endswith("down_proj") else 3, GROUP, 0)


GPTQMODEL = {
    "quant_method": "gptq",
    "method": "gptq",
    "bits": 3,
    "group_size": GROUP,
    "desc_act": False,
    "sym": False,
    "lm_head": False,
    "checkpoint_format": "gptq_v2",
    "format": "gptq_v2",
    "pack_dtype": "int32",
    "activation": None,
    "rotation": None,
    "dynamic": DYNAMIC,
    "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
}


def test_gptqmodel_s_rules_for_single_layers(source, tmp_path):
    folder = written(source, tmp_path, GPTQMODEL, by_dynamic)
    assert_same_model(
        folder,
        12,
        layers__0__self_attn__q_proj=(4, GROUP),  # 3 bits, kept as 4
        layers__0__mlp__down_proj=(8, GROUP),
        layers__1__mlp__down_proj=(4, 64),  # the first rule that fits decides
    )


def auto_round(packing: str, **more) -> dict:
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": GROUP,
        "sym": False,
        "data_type": "int",
        "packing_format": packing,
        "autoround_version": "0.16.1",
        "iters": 200,
        "block_name_to_quantize": "model.layers",
        **more,
    }


EXTRA = {
    "model.layers.0.self_attn.v_proj": {"bits": 8},
    r".*\.1\.mlp\.gate_proj.*": {"bits": 2, "group_size": -1},
    "model.layers.1.self_attn.o_proj": {"bits": 16, "data_type": "float"},
    "lm_head": {"bits": 16, "data_type": "float"},
}


def by_extra(lag: int):
    def of_layer(name: str, shape):
        if name == "model.layers.1.self_attn.o_proj":
            return None
        if name == "model.layers.1.mlp.gate_proj":
            return by_stream(shape, 2, -1, lag)
        return by_stream(shape, 8 if "0.self_attn.v_proj" in name else 4, GROUP, lag)

    return of_layer


@pytest.mark.parametrize("packing", PACKINGS)
def test_auto_round_s_packings(packing, source, tmp_path):
    if PACKINGS[packing] == "awq":
        folder = written(
            source, tmp_path, auto_round(packing), lambda _, shape: awq_parts(shape, GROUP)
        )
        assert_same_model(folder, 14)
        return
    lag = int(PACKINGS[packing] == "gptq")
    folder = written(source, tmp_path, auto_round(packing, extra_config=EXTRA), by_extra(lag))
    assert_same_model(
        folder,
        13,
        layers__0__self_attn__v_proj=(8, GROUP),
        layers__1__mlp__gate_proj=(4, 64),  # 2 bits, kept as 4; a group a row
    )


DECIDES = 'return changed(config, "dynamic", changes)'
RULES = {
    "a rule for all": ("if matches(pattern[2:], name):", "if True:"),
    "the last rule decides": (DECIDES, DECIDES.replace("return", "config =")),
    "patterns anywhere": ("re.search if anywhere else re.match", "re.search"),
    "patterns from the start": ("re.search if anywhere else re.match", "re.match"),
    "names are patterns": ("SPECIAL & set(key)", "True"),
    "16 bits are codes": ("bits >= PLAIN_BITS", "bits > PLAIN_BITS"),
}


def answers(rules) -> list:
    """What per_layer.py, or a wrong one, says of names by hand."""
    base = {"bits": 4, "group_size": 128}
    dynamic = base | {"dynamic": {"-:.*k_proj": {}, "b": {"bits": 3}, r"+:.*b\.v": {"bits": 8}}}
    extra = base | {"extra_config": {"a.q": {"bits": 16}, "q": {"bits": 8}, "b.*": {"bits": 2}}}
    said = [rules.by_dynamic(dynamic, name) for name in ("a.k_proj", "b.v", "a.b.v", "c.b")]
    said += [rules.by_extra_config(extra, name) for name in ("a.q", "c.q", "a.b", "z")]
    return [None if one is None else one["bits"] for one in said]


def test_rules_by_hand():
    assert answers(per_layer) == [None, 3, 8, 4, None, 4, 2, 4]


@pytest.mark.parametrize("name", RULES)
def test_wrong_rules_are_seen(name, tmp_path):
    wrong = with_bug(per_layer, tmp_path, *RULES[name])
    assert answers(wrong) != answers(per_layer)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(packing_format="auto_round"), "got 'auto_round'; accepted: auto_round:auto_gptq or"),
        (dict(data_type="mx_fp"), "data_type: got 'mx_fp'; accepted: int"),
        (dict(act_bits=8), "'quantization_config.act_bits' must be 16, not 8"),
        (dict(bits=5), "bits: got 5; accepted: 2 or 3 or 4 or 8"),
        (dict(extra_config={".*q_proj": {"bits": 5}}), "layer layers.0.self_attn.q_proj in .* 5"),
        (dict(extra_config={"a": 4}), "extra_config: got .'a': 4.; accepted: an object"),
        (dict(rotation_config={"a": 1}), "no reader knows this key"),
        (dict(packing_format="auto_round:auto_awq", bits=3), "bits: got 3; accepted: 4"),
        (dict(group_size=64), r"qzeros: got int32"),
    ],
)
def test_what_auto_round_asks_for_in_vain_is_one_line(changes, said, source, tmp_path):
    config = auto_round("auto_round:auto_gptq") | changes
    folder = written(source, tmp_path, config, lambda _, shape: by_stream(shape, 4, GROUP, 1))
    with pytest.raises(CheckpointError, match=said) as error:
        load_quantized(folder)
    assert "\n" not in str(error.value)


def test_auto_round_s_older_name(source, tmp_path):
    config = auto_round("auto_round:auto_gptq") | {"quant_method": "intel/auto-round"}
    folder = written(source, tmp_path, config, lambda _, shape: by_stream(shape, 4, GROUP, 1))
    assert_same_model(folder, 14)
    assert stored_method(folder) == "auto-round"


def test_quantize_config_json_alone(source, tmp_path):
    """AutoGPTQ's older files say it beside config.json, without a quant_method."""
    config = {key: GPTQ[key] for key in ("bits", "group_size", "desc_act", "sym")}
    folder = written(source, tmp_path, None, lambda _, shape: by_stream(shape, 4, GROUP, 1))
    (folder / "quantize_config.json").write_text(json.dumps(config | {"damp_percent": 0.01}))
    assert_same_model(folder, 14)
    (folder / "quantize_config.json").unlink()
    for odd, said in (
        ("5", "got 5; accepted: None, or an object"),
        ("null", "has no quantization_config"),
    ):
        (folder / "hf_quant_config.json").write_text(f'{{"quantization": {odd}}}')
        with pytest.raises(CheckpointError, match=said):
            load_quantized(folder)


def test_the_lesson_lists_every_method():
    """With AutoRound's packings."""
    text = (REPOSITORY / "lessons/l18_weight_quantization/MORE.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    for method in METHODS:
        assert any(f"`{method}`" in row for row in rows), method
    named = re.findall(r"`(auto_round:\w+)`", text)
    assert {PACKINGS[name] for name in named} == set(PACKINGS.values())


# ---------------------------------------------------------------- any config at all

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "a": {
            "targets": ["re:.*down_proj"],
            "format": "int-quantized",
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "dynamic": True,
            },
        },
        "b": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}},
    },
    "transform_config": {
        "config_groups": {
            "R4": {
                "type": "hadamard",
                "head_dim": 32,
                "apply": [{"targets": ["re:.*down_proj"], "location": "input", "inverse": False}],
            }
        }
    },
}
FILES = {
    "gptq": GPTQMODEL,
    "auto-round": auto_round("auto_round:auto_gptq", extra_config=EXTRA),
    "compressed-tensors": COMPRESSED,
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
}
ODD = (None, True, -1, 0, 3, 2.5, "", "re:(", "x", [], [1], {}, {"a": 1}, {"a": {}}, [{}], [[]])


def changes(found):
    """Every JSON value that differs from `found` in one place."""
    yield from (odd for odd in ODD)
    if isinstance(found, dict):
        for key in found:
            yield {name: x for name, x in found.items() if name != key}
            yield from (found | {key: changed} for changed in changes(found[key]))
        yield found | {"unknown": 1}
    if isinstance(found, list):
        for at in range(len(found)):
            yield from ([*found[:at], changed, *found[at + 1 :]] for changed in changes(found[at]))


@pytest.mark.parametrize("name", FILES)
def test_any_change_of_a_config_is_read_or_refused_in_one_line(name):
    """One place at a time takes every odd value: never another error than ValueError."""
    read = refused = 0
    for config in changes(FILES[name]):
        if not isinstance(config, dict) or not isinstance(config.get("quant_method"), str):
            continue  # config_json.py refuses those
        try:
            says = read_layouts(config)
            for layer in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"):
                says.of(layer)
            read += 1
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            refused += 1
    assert refused > 10 and read + refused > 20
