"""Lesson 1's numbers against sources that do not share its code: publishers' counts, transformers'
models, arithmetic by hand.
"""

import dataclasses

import pytest
import torch

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.models import MODELS, ModelShape, find_model


def transformers_config(shape: ModelShape):
    """The same shape as a configuration of transformers."""
    from transformers import AutoConfig

    name = shape.name.rsplit("-", 1)[0]
    family = {
        "llama-2": "llama",
        "llama-3": "llama",
        "gpt-j": "gptj",
        "deepseek": "deepseek_v3",
    }.get(name, name)
    sizes = {
        field: getattr(shape, field)
        for field in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
            "tie_word_embeddings",
        )
    }
    if family == "gptj":
        sizes = {
            "n_embd": shape.hidden_size,
            "n_layer": shape.num_hidden_layers,
            "n_head": shape.num_attention_heads,
            "n_inner": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "tie_word_embeddings": False,
        }
    elif family == "falcon":
        sizes |= {
            "num_kv_heads": shape.num_key_value_heads,
            "new_decoder_architecture": True,
            "bias": False,
            "ffn_hidden_size": shape.intermediate_size,
        }
    elif family == "mixtral":
        sizes |= {
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
        }
    elif family == "deepseek_v3":
        sizes |= {
            "n_routed_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
            "moe_intermediate_size": shape.moe_intermediate_size,
            "n_shared_experts": shape.num_shared_experts,
            "first_k_dense_replace": shape.num_dense_layers,
            "q_lora_rank": shape.q_lora_rank,
            "kv_lora_rank": shape.kv_lora_rank,
            "qk_rope_head_dim": shape.qk_rope_head_dim,
            "qk_nope_head_dim": shape.head_dim - shape.qk_rope_head_dim,
            "v_head_dim": shape.v_head_dim,
        }
    else:
        sizes["head_dim"] = shape.head_dim
        if shape.num_experts:
            family = "qwen3_moe"
            sizes |= {
                "num_experts": shape.num_experts,
                "num_experts_per_tok": shape.num_experts_per_tok,
                "moe_intermediate_size": shape.moe_intermediate_size,
            }
    return AutoConfig.for_model(family, **sizes)


def transformers_model(shape: ModelShape):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes without memory: 671 billion parameters in a second
        return AutoModelForCausalLM.from_config(
            transformers_config(shape), dtype=torch.bfloat16
        ).eval()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_of_transformers(name):
    shape = MODELS[name]
    model = transformers_model(shape)
    built = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert shape.params == matrices, (
        f"{name}: formula {shape.params:,}, transformers' matrices {matrices:,}"
    )
    assert shape.params == pytest.approx(built, rel=1e-3)  # norms and biases are left out


@pytest.mark.parametrize("name", MODELS)
def test_parameters_match_the_published_count(name):
    published, billions = MODELS[name].published.removesuffix("B"), MODELS[name].params / 1e9
    digits = len(published.partition(".")[2])
    assert abs(billions / float(published) - 1) < 0.01 or round(billions, digits) == float(
        published
    )


# Published active parameters: Mixtral's paper says 13B, Qwen3's 3B and 22B, DeepSeek-V3's 37B.
@pytest.mark.parametrize(
    "name, billions",
    [("mixtral-8x7b", 13), ("qwen3-30b-a3b", 3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37)],
)
def test_active_parameters_match_the_published_count(name, billions):
    assert round(MODELS[name].active_params / 1e9) == billions


# ---------------------------------------------------------------- KV cache


@pytest.mark.parametrize("name", MODELS)
def test_kv_bytes_equal_the_cache_that_transformers_builds(name):
    layers = MODELS[name].num_dense_layers + 1
    shape = dataclasses.replace(MODELS[name], num_hidden_layers=layers, vocab_size=128)
    model, tokens = transformers_model(shape), 5
    cache = model(
        input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"), use_cache=True
    ).past_key_values
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    # transformers' Falcon repeats each KV head for its 16 query heads before it caches them: 16
    # times what the model needs.
    waste = 16 if name == "falcon-40b" else 1
    assert stored == waste * tokens * calc.kv_bytes_per_token(shape)
    assert (
        calc.kv_bytes_per_token(MODELS[name]) * layers
        == calc.kv_bytes_per_token(shape) * MODELS[name].num_hidden_layers
    )


@pytest.mark.parametrize(
    "name, kib",
    [
        ("llama-2-7b", 512),
        ("llama-2-13b", 800),
        ("llama-2-70b", 320),
        ("llama-3-8b", 128),
        ("llama-3-405b", 504),
        ("mixtral-8x7b", 128),
        ("deepseek-v3", 68.625),
        ("gpt-j-6b", 448),
    ],
)
def test_kv_bytes_by_hand(name, kib):
    assert calc.kv_bytes_per_token(MODELS[name], bits_per_value=16) == kib * 1024
    assert calc.kv_bytes_per_token(MODELS[name], bits_per_value=8) == kib * 512


def test_sequences_that_fit():
    # 80 GB, 16 GB of weights, 128 KiB a token, 4096 tokens: 64e9 / 2^29 = 119.2
    assert calc.sequences_that_fit(80e9, 16e9, 2**17, 4096) == 119
    assert calc.sequences_that_fit(16e9 + 2**29, 16e9, 2**17, 4096) == 1  # exactly one
    assert calc.sequences_that_fit(16e9 + 2**29 - 1, 16e9, 2**17, 4096) == 0
    assert calc.sequences_that_fit(10e9, 16e9, 2**17, 4096) == 0  # not even the weights


@pytest.mark.parametrize(
    "total, each, gpus", [(79, 80, 1), (80, 80, 1), (81, 80, 2), (161, 80, 4), (640, 80, 8)]
)
def test_gpus_needed(total, each, gpus):
    assert calc.gpus_needed(total, each) == gpus


# ---------------------------------------------------------------- floors

TOY = ModelShape(
    "toy",
    "0.0B",
    "made up",
    hidden_size=4,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    intermediate_size=8,
    vocab_size=10,
)


def test_floors_of_a_model_small_enough_for_paper():
    # a layer: q 16, k 8, v 8, o 16, MLP 3·4·8 = 96 -> 144; two layers 288; embedding and head 40
    # each
    assert TOY.params == 288 + 80
    # decode, 3 sequences of 5 tokens: weights 288 + 40 once, cache 3·5·(2·2·1·2) values, 2 bytes
    # each
    step = calc.decode_floor(TOY, batch=3, context=5, bandwidth=1e12, peak=1e12)
    assert step.bytes_moved == 2 * (328 + 3 * 5 * 8)
    # FLOPs: 2 per weight and token; attention: 2 layers · 2 heads · (2 + 2) per key, times 2
    assert step.flops == 3 * 2 * 328 + 3 * 5 * 2 * (2 * 2 * (2 + 2))
    assert step.bound == "compute" and step.seconds == step.flops / 1e12
    # prefill of 5: layers for 5 tokens, head for one, 15 (query, key) pairs
    prompt = calc.prefill_floor(TOY, prompt_tokens=5, bandwidth=1e12, peak=1e12)
    assert prompt.flops == 5 * 2 * 288 + 2 * 40 + 15 * 2 * (2 * 2 * (2 + 2))
    assert prompt.bytes_moved == 2 * (328 + 5 * 8)


def test_decode_reads_the_weights_once_per_step():
    one, many = (
        calc.decode_floor(MODELS["llama-3-8b"], batch, 1, 4.8e12, 989e12) for batch in (1, 64)
    )
    assert many.seconds < 1.01 * one.seconds and many.bound == "memory"


def test_a_prefilled_token_is_cheaper_than_a_decoded_one():
    decode = calc.decode_floor(MODELS["llama-3-8b"], 1, 2048, 4.8e12, 989e12)
    prefill = calc.prefill_floor(MODELS["llama-3-8b"], 2048, 4.8e12, 989e12)
    assert prefill.bound == "compute" and prefill.seconds / 2048 < decode.seconds / 100


def test_a_tied_head_is_read_and_an_untied_embedding_is_not():
    tied = dataclasses.replace(TOY, tie_word_embeddings=True)
    assert tied.params == TOY.params - 40 and tied.params_read(1) == TOY.params_read(1) == 328


def test_experts_touched():
    mixtral = MODELS["mixtral-8x7b"]
    assert mixtral.experts_touched(1) == pytest.approx(2)
    torch.seed()
    batch, draws = 5, 4000
    # each token: 2 of 8, evenly
    picks = torch.rand(draws, batch, 8).topk(2, dim=-1).indices.flatten(1)
    seen = torch.zeros(draws, 8).scatter_(1, picks, 1).sum(-1)
    assert mixtral.experts_touched(batch) == pytest.approx(
        seen.mean().item(), abs=6 * seen.std().item() / draws**0.5
    )
    assert mixtral.params_read(10**6) == pytest.approx(mixtral.params - mixtral.embedding_params)


# ---------------------------------------------------------------- money


def test_cost_by_hand():
    # $3.60 an hour is $0.001 a second; at 1000 tokens/s a million tokens take 1000 s
    assert calc.cost_per_million_tokens(3.60, 1000) == pytest.approx(1.0)
    assert calc.cost_per_million_tokens(3.60, 1000, utilisation=0.25) == pytest.approx(4.0)
    # $86.40 a day against $0.50 a million: 172.8 million tokens a day
    assert calc.break_even_tokens_per_day(3.60, 0.50) == pytest.approx(172.8e6)


def test_break_even_is_where_both_cost_the_same():
    dollars_per_hour, api = 2.75, 0.6
    tokens = calc.break_even_tokens_per_day(dollars_per_hour, api)
    assert calc.cost_per_million_tokens(dollars_per_hour, tokens / 86400) == pytest.approx(api)


@pytest.mark.parametrize(
    "call",
    [
        lambda bad: calc.weight_bytes(TOY, bad),
        lambda bad: calc.kv_bytes_per_token(TOY, bad),
        lambda bad: calc.sequences_that_fit(1e9, 1e6, 100, bad),
        lambda bad: calc.decode_floor(TOY, bad, 5, 1e12, 1e12),
        lambda bad: calc.decode_floor(TOY, 5, bad, 1e12, 1e12),
        lambda bad: calc.prefill_floor(TOY, bad, 1e12, 1e12),
        lambda bad: calc.cost_per_million_tokens(bad, 100),
        lambda bad: calc.cost_per_million_tokens(1, bad),
        lambda bad: calc.cost_per_million_tokens(1, 100, bad),
        lambda bad: calc.break_even_tokens_per_day(1, bad),
    ],
)
@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "8"])
def test_a_number_that_cannot_be_is_named(call, bad):
    with pytest.raises((ValueError, TypeError)) as error:
        call(bad)
    assert "\n" not in str(error.value) and "accepted" in str(error.value)


def test_unknown_model_lists_the_known():
    with pytest.raises(ValueError, match=r"'gpt-9'.*known are llama-2-7b, .*falcon-40b"):
        find_model("gpt-9")
    assert find_model("Llama-3-8B").name == "llama-3-8b"


# ---------------------------------------------------------------- the report


def run(capsys, arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python -m lessons.l01_roofline` with these arguments."""
    from lessons.l01_roofline.__main__ import main

    try:
        code = main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_the_report_of_the_readme(capsys):
    code, out, _ = run(capsys, "--model llama-3-70b --gpu h200 --batch 32 --context 4096")
    assert code == 0
    # two H200 move 182 GB (140 of weights, 42.9 of cache less the embedding) at 9.6 TB/s: 18.95 ms,
    # 32 / 0.01895 = 1688
    for text in (
        "2 x H200",
        "141 GB",
        "320 KiB",
        "1.34 GB",
        "254 GB",
        "182 GB",
        "19 ms",
        "1688 tokens/s",
        "$0.99",
        "197%",
    ):
        assert text in out, text
    assert "Predictions, not measurements" in out and "data sheet" in out


def test_every_model_in_one_table(capsys):
    code, out, _ = run(capsys, "--model all --gpu h100")
    assert code == 0 and all(name in out for name in MODELS)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--model gpt-9", "'gpt-9'; known are llama-2-7b"),
        ("--gpu v100", "'v100', known are a100, h100"),
        ("--batch 0", "--batch: '0'"),
        ("--context -5", "--context: '-5'"),
        ("--batch 1.5", "--batch: '1.5'"),
        ("--dollars-per-hour nan", "'nan'"),
        ("--memory-share 2", "memory_share is 2.0; accepted: above 0 and at most 1"),
        (
            "--model llama-3-405b --gpus 2",
            "811.7 GB needed, 253.8 GB usable on 2 x H200; 8 GPUs would do",
        ),
        (
            "--gpu rtx4090 --gpus 1 --context 200000 --batch 1",
            "one sequence of 200000 tokens do not fit",
        ),
        ("--bogus", "--bogus"),
    ],
)
def test_a_wrong_argument_gets_one_line(capsys, arguments, says):
    code, out, err = run(capsys, arguments)
    assert code == 2 and not out and says in err and len(err.strip().splitlines()) == 1


def test_what_fits_of_a_batch_that_does_not(capsys):
    code, out, _ = run(capsys, "--gpu t4 --gpus 2 --batch 64")
    assert code == 0 and "Only 23 of 64 sequences fit" in out and "decode step of 23" in out


# ---------------------------------------------------------------- what the README says


def test_the_numbers_of_the_readme():
    """Each is computed here and must stand in the text, so that neither can change alone."""
    from pathlib import Path

    from lessons.l01_roofline.lab.pictures import floors
    from lessons.toolbox.measure.hardware import CHIPS

    text = " ".join((Path(calc.__file__).parent / "README.md").read_text(encoding="utf-8").split())
    chip, one, many = CHIPS["h200"], floors()["decode, batch 1"], floors()["decode, batch 256"]
    endless = calc.decode_floor(MODELS["llama-3-8b"], 10**9, 2048, 1e12, 1e12).intensity
    read = [MODELS["deepseek-v3"].params_read(batch) / 1e9 for batch in (1, 32)]
    ridge = chip.bf16_flops_per_s / chip.memory_bytes_per_s
    kib = {name: calc.kv_bytes_per_token(shape) / 1024 for name, shape in MODELS.items()}
    llama2 = f"1: {kib['llama-2-7b']:.0f} KiB; {kib['llama-2-13b']:.0f} KiB is Llama-2-13B"
    usable = 0.9 * CHIPS["rtx4090"].memory_bytes
    fit = calc.sequences_that_fit(
        usable, calc.weight_bytes(MODELS["llama-3-8b"]), kib["llama-3-8b"] * 1024, 8192
    )
    for quoted in (
        f"moves {one.bytes_moved / 1e9:.1f} GB and uses {one.compute_s / one.seconds:.1%}".replace(
            "%", " %"
        ),
        f"{ridge:.0f} FLOP/byte on an H200: B = {ridge:.0f} at 16 bits, {ridge / 2:.0f} at 8, "
        f"{ridge / 4:.0f} at 4",
        f"at n = 2048: {endless:.0f}, never {ridge:.0f}",
        f"from {one.seconds * 1e3:.3g} to {many.seconds * 1e3:.3g} ms",
        f"{read[1]:.0f}·10⁹ of DeepSeek-V3's weights, one token {read[0]:.0f}·10⁹",
        f"{llama2}. 4: {kib['mixtral-8x7b']:.0f} KiB",
        f"6: {kib['llama-3-405b']:.0f} KiB",
        f"7: {kib['qwen3-8b']:.0f} KiB",
        f"Llama-2-70B | {kib['llama-2-70b']:.0f} KB",
        f"Llama-3-8B | {kib['llama-3-8b']:.0f} KB",
        f"DeepSeek-V3 | {kib['deepseek-v3']:.0f} KB",
        f"{16 * kib['falcon-40b']:.0f} KiB a token",
        f"needs {kib['falcon-40b']:.0f}",
        f"</summary>{4096 * kib['llama-2-7b'] / 2**20:.1f}: 4096",
        f"</summary>{fit}: (21.6",
        f"</summary>{calc.cost_per_million_tokens(3, 1000):.2f}: 1000 s",
        f"{len(MODELS)} models",
    ):
        assert quoted in text, quoted


def test_the_picture_can_be_read():
    from lessons.l01_roofline.lab.pictures import SVG, draw
    from lessons.toolbox.draw.figure import overlapping_texts, texts_outside

    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert SVG.exists() and "CHECK" not in figure._supxlabel.get_text()
