"""Logits equal to peft's: random adapters that peft made and saved, with every key that we read."""

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l21_multi_lora.batch import AdapterBatch, AdapterContext
from lessons.l21_multi_lora.lab.testing import linears_of
from lessons.l21_multi_lora.layers import adapter_layers, merged, with_adapter_slots
from lessons.l21_multi_lora.peft.adapters import check_complete, load_adapter
from lessons.l21_multi_lora.slots import AdapterSlots

TOKENS = [5, 17, 3, 88, 41, 2, 60]
TOLERANCE = 2e-5  # of logits of about 1, in float32
ADAPTERS = {
    "plain": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "rslora": dict(r=5, lora_alpha=3, use_rslora=True, target_modules=["o_proj", "down_proj"]),
    "all-linear": dict(r=2, lora_alpha=16, target_modules="all-linear"),
    "regex": dict(r=3, lora_alpha=6, target_modules=r"model\.layers\.1\..*(up|gate)_proj"),
    "patterns": dict(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj", "down_proj"],
        rank_pattern={"q_proj": 7, r"layers\.1\.mlp\.down_proj": 1},
        alpha_pattern={"k_proj": 3.5},
    ),
    "patterns, rslora": dict(
        r=2, lora_alpha=8, use_rslora=True, target_modules=["q_proj"], rank_pattern={"0.*q_proj": 6}
    ),
    "one layer": dict(r=3, lora_alpha=9, target_modules=["v_proj"], layers_to_transform=[1]),
    "exceptions": dict(
        r=3, lora_alpha=9, target_modules=["k_proj", "v_proj"], exclude_modules=r".*0\..*k_proj"
    ),
}


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", reason="NOT RUN: peft is not installed")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of two layers, saved by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(peft, base, tmp_path_factory):
    """{name: (folder, peft's logits)} of random adapters, B too."""
    from transformers import AutoModelForCausalLM

    found = {}
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        random = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        model = peft.get_peft_model(model, random).eval()
        folder = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(folder)
        with torch.no_grad():
            found[name] = folder, model(torch.tensor([TOKENS])).logits[0]
    return found


@pytest.fixture(scope="module")
def plain(base):
    return Decoder.from_pretrained(str(base))


def logits(model, num_sequences: int = 1):
    """[num_sequences, T, V] of the same sequence so often, each by itself in attention."""
    attends = whole_sequence(model, len(TOKENS))

    def attend(layer, q, k, v):
        parts = [x.unflatten(0, (num_sequences, -1)) for x in (q, k, v)]
        return torch.cat(
            [attends(layer, *(part[i] for part in parts)) for i in range(num_sequences)]
        )

    hidden = model(torch.tensor(TOKENS * num_sequences), attend)
    return model.logits(hidden).unflatten(0, (num_sequences, -1))


def test_all_adapters_of_a_batch_give_pefts_logits(adapters, plain):
    """One pass: every adapter and the base, each row its own."""
    context = AdapterContext()
    twin = with_adapter_slots(plain, context, max_loras=len(adapters), max_lora_rank=8)
    slots = AdapterSlots(adapter_layers(twin))
    loaded = {}
    for name, (folder, _) in adapters.items():
        loaded[name] = load_adapter(folder)
        check_complete(folder, loaded[name], linears_of(plain))
    with slots.held([None, *loaded.values()]) as found:
        rows = [slot for slot in found for _ in TOKENS]
        with context.over(AdapterBatch.of(rows)):
            together = logits(twin, len(found))
    assert torch.equal(logits(twin)[0], logits(plain)[0])  # without a batch it is the base
    wanted = [logits(plain)[0], *(theirs for _, theirs in adapters.values())]
    for name, ours, theirs in zip(["base", *adapters], together, wanted):
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max().clamp(min=1), name
    for name, theirs in zip(adapters, wanted[1:]):  # a test that cannot tell them apart is none
        assert (theirs - wanted[0]).abs().max() > 0.01, name


def test_merged_adapters_give_pefts_logits(adapters, plain):
    for name, (folder, theirs) in adapters.items():
        ours = logits(merged(plain, load_adapter(folder)))[0]
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max().clamp(min=1), name


@pytest.mark.parametrize(
    "extra, key",
    [
        (dict(use_dora=True), "use_dora"),
        (dict(bias="lora_only"), "bias"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(init_lora_weights="pissa"), "init_lora_weights"),
        (dict(init_lora_weights="olora"), "init_lora_weights"),
        (dict(lora_bias=True), "lora_bias"),
        (dict(layer_replication=[(0, 2), (0, 2)]), "layer_replication"),
        (dict(trainable_token_indices=[1, 2]), "trainable_token_indices"),
    ],
)
def test_what_peft_saves_and_we_lack_is_refused_by_name(extra, key, peft, base, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **extra)
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=key) as caught:
        load_adapter(tmp_path)
    assert "\n" not in str(caught.value)


def test_peft_reads_what_we_write(peft, base, plain, tmp_path):
    from transformers import AutoModelForCausalLM

    from lessons.l21_multi_lora.lab.testing import random_adapter
    from lessons.l21_multi_lora.peft.adapters import save_adapter

    adapter = random_adapter(linears_of(plain), rank=4)
    pairs = {name: (layer.a, layer.b) for name, layer in adapter.layers.items()}
    save_adapter(tmp_path, pairs, lora_alpha=8)  # 8 / 4, random_adapter's scaling
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    # else peft reads onto a GPU where there is one, and `model` is on the CPU
    model = peft.PeftModel.from_pretrained(model, tmp_path, torch_device="cpu").eval()
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    ours = logits(merged(plain, adapter))[0]
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max()
