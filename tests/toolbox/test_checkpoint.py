"""What the checkpoint loader accepts, what it refuses, and that each refusal is one line that names
the culprit.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json
import socket
import threading
import time

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model import checkpoint
from lessons.toolbox.model.checkpoint import (
    CheckpointError,
    find_folder,
    load_config,
    load_tokenizer,
    load_weights,
)
from lessons.toolbox.model.config import ModelConfig

LLAMA = dict(
    model_type="llama",
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)


def write(folder, **changes):
    """A checkpoint of random weights in `folder`, its config.json changed. Returns the stored
    tensors.
    """
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    model = Decoder(ModelConfig(**LLAMA, head_dim=4))
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": torch.randn_like(tensor)
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def refusal(call, *arguments) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 500
    return message


# ---------------------------------------------------------------- weights


def test_every_tensor_lands_in_its_place(tmp_path):
    tensors = write(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = Decoder.from_pretrained(tmp_path, dtype=dtype)
        loaded = model.state_dict()
        assert len(loaded) == len(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name.removeprefix("model.")], tensor.to(dtype)), name
        assert (
            model.dtype == dtype
            and not model.training
            and not any(p.requires_grad for p in model.parameters())
        )


def test_missing_tensor_is_named(tmp_path):
    tensors = write(tmp_path)
    for name in ("model.layers.1.self_attn.k_proj.weight", "lm_head.weight", "model.norm.weight"):
        save_file(
            {key: value for key, value in tensors.items() if key != name},
            tmp_path / "model.safetensors",
        )
        message = refusal(Decoder.from_pretrained, tmp_path)
        assert (
            f"tensor {name} " in message
            and str(list(tensors[name].shape)) in message
            and "missing" in message
        )


def test_unexpected_tensor_is_named(tmp_path):
    tensors = write(tmp_path)
    for name in (
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "score.weight",
    ):
        save_file(tensors | {name: torch.ones(3)}, tmp_path / "model.safetensors")
        assert f"tensor {name} " in refusal(Decoder.from_pretrained, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_misshapen_tensor_is_named_with_both_shapes(name, tmp_path):
    tensors = write(tmp_path)
    right = list(tensors[name].shape)
    wrong = [*right[:-1], right[-1] + 1]
    save_file(tensors | {name: torch.zeros(wrong)}, tmp_path / "model.safetensors")
    message = refusal(Decoder.from_pretrained, tmp_path)
    assert name in message and str(right) in message and str(wrong) in message
    # same number of elements
    save_file(tensors | {name: tensors[name][None]}, tmp_path / "model.safetensors")
    assert name in refusal(Decoder.from_pretrained, tmp_path)


def test_an_error_leaves_the_model_as_it_was(tmp_path):
    tensors = write(tmp_path)
    model = Decoder.from_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(changed | {"model.norm.weight": torch.zeros(7)}, tmp_path / "model.safetensors")
    refusal(load_weights, model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_do_not_follow_the_file(tmp_path):
    """A view of the mapped file would change, or crash the process, when the file does."""
    tensors = write(tmp_path)
    model = Decoder.from_pretrained(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\0" * (size // 2))
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])
    assert all(
        torch.equal(model.state_dict()[name.removeprefix("model.")], tensor)
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("stored", ["both", "embedding", "head"])
def test_tied_embeddings_are_one_parameter(stored, tmp_path):
    tensors = write(tmp_path, tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    del tensors["lm_head.weight"]
    if stored != "embedding":
        tensors["lm_head.weight"] = embedding.clone()
    if stored == "head":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = Decoder.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight and torch.equal(
        model.lm_head.weight, embedding
    )


def test_tied_embeddings_that_differ(tmp_path):
    write(tmp_path, tie_word_embeddings=True)
    assert "tie_word_embeddings" in refusal(Decoder.from_pretrained, tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    tensors = write(tmp_path)
    save_file(
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
        tmp_path / "model.safetensors",
    )
    assert torch.equal(Decoder.from_pretrained(tmp_path).norm.weight, tensors["model.norm.weight"])


@pytest.mark.parametrize("num_layers", [30, 10_000])
def test_layers_that_the_files_do_not_hold_are_not_built(num_layers, tmp_path, monkeypatch):
    """10,000 layers take 13 seconds and 360 MB to build, even on the meta device."""
    write(tmp_path, num_hidden_layers=num_layers)
    monkeypatch.delattr(Decoder, "new_layer")
    message = refusal(Decoder.from_pretrained, tmp_path)
    assert f"{num_layers} layers (num_hidden_layers)" in message and "21 tensors" in message


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "head_dim"])
def test_the_widest_sizes_end_in_a_refusal(key, tmp_path):
    """Products of such sizes must not overflow before the shapes are compared."""
    write(tmp_path, **dict(head_dim=4) | {key: 2**19, "num_attention_heads": 2**18})
    refusal(Decoder.from_pretrained, tmp_path)


def test_integer_weights_are_refused(tmp_path):
    tensors = write(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    message = refusal(Decoder.from_pretrained, tmp_path)
    assert name in message and "I8" in message and "BF16" in message


def test_dtype_is_checked(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match=r"dtype: got torch.int32; accepted: float64, float32"):
        Decoder.from_pretrained(tmp_path, "cpu", torch.int32)


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, -1, -5000])
def test_truncated_file_is_named(keep_bytes, tmp_path):
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep_bytes])
    assert str(file) in refusal(Decoder.from_pretrained, tmp_path)


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x02}q\x00.", b"\xff" * 64]
)
def test_file_of_another_format_is_named(content, tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert str(tmp_path / "model.safetensors") in refusal(Decoder.from_pretrained, tmp_path)


def test_pickles_are_not_opened(tmp_path):
    write(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    message = refusal(Decoder.from_pretrained, tmp_path)
    assert "pytorch_model.bin" in message and "pickle" in message and "model.safetensors" in message


# ---------------------------------------------------------------- shards


def write_shards(folder):
    """The same checkpoint in two files and an index. Returns the index's content."""
    tensors = write(folder)
    (folder / "model.safetensors").unlink()
    files = {
        name: f"model-0000{1 + place % 2}-of-00002.safetensors"
        for place, name in enumerate(tensors)
    }
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    index = dict(metadata={}, weight_map=files)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors, index


def test_shards_load(tmp_path):
    tensors, _ = write_shards(tmp_path)
    loaded = Decoder.from_pretrained(tmp_path).state_dict()
    assert all(
        torch.equal(loaded[name.removeprefix("model.")], tensor) for name, tensor in tensors.items()
    )


def test_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(Decoder.from_pretrained, tmp_path)


def test_shard_outside_the_folder_is_refused(tmp_path):
    (tmp_path / "inside").mkdir()
    _, index = write_shards(tmp_path / "inside")
    (tmp_path / "inside/model-00001-of-00002.safetensors").rename(tmp_path / "outside.safetensors")
    files = {
        name: file.replace("model-00001-of-00002", "../outside")
        for name, file in index["weight_map"].items()
    }
    (tmp_path / "inside/model.safetensors.index.json").write_text(
        json.dumps(dict(weight_map=files))
    )
    assert "../outside.safetensors" in refusal(Decoder.from_pretrained, tmp_path / "inside")


def test_tensor_in_two_shards_is_named(tmp_path):
    tensors, _ = write_shards(tmp_path)
    second = load_file(tmp_path / "model-00002-of-00002.safetensors")
    save_file(
        second
        | {
            "model.embed_tokens.weight": tensors["model.embed_tokens.weight"],
            "model.norm.weight": tensors["model.norm.weight"],
        },
        tmp_path / "model-00001-of-00002.safetensors",
    )
    assert " is in model-00001-of-00002" in refusal(Decoder.from_pretrained, tmp_path)


MALFORMED = ["{", "{}", '{"weight_map": {}}', '{"weight_map": []}']
MALFORMED += ['{"weight_map": {"a": "b\\u0000c"}}', '{"weight_map": {"a": "%s"}}' % ("x" * 10**6)]


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_index_is_named(content, tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(Decoder.from_pretrained, tmp_path)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    ["no-such-model", "models/tinyy", "/no/such/folder", "./nowhere", "", "a/b/c", "meta llama"],
)
def test_unknown_model_lists_the_embedded(name, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    start = time.perf_counter()
    message = refusal(load_config, name)
    assert repr(name.rstrip("/")) in message and "models/tiny, models/tiny-draft" in message
    assert time.perf_counter() - start < 30


def test_hub_that_does_not_answer_fails_soon(monkeypatch, tmp_path):
    """A server that accepts connections and says nothing, as behind some firewalls: one line, no
    minute of retries.
    """
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(checkpoint, "HUB_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        # so that a loader that waits for ever fails here instead of hanging
        rescue = threading.Timer(40, server.close)
        rescue.daemon = True
        rescue.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.perf_counter()
        assert "'some/model'" in refusal(find_folder, "some/model", ["config.json"])
        assert time.perf_counter() - start < 30


def test_hub_model_from_the_local_cache(tmp_path, monkeypatch):
    """A hub name loads offline from the cache's layout: models--owner--name/snapshots/<commit>,
    commit named in refs/main.
    """
    snapshot = tmp_path / "models--some--model/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model/refs").mkdir()
    (tmp_path / "models--some--model/refs/main").write_text("0123")
    tensors = write(snapshot)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert torch.equal(
        Decoder.from_pretrained("some/model").norm.weight, tensors["model.norm.weight"]
    )


def test_embedded_models_are_found_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (find_folder("models/tiny", []) / "tokenizer.json").is_file()
    assert find_folder("models/tiny", []) == find_folder("models/tiny/", [])


def test_a_file_is_not_a_folder(tmp_path):
    write(tmp_path)
    assert "folder" in refusal(load_config, tmp_path / "config.json")


# ---------------------------------------------------------------- tokenizer


def test_tokenizer_of_the_embedded_model():
    tokenizer = load_tokenizer("models/tiny")
    text = "def area(radius):\n    return 3.14 * radius ** 2  # é\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_tokenizer_missing_or_broken(tmp_path):
    write(tmp_path)
    assert "tokenizer.json" in refusal(load_tokenizer, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    assert str(tmp_path) in refusal(load_tokenizer, tmp_path)
