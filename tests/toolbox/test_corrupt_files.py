"""Files of a checkpoint that were cut, bent, swapped or lost: a model and a tokenizer, or one
line.
"""

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from lessons.l06_mla.deepseek import load_decoder
from lessons.toolbox.model.checkpoint import CheckpointError, load_config, load_tokenizer
from tests.toolbox.corruptions import (
    CONFIGS,
    Limits,
    check_line,
    logits_of,
    save_weights,
    write_config,
)

TRIES, TRIES_OF_ALL = 40, 600
TEXT = "def area(r):\n    return 3.14 * r ** 2  # é"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ["F64", "F32", "BF16", "I64", "BOOL", "F8_E4M3", "F4", "", None, 7, "f32"]
ODD = [
    None,
    True,
    -1,
    0,
    2**31,
    2**64,
    10**400,
    1.5,
    "",
    "x" * 10**6,
    "../x",
    [],
    [[]],
    {},
    [-1, 4],
]

pytestmark = pytest.mark.usefixtures("seed")


# ---------------------------------------------------------------- what is done to a file


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: random.randrange(len(data))])


def bend(file: Path) -> None:
    """One to eight bytes changed, most of them where a header would be."""
    data = bytearray(file.read_bytes())
    for _ in range(random.randint(1, 8)):
        data[random.randrange(random.choice([8, min(2000, len(data)), len(data)]))] ^= (
            1 << random.randrange(8)
        )
    file.write_bytes(data)


def replace_content(file: Path) -> None:
    contents = [b"", b"\0" * 8, b"\xff" * 100, b"[" * 100_000, b"{}", b"null", b"[1]", b"x" * 10**6]
    file.write_bytes(random.choice([*contents, random.randbytes(1000)]))


def lose(file: Path) -> None:
    file.unlink()


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def change_json(file: Path) -> None:
    """One value, anywhere in a JSON file or in the header of a safetensors file."""
    if file.suffix == ".json":
        content = json.loads(file.read_bytes())
        change_value(content)
        file.write_text(json.dumps(content))
        return
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change_value(header)
    text = json.dumps(header).encode()
    stated = random.choice([len(text)] * 5 + [len(text) + 1, 0, 2**63, 2**64 - 1])
    file.write_bytes(stated.to_bytes(8, "little") + text + data[8 + size :])


def change_value(content) -> None:
    keys = list(content) if isinstance(content, dict) else range(len(content))
    if not keys:
        return
    key = random.choice(list(keys))
    value = content[key]
    if isinstance(value, (dict, list)) and value and random.random() < 0.8:
        change_value(value)
    elif random.random() < 0.2:
        del content[key]
    elif isinstance(content, dict) and random.random() < 0.2:
        content[key + "x"] = content.pop(key)
    else:
        content[key] = random.choice(DTYPES if key == "dtype" else ODD)


DAMAGES = [cut, bend, replace_content, lose, make_folder, link_to_itself, *[change_json] * 6]


# ---------------------------------------------------------------- what must come of it


def new_checkpoint(folder: Path) -> None:
    """A small model with the course's tokenizer, its weights whole or in two shards."""
    folder.mkdir()
    model_type = random.choice(list(CONFIGS))
    write_config(folder, CONFIGS[model_type])
    save_weights(load_config(folder), folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    for file in Path("models/tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    if random.random() < 0.5:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / WEIGHTS)
        names = list(tensors)
        parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
        for part, held in parts.items():
            save_file({name: tensors[name] for name in held}, folder / part)
        os.remove(folder / WEIGHTS)
        places = {name: part for part, held in parts.items() for name in held}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def use(folder: Path) -> str:
    """Load and run both. "used", or "refused" in one line."""
    try:
        with Limits():
            model = load_decoder(folder)
            tokenizer = load_tokenizer(folder)
    except CheckpointError as error:
        check_line(str(error))
        return "refused"
    assert logits_of(model).shape[-1] == model.config.vocab_size
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert isinstance(tokenizer.decode(ids), str)
    return "used"


def test_a_damaged_file_is_used_or_refused_in_one_line(tmp_path, request):
    found = Counter()
    new_checkpoint(tmp_path / "whole")
    assert use(tmp_path / "whole") == "used"
    for number in range(TRIES_OF_ALL if request.config.getoption("--all") else TRIES):
        folder = tmp_path / str(number)
        new_checkpoint(folder)
        file, damage = random.choice(sorted(folder.iterdir())), random.choice(DAMAGES)
        print(damage.__name__, file.name)
        damage(file)
        found[use(folder)] += 1
        shutil.rmtree(folder)
    assert found["used"] and found["refused"], "both must happen, or nothing was tried"


def test_a_panic_of_the_tokenizer_is_one_line(tmp_path):
    """A name that no token has ends in a panic of Rust code, which is no Exception."""
    new_checkpoint(tmp_path / "damaged")
    file = tmp_path / "damaged" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"]["single"][0]["SpecialToken"]["id"] = "../x"
    file.write_text(json.dumps(content))
    assert use(tmp_path / "damaged") == "refused"
