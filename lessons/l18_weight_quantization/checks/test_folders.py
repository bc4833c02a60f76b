"""A folder of someone else: every line of lab/behaviour.py is true of it, or it is refused in one
line.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from lessons.l18_weight_quantization.lab import behaviour, behaviour_tasks, folders
from lessons.l18_weight_quantization.lab.behaviour_tasks import items
from lessons.toolbox.model.checkpoint import REPOSITORY
from lessons.toolbox.model.corpus import corpus
from lessons.toolbox.proof.planted import with_bug

TINY = REPOSITORY / "models/tiny"
ROWS = 600  # of another vocabulary
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def new_tokenizer(rows: int = ROWS, keeps_text: bool = True) -> Tokenizer:
    """Another vocabulary. With <s> in front of a text and </s> behind it, or one of words in lower
    case.
    """
    made = Tokenizer(models.BPE(unk_token=None if keeps_text else "<unk>"))
    how = dict(vocab_size=rows, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False)
    if keeps_text:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        how |= dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    else:
        made.normalizer = normalizers.Lowercase()
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.train_from_iterator(corpus()[0][:20], trainers.BpeTrainer(**how))
    return made


def as_transformers(made: Tokenizer) -> PreTrainedTokenizerFast:
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The embedded model under another name, in 16 bits, with one layer."""
    out = tmp_path / "acme"
    out.mkdir()
    for file in TINY.glob("tokenizer*.json"):
        shutil.copyfile(file, out / file.name)
    raw = json.loads((TINY / "config.json").read_text()) | dict(num_hidden_layers=1)
    (out / "config.json").write_text(json.dumps(raw))
    kept = load_file(TINY / "model.safetensors")
    kept = {name: x for name, x in kept.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def with_rows(folder: Path, name: str, rows: int) -> Path:
    """A copy whose embedding has so many rows: the first ones, or zeros more."""
    out = folder.parent / name
    shutil.copytree(folder, out)
    raw, tensors = json.loads((out / "config.json").read_text()), {}
    for key, x in load_file(out / "model.safetensors").items():
        if x.shape[0] == raw["vocab_size"]:
            more = x.new_zeros(max(0, rows - len(x)), x.shape[1])
            x = torch.cat([x[:rows], more])
        tensors[key] = x
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(raw | dict(vocab_size=rows)))
    return out


@pytest.fixture
def said(monkeypatch, capsys):
    """said(arguments) -> the command's lines, and what it says beside them. Nothing is written."""
    few = dict(LONG=4, PROMPTS=1, WINDOWS=1, NEW_TOKENS=2, CALIBRATION=1, write_json=None)
    for name, value in few.items():
        monkeypatch.setattr(behaviour, name, value)
    monkeypatch.setattr(behaviour, "items", partial(behaviour_tasks.items, 1))

    def run(*arguments) -> tuple[list[str], list[str]]:
        behaviour.main(["--model", *map(str, arguments), "int8-row"])
        out, error = capsys.readouterr()
        lines = [line for line in error.splitlines() if "[transformers]" not in line]
        return out.splitlines(), lines

    return run


# ---------------------------------------------------------------- prompts


def check_prompts(module) -> None:
    found = items(1)
    keeps, loses = (as_transformers(new_tokenizer(keeps_text=each)) for each in (True, False))
    tokens = module.prompt_tokens(keeps, "def f(x):")
    assert tokens[0] == 0 and 1 not in tokens, "a text that goes on has a beginning and no end"
    assert keeps.decode(tokens, skip_special_tokens=True) == "def f(x):"
    assert module.can_be_asked(keeps, found) == found
    assert module.can_be_asked(loses, found) == []


BUGS = {
    "the end stays": ("return tokens[: first + len(bare)]", "return tokens"),
    "the beginning goes": ("tokens[: first + len(bare)]", "tokens[first : first + len(bare)]"),
    "all are asked": ("if comes_back(item.prompt)", "if item.prompt"),
    "none is asked": ('text.lstrip(" ") == prompt.lstrip(" ")', "text == prompt[1:]"),
}


def test_prompts():
    check_prompts(folders)


@pytest.mark.parametrize("name", BUGS)
def test_wrong_prompts_are_seen(name, tmp_path):
    with pytest.raises(AssertionError):
        check_prompts(with_bug(folders, tmp_path, *BUGS[name]))


# ---------------------------------------------------------------- folders


def test_a_folder_without_a_chat_template(folder, said):
    """Bits are those of its file."""
    (reference, _), notes = said(folder)
    assert "16.00 bits" in reference and "brackets" in reference and not notes
    tensors = load_file(folder / "model.safetensors")
    wide = {name: x.float() for name, x in tensors.items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    (reference, _), _ = said(folder)
    assert "32.00 bits" in reference


def test_a_folder_with_a_chat_template(folder, said):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines, notes = said(folder)
    assert len(lines) == 2
    assert notes == ["prompts are plain text: the chat template is not used"]


@pytest.mark.parametrize("keeps_text", [True, False])
def test_a_folder_with_another_vocabulary(folder, said, keeps_text):
    other = with_rows(folder, "other", ROWS)
    as_transformers(new_tokenizer(keeps_text=keeps_text)).save_pretrained(other)
    (reference, row), notes = said(other)
    assert ("brackets" in reference) == ("brackets" in row) == keeps_text
    left = "5 of 5 items are left out: the tokenizer does not give their prompts back"
    assert notes == ([] if keeps_text else [left])


def test_a_draft_with_more_rows_of_the_same_vocabulary(folder, said):
    (reference, _), _ = said(folder, "--draft", with_rows(folder, "padded", 4096 + 32))
    assert "accepts 9" in reference or "accepts 100.0%" in reference, "it is nearly the same model"


def test_what_cannot_be_true_is_refused(folder, said):
    """More tokens than the embedding has rows, and a draft that cuts a text otherwise."""
    other = with_rows(folder, "other", ROWS)
    as_transformers(new_tokenizer()).save_pretrained(other)
    lines, (error,) = said(folder, "--draft", other)
    assert not lines and error.startswith("behaviour: --draft: got ") and "same tokens" in error
    shutil.copyfile(TINY / "tokenizer.json", other / "tokenizer.json")
    shutil.copyfile(TINY / "tokenizer_config.json", other / "tokenizer_config.json")
    lines, (error,) = said(other)
    assert not lines and error.startswith("behaviour: tokenizer: got 'token ")
    assert f"below {ROWS}, the rows of the embedding" in error
