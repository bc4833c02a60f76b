"""Proves that the container is the one that llama.cpp's package reads and writes, and that no file,
however damaged, does more than raise one line.
"""

import random
import struct

import numpy as np
import pytest
import torch

from lessons.l18_weight_quantization.gguf.gguf_blocks import FORMATS
from lessons.l18_weight_quantization.gguf.gguf_encode import to_gguf
from lessons.toolbox.model.config_json import CheckpointError
from reference.checkpoints.any_checkpoint import is_gguf
from reference.checkpoints.gguf.gguf_file import read_gguf, write_gguf

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["é", "", "a b"],
    "tokenizer.ggml.scores": [0.5, -1.0],
    "tokenizer.ggml.token_type": [1, -3, 6],
    "some.flags": [True, False],
    "some.negative": -5,
    "some.large": 2**40,
}


def written(path, **metadata):
    """A small file with three tensors, and the tensors."""
    tensors = {
        "token_embd.weight": to_gguf(torch.randn(3, 512), "Q4_K"),
        "blk.0.attn_norm.weight": to_gguf(torch.randn(1, 7), "F32"),
        "blk.0.attn_q.weight": to_gguf(torch.randn(5, 64), "Q8_0"),
    }
    shapes = [[3, 512], [7], [5, 64]]
    write_gguf(path, METADATA | metadata, dict(zip(tensors, zip(tensors.values(), shapes))))
    return tensors


# ---------------------------------------------------------------- what is written and read


def test_what_is_written_is_read(tmp_path, seed):
    tensors = written(tmp_path / "x.gguf")
    file = read_gguf(str(tmp_path / "x.gguf"))
    assert file.metadata == METADATA and file.version == 3
    assert [type(value) for value in file.metadata.values()] == list(map(type, METADATA.values()))
    assert list(file.tensors) == list(tensors)
    assert file.tensors["blk.0.attn_norm.weight"].shape == [7]
    assert "_bytes" not in vars(file)  # no tensor was touched yet
    for name, weight in tensors.items():
        found = file.read(name)
        assert found.format == weight.format and torch.equal(found.blocks, weight.blocks)
        assert file.tensors[name].offset % 32 == 0


def test_the_gguf_package_reads_it(tmp_path, seed):
    gguf = pytest.importorskip("gguf")
    tensors = written(tmp_path / "x.gguf")
    theirs = gguf.GGUFReader(tmp_path / "x.gguf")
    assert {key: theirs.fields[key].contents() for key in METADATA} == METADATA
    kinds = {key: [kind.name for kind in theirs.fields[key].types] for key in METADATA}
    assert kinds["llama.block_count"] == ["UINT32"] and kinds["llama.rope.freq_base"] == ["FLOAT32"]
    assert kinds["tokenizer.ggml.token_type"] == ["ARRAY", "INT32"]
    assert kinds["some.negative"] == ["INT64"] and kinds["some.large"] == ["UINT64"]
    for found in theirs.tensors:
        weight = tensors[found.name]
        assert found.tensor_type.name == weight.format
        raw = np.ascontiguousarray(found.data).view(np.uint8).reshape(weight.blocks.shape)
        assert torch.equal(torch.from_numpy(raw.copy()), weight.blocks)


def test_reads_what_the_gguf_package_writes(tmp_path, seed):
    gguf = pytest.importorskip("gguf")
    numbers = torch.randn(4, 96)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.add_custom_alignment(64)
    writer.add_block_count(24)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["a", "<|end|>"])
    writer.add_token_scores([1.5, 2.5])
    writer.add_add_bos_token(True)
    writer.add_tensor("plain", numbers.numpy())
    kind = gguf.GGMLQuantizationType.Q5_1
    writer.add_tensor("packed", gguf.quantize(numbers.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "x.gguf")
    assert file.metadata["general.architecture"] == "qwen2"
    assert file.metadata["qwen2.block_count"] == 24 and file.metadata["general.alignment"] == 64
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "<|end|>"]
    assert file.metadata["tokenizer.ggml.scores"] == [1.5, 2.5]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert torch.equal(file.read("plain").dequantize(), numbers)
    assert torch.equal(file.read("packed").blocks, to_gguf(numbers, "Q5_1").blocks)


def test_a_file_is_known_by_its_name():
    assert is_gguf("a/b.gguf") and is_gguf("B.GGUF") and not is_gguf("models/tiny")
    assert not is_gguf(None) and not is_gguf("gguf")


@pytest.mark.parametrize("value", [None, [], [1, 2.0], {"a": 1}, 2**64, [True, 1]])
def test_refuses_to_write_other_values(value, tmp_path):
    with pytest.raises(ValueError, match=r"^metadata: got .* for 'key'; accepted: str, bool"):
        write_gguf(tmp_path / "x.gguf", {"key": value}, {})


# ---------------------------------------------------------------- what is refused


def header(tensors=0, entries=0, magic=b"GGUF", version=3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, entries)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def entry(name=b"x", shape=(32,), kind=0, offset=0, num_dimensions=None) -> bytes:
    count = len(shape) if num_dimensions is None else num_dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset) + bytes(256)


HUGE = struct.pack("<Q", 2**62)
DAMAGED = {
    "empty": (b"", "ends within the magic number: 4 bytes wanted, 0 left"),
    "a pickle": (b"\x80\x04K\x01." + bytes(64), "begins with b'.*', not with b'GGUF'"),
    "version 1": (header(version=1) + bytes(64), "version is 1; accepted: 2, 3"),
    "version 4": (header(version=4) + bytes(64), "version is 4; accepted: 2, 3"),
    "big-endian": (header(version=3 << 24) + bytes(64), "big-endian"),
    "many tensors": (header(tensors=2**60), "the number of tensors: 1152921504606846976, more"),
    "many entries": (header(entries=2**63), "the number of metadata entries: .*, more than"),
    "a long key": (header(entries=1) + HUGE + bytes(64), "ends within a metadata key: 4611"),
    "an empty key": (header(entries=1) + bytes(64), "metadata key '' is empty"),
    "a key twice": (
        header(entries=2) + (text(b"k") + struct.pack("<II", 4, 1)) * 2,
        "metadata key 'k' is empty, too long, or there twice",
    ),
    "a key that is no text": (header(entries=1) + text(b"\xff") + bytes(64), "not UTF-8"),
    "an unknown type": (
        header(entries=1) + text(b"k") + struct.pack("<I", 99) + bytes(9),
        "value 'k' has the type 99; accepted: 0 to 12",
    ),
    "an array of arrays": (
        header(entries=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        "value 'k' has the type 9",
    ),
    "a long array": (
        header(entries=1) + text(b"k") + struct.pack("<II", 9, 4) + HUGE,
        "the length of the metadata value 'k': 4611686018427387904, more than the 0 bytes",
    ),
    "a long array of strings": (
        header(entries=1) + text(b"k") + struct.pack("<II", 9, 8) + HUGE + bytes(64),
        "the length of the metadata value 'k': 4611686018427387904, more than the 64 bytes",
    ),
    "an alignment of 3": (
        header(entries=1) + text(b"general.alignment") + struct.pack("<II", 4, 3),
        "general.alignment is 3; accepted: a power of two",
    ),
    "no dimensions": (header(1) + entry(shape=()), "has 0 dimensions; accepted: 1 to 4"),
    "many dimensions": (
        header(1) + entry(num_dimensions=2**31),
        "has 2147483648 dimensions; accepted: 1 to 4",
    ),
    "an unknown format": (
        header(1) + entry(kind=16),
        "tensor 'x' has the format 16; supported: F32, F16, BF16, Q8_0",
    ),
    "a block that is not full": (
        header(1) + entry(shape=(33,), kind=8),
        r"has the shape \[33\]; accepted: positive, the last one a multiple of 32",
    ),
    "no numbers": (header(1) + entry(shape=(32, 0)), r"has the shape \[0, 32\]"),
    "more numbers than bytes": (
        header(1) + entry(shape=(2**40, 2**40)),
        "tensor 'x' lies at offset 0 and has 4835703278458516698824704 bytes",
    ),
    "beyond the end": (header(1) + entry(offset=2**40), "lies at offset 1099511627776"),
    "an odd offset": (header(1) + entry(offset=1), "a multiple of 32"),
    "a tensor twice": (header(2) + entry()[:-256] + entry(), "the tensor 'x' is there twice"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_refuses_in_one_line(damage, tmp_path):
    content, message = DAMAGED[damage]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_gguf(path)
    said = str(raised.value)
    assert said.startswith(f"{path} is not a complete GGUF file: ") and "\n" not in said


def test_refuses_what_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no\.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "no.gguf")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_gguf(tmp_path)


def test_every_truncation_is_noticed(tmp_path, seed):
    """At each byte of the header, and at several of the data: all but the padding after it."""
    path = tmp_path / "x.gguf"
    tensors = written(path)
    content = path.read_bytes()
    last = read_gguf(path).tensors[list(tensors)[-1]]
    needed = last.offset + last.size
    for length in [*range(0, last.offset, 7), last.offset, needed - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is not a complete GGUF file"):
            read_gguf(path)
    path.write_bytes(content[:needed])
    assert len(read_gguf(path).tensors) == 3


def test_damage_raises_one_line_or_nothing(tmp_path, seed, request):
    """Random bytes in the header: whatever they are taken for, only CheckpointError leaves."""
    path = tmp_path / "x.gguf"
    written(path)
    content = path.read_bytes()
    end = min(info.offset for info in read_gguf(path).tensors.values())
    for _ in range(5000 if request.config.getoption("--all") else 300):
        damaged = bytearray(content)
        for _ in range(random.choice([1, 1, 2, 8])):
            damaged[random.randrange(end)] = random.choice([0, 1, 127, 255, random.randrange(256)])
        path.write_bytes(damaged)
        try:
            file = read_gguf(path)
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:
            for name, info in file.tensors.items():
                assert file.read(name).blocks.numel() == info.size
                assert info.format in FORMATS
