"""Folders of adapters that are refused in one line, merging, layers over quantized matrices,
slots.
"""

import json
import random
from collections import Counter
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest
from lessons.l21_multi_lora import naive
from lessons.l21_multi_lora.batch import AdapterBatch, AdapterContext
from lessons.l21_multi_lora.lab.testing import DEVICE, linears_of, random_adapter, tiny_model
from lessons.l21_multi_lora.layers import adapter_layers, merged, unmerged, with_adapter_slots
from lessons.l21_multi_lora.peft.adapters import WEIGHTS, check_complete, load_adapter, save_adapter
from lessons.l21_multi_lora.slots import AdapterSlots, AdapterStore, LoRARequest


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def folder(model, tmp_path):
    """A good adapter, which each test spoils in one place."""
    adapter = random_adapter(linears_of(model))
    pairs = {name: (layer.a, layer.b) for name, layer in adapter.layers.items()}
    save_adapter(tmp_path, pairs, lora_alpha=8)
    return tmp_path


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def refused(said, function, *args):
    with pytest.raises(ValueError, match=said) as caught:
        function(*args)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- folders

CONFIGS = [
    (dict(peft_type="LOHA"), "peft_type: got 'LOHA'"),
    (dict(task_type="SEQ_CLS"), "task_type"),
    (dict(use_dora=True), "use_dora: got True; accepted: none, because DoRA"),
    (dict(bias="all"), "bias: got 'all'; accepted: 'none'"),
    (dict(fan_in_fan_out=True), "fan_in_fan_out"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save"),
    (dict(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
    (dict(init_lora_weights=1), "init_lora_weights: got 1"),
    (dict(a_key_of_the_future={"x": 1}), "a_key_of_the_future.*may change the result"),
    (dict(r=0), "r: got 0"),
    (dict(r=True), "r: got True"),
    (dict(r=3), r"lora_A \[4, 48\].*accepted: \[3, K\]"),
    (dict(lora_alpha="8"), "lora_alpha: got '8'"),
    (dict(lora_alpha=float("nan")), "lora_alpha: got nan"),
    (dict(use_rslora="yes"), "use_rslora"),
    (dict(target_modules=None), "target_modules: got None"),
    (dict(target_modules="("), "target_modules.*regular expression"),
    (dict(target_modules=["q_proj"]), "down_proj has an adapter, but target_modules"),
    (dict(rank_pattern={"q_proj": 0}), r"rank_pattern\['q_proj'\]: got 0"),
    (dict(alpha_pattern={"q_proj": None}), "alpha_pattern"),
    (dict(rank_pattern=[1]), "rank_pattern: got"),
    (dict(layers_to_transform=["1"]), "layers_to_transform"),
    (dict(layers_to_transform=[0], layers_pattern="h"), "layers_pattern"),
]


@pytest.mark.parametrize("changes, said", CONFIGS)
def test_configs_that_are_refused(changes, said, folder):
    change_config(folder, **changes)
    refused(said, load_adapter, folder)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD = "base_model.model.lm_head.lora_{}.weight"
TENSORS = [
    (drop(A), "q_proj has no lora_A"),
    (put("lm_head.weight", torch.zeros(2, 2)), "lm_head.weight.*accepted: lora_A and lora_B"),
    (put(A.replace("weight", "bias"), torch.zeros(4)), "lora_A.bias"),
    (put(A, torch.full((4, 32), torch.inf)), "NaN or infinity"),
    (put(A, torch.zeros(4, 32, dtype=torch.int32)), "is I32"),
    (put(A, torch.zeros(4)), r"lora_A \[4\]"),
]


@pytest.mark.parametrize("change, said", TENSORS)
def test_tensors_that_are_refused(change, said, folder):
    change_tensors(folder, change)
    refused(said, load_adapter, folder)


def test_files_that_are_refused(folder, tmp_path):
    refused("lora_path: got 'nowhere'", load_adapter, "nowhere")
    refused("lora_path: got 3", load_adapter, 3)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    refused("adapter_model.bin is a pickle", load_adapter, folder)
    (folder / WEIGHTS).write_bytes(b"half a file")
    refused("not a complete safetensors file", load_adapter, folder)
    (folder / "adapter_config.json").write_text("[]")
    refused("must hold a JSON object", load_adapter, folder)
    (folder / "adapter_config.json").unlink()
    refused("no adapter_config.json", load_adapter, folder)


def test_adapters_of_another_model_are_refused(model, folder):
    linears = linears_of(model)
    adapter = load_adapter(folder)
    check_complete(folder, adapter, linears)
    name = "layers.1.mlp.down_proj"
    refused(
        "down_proj is .* as in the base", check_complete, folder, adapter, linears | {name: (9, 9)}
    )
    less = {layer: shape for layer, shape in linears.items() if layer != name}
    refused("changes layers.1.mlp.down_proj", check_complete, folder, adapter, less)
    more = linears | {"layers.2.mlp.down_proj": (32, 48)}
    refused("targets layers.2.mlp.down_proj", check_complete, folder, adapter, more)
    refused("layers of the model", merged, tiny_model(num_hidden_layers=1), adapter)


# ---------------------------------------------------------------- layers


def test_an_adapter_over_quantized_matrices(model):
    """The codes stay; each row's correction is added in full precision."""
    rounded = partial(round_to_nearest, bits=8, group_size=None)
    twin = quantized(model, lambda _, linear: rounded(linear.weight), dequantize_matmul)
    context = AdapterContext()
    slots = AdapterSlots(adapter_layers(with_adapter_slots(twin, context, 2, 4)))
    adapter = random_adapter(linears_of(model))
    slots.acquire(adapter)
    other = slots.acquire(random_adapter(linears_of(model), seed=1))
    x = torch.randn(3, 32, device=DEVICE)
    for name, layer in slots.layers.items():
        assert isinstance(layer.base, QuantizedLinear)
        x = torch.randn(3, layer.in_features, device=DEVICE)
        with context.over(AdapterBatch.of([-1, slots.slot_of[adapter], other], DEVICE)):
            got = layer(x)
        base = layer.base(x)
        delta = adapter.layers[name].delta().to(DEVICE)
        assert torch.equal(got[0], base[0])
        assert torch.allclose(got[1], base[1] + delta @ x[1], atol=1e-5)
        assert not torch.allclose(got[2], base[2] + delta @ x[2], atol=1e-2)


def test_merging_and_going_back(model):
    """In bfloat16 a subtracted adapter leaves the base changed; keeping the base does not."""
    adapter = random_adapter(linears_of(model))
    for dtype, is_exact in ((torch.float64, True), (torch.bfloat16, False)):
        base = tiny_model().to(dtype)
        before = base.state_dict()["layers.0.mlp.up_proj.weight"].clone()
        back = unmerged(merged(base, adapter), adapter).layers[0].mlp.up_proj.weight
        assert torch.equal(base.layers[0].mlp.up_proj.weight, before)
        assert torch.allclose(back, before, atol=1e-12, rtol=0) is is_exact


def test_models_without_room_are_refused(model):
    for loras, rank, said in ((0, 4, "max_loras"), (1, 0, "max_lora_rank")):
        refused(said, with_adapter_slots, model, AdapterContext(), loras, rank)


# ---------------------------------------------------------------- slots


def test_random_histories_of_slots(model, seed, request):
    """Against a model of the rules: who is held stays where it is, who is not goes by least recent
    use, and a slot holds its adapter's numbers in every layer and nobody else's.
    """
    linears = {
        name: linears_of(model)[name] for name in ("layers.0.mlp.up_proj", "layers.1.mlp.up_proj")
    }
    few = dict(list(linears.items())[:1])  # an adapter that leaves a layer alone
    adapters = [random_adapter(few if i % 2 else linears, rank=1 + i, seed=i) for i in range(4)]
    twin = with_adapter_slots(model, AdapterContext(), 2, 4, naive.add_lora)
    slots = AdapterSlots({name: adapter_layers(twin)[name] for name in linears})
    recent, held = [], Counter()
    for _ in range(300 if request.config.getoption("--all") else 60):
        adapter = random.choice(adapters)
        if held[adapter] and random.random() < 0.6:
            slots.release(adapter)
            held[adapter] -= 1
        elif adapter not in recent and len(recent) == 2 and all(held[one] for one in recent):
            refused("at most 2 .max_loras.", slots.acquire, adapter)
        else:
            if adapter not in recent and len(recent) == 2:
                recent.remove(next(one for one in recent if not held[one]))
            slots.acquire(adapter)
            recent = [one for one in recent if one is not adapter] + [adapter]
            held[adapter] += 1
        assert list(slots.slot_of) == recent
        for one, slot in slots.slot_of.items():
            for name, layer in slots.layers.items():
                pair, weights = one.layers.get(name), layer.weights
                rank = 0 if pair is None else pair.rank
                assert weights.ranks[slot] == rank and not weights.a[slot, rank:].any()
                assert pair is None or torch.equal(weights.a[slot, :rank].cpu(), pair.a)
    for adapter in adapters:
        if held[adapter]:
            refused("one that no request uses", slots.drop, adapter)
        else:
            slots.drop(adapter)
            assert adapter not in slots.slot_of
            refused("one that was acquired", slots.release, adapter)


def test_rows_beyond_the_slots_are_refused_and_nothing_stays_held(model):
    twin = with_adapter_slots(model, AdapterContext(), 2, 4, naive.add_lora)
    slots = AdapterSlots(adapter_layers(twin))
    three = [random_adapter(linears_of(model), seed=i) for i in range(3)]
    with pytest.raises(ValueError, match="max_loras"), slots.held(three):
        pass
    with slots.held([three[2], None, three[2]]) as rows:
        assert rows[0] == rows[2] >= 0 > rows[1]
    refused("rank of the adapter: got 5", slots.acquire, random_adapter(linears_of(model), rank=5))
    assert not slots.users


def test_the_host_keeps_what_is_needed_and_the_most_recent(model, folder):
    store = AdapterStore(linears_of(model), max_lora_rank=4, max_cpu_loras=1)
    requests = [LoRARequest(f"n{i}", i, str(folder)) for i in (1, 2, 3)]
    taken = [store.take(request) for request in requests]
    assert set(store.known) == {1, 2, 3}  # all are needed
    assert store.take(requests[0]) is taken[0]
    for adapter in (taken[0], *taken):
        store.give_back(adapter)
    assert len(store.known) == 1 and not store.users
    refused("one that was taken", store.give_back, taken[0])
    (id,) = store.known
    assert store.remove(id) and not store.remove(id)
    assert store.take(requests[0]) is not taken[0]  # read anew
