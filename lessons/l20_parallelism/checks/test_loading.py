"""Proves that a rank that reads its part of a checkpoint gets what it would get of the whole model,
and that it reads and holds no more than that.
"""

import json
import weakref

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
)

from lessons.l06_mla.deepseek import decoder_class, load_decoder
from lessons.l20_parallelism.lab.testing import links_of
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes.mesh import Mesh
from lessons.l20_parallelism.shards.loading import load_sharded
from lessons.toolbox.model import checkpoint
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.places import places_of

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
LATENTS = dict(
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    moe_intermediate_size=12,
    n_routed_experts=8,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
)
HALF = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)

FILES = {
    "llama": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "phi3, q, k and v in one matrix": Phi3Config(**SMALL, rope_parameters=HALF),
    "mixtral": MixtralConfig(**SMALL, **EXPERTS),
    "deepseek_v3": DeepseekV3Config(**SMALL | LATENTS),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "glm4, gate and up in one matrix, rows of q and k moved": Glm4Config(
        **SMALL, head_dim=8, attention_bias=True
    ),
    "gpt_oss": GptOssConfig(
        **SMALL, **EXPERTS, head_dim=8, rope_parameters=dict(rope_type="default", rope_theta=1e4)
    ),
}
MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(pp=3), Mesh(tp=2, pp=2)]


def write_checkpoint(folder, hf_config, num_files=1) -> int:
    """Random tensors under the names and in the shapes of the family. Returns their bytes."""
    (folder / "config.json").write_text(json.dumps(hf_config.to_dict()))
    config = load_config(folder)
    with torch.device("meta"):
        places = places_of(decoder_class(config)(config))
    shapes = {place.key: place.stored_shape for place in places.values()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    names = {key: key if key.startswith("lm_head") else f"model.{key}" for key in shapes}
    tensors = {names[key]: torch.randn(shape).bfloat16() for key, shape in shapes.items()}
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        weight_map = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(tensors)}
        for file in set(weight_map.values()):
            part = {name: x for name, x in tensors.items() if weight_map[name] == file}
            save_file(part, folder / file)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps(dict(weight_map=weight_map)))
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("num_files", [1, 3])
def test_a_rank_reads_what_it_would_get_of_the_whole(name, num_files, seed, tmp_path):
    write_checkpoint(tmp_path, FILES[name], num_files)
    whole = load_decoder(tmp_path)
    for mesh in MESHES:
        for expert_parallel in {False, whole.config.moe is not None}:
            for rank in range(mesh.size):
                links = links_of(mesh, rank)
                expected = shard(whole, links, expert_parallel).state_dict()
                part = load_sharded(tmp_path, links, expert_parallel=expert_parallel)
                got = part.state_dict()
                assert list(got) == list(expected)
                assert all(torch.equal(got[key], expected[key]) for key in got)
                assert not part.training and part.norm.weight.requires_grad is False


class CountedFile:
    """An open safetensors file that notes what is read, and how much of it lives at once."""

    def __init__(self, file, notes):
        self.file, self.notes = file, notes

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def get_tensor(self, name):
        return self.noted(self.file.get_tensor(name))

    def get_slice(self, name):
        return CountedSlice(self.file.get_slice(name), self)

    def noted(self, tensor):
        self.notes["read"] += tensor.nbytes
        alive = [x for x in self.notes["alive"] if x() is not None]
        self.notes["alive"] = [*alive, weakref.ref(tensor)]
        self.notes["peak"] = max(
            self.notes["peak"], sum(x().nbytes for x in self.notes["alive"] if x() is not None)
        )
        return tensor


class CountedSlice:
    def __init__(self, stored, file):
        self.stored, self.file = stored, file

    def __getitem__(self, index):
        return self.file.noted(self.stored[index])


@pytest.mark.parametrize("name", ["llama", "tied", "phi3, q, k and v in one matrix", "mixtral"])
def test_a_rank_reads_its_part_and_holds_one_tensor_more(name, seed, tmp_path, monkeypatch):
    written = write_checkpoint(tmp_path, FILES[name], num_files=2)
    opened = checkpoint.open_file
    for mesh in MESHES:
        read = 0
        for rank in range(mesh.size):
            notes = dict(read=0, peak=0, alive=[])
            monkeypatch.setattr(
                checkpoint, "open_file", lambda file, notes=notes: CountedFile(opened(file), notes)
            )
            part = load_sharded(tmp_path, links_of(mesh, rank), dtype=torch.bfloat16)
            parameters = list(part.parameters())  # a tied one once
            assert notes["read"] == sum(tensor.nbytes for tensor in parameters)
            # one that is read, and the one before it that the loop has not dropped yet
            largest = max(tensor.nbytes for tensor in parameters)
            assert notes["peak"] <= 2 * largest
            read += notes["read"]
        assert written <= read < 1.6 * written


def test_bytes_do_not_stay_a_view_of_the_file(tmp_path, seed):
    """Such a tensor would change with the file, and keep all of it mapped."""
    write_checkpoint(tmp_path, FILES["llama"])
    part = load_sharded(tmp_path, links_of(Mesh(tp=2), 1), dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in part.state_dict().items()}
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as stored:
        stored.seek(-64, 2)
        stored.write(bytes(64))
    assert all(torch.equal(x, before[name]) for name, x in part.state_dict().items())
    for tensor in part.parameters():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


# ---------------------------------------------------------------- refusals


def refused(said, *args, **options):
    with pytest.raises(ValueError, match=said) as caught:
        load_sharded(*args, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_cannot_be_read_in_parts_is_refused(tmp_path):
    links = links_of(Mesh(tp=2), 0)
    write_checkpoint(tmp_path, FILES["llama"])
    refused(
        "num_attention_heads: got 4; accepted: a multiple of the 3",
        tmp_path,
        links_of(Mesh(tp=3), 0),
    )
    refused("num_stages: got 4; accepted: 1 to 3", tmp_path, links_of(Mesh(pp=4), 0))
    refused("dtype: got 'int8'", tmp_path, links, dtype="int8")
    refused("device: got 'mps'", tmp_path, links, device="mps")
    file = tmp_path / "config.json"
    quantized = json.loads(file.read_text()) | dict(quantization_config=dict(quant_method="gptq"))
    file.write_text(json.dumps(quantized))
    error = refused(
        "quantization_config: got quant_method 'gptq'; accepted over several", tmp_path, links
    )
    assert isinstance(error, CheckpointError)


def test_a_tensor_of_another_rank_that_is_missing_is_named(tmp_path):
    """Every rank checks all names, so that none waits for one that has failed."""
    write_checkpoint(tmp_path, FILES["llama"])
    tensors = checkpoint.catalog(tmp_path)
    with checkpoint.open_file(tmp_path / "model.safetensors") as stored:
        kept = {x.name: stored.get_tensor(x.name) for x in tensors.values()}
    del kept["model.layers.2.mlp.up_proj.weight"]
    save_file(kept, tmp_path / "model.safetensors")
    refused(
        "tensor model.layers.2.mlp.up_proj.weight .* is missing", tmp_path, links_of(Mesh(pp=3), 0)
    )
