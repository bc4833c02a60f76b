"""models/tiny-vision is a LLaVA like any other: transformers reads it, and computes what we
compute.
"""

import json
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model.config_json import CheckpointError
from models.vision_folder import FOLDER, VISION
from models.vision_pictures import draw
from reference.vision.checkpoint import EYES, load_llava, main, write_whole
from reference.vision.config import read_vision_config
from reference.vision.pictures import normalized, read_picture
from tests.vision_cases import plain_logits, whole_ids

pytestmark = pytest.mark.usefixtures("seed")
TEXT = "# <image>\n# What is it?\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder with all weights in it."""
    return write_whole(FOLDER, tmp_path_factory.mktemp("vision") / "whole")


@pytest.fixture(scope="module")
def peer(whole):
    """transformers' model and processor. No weight may be missing or left over."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    model, report = LlavaForConditionalGeneration.from_pretrained(
        whole, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval(), AutoProcessor.from_pretrained(whole)


def picture_of(edges: tuple[int, int]) -> Image.Image:
    """Noise and something drawn, of any shape."""
    width, height = edges
    noise = Image.fromarray(np.random.default_rng().integers(0, 256, (height, width, 3), np.uint8))
    return Image.blend(noise, draw("red", [4, 7], Random(), 64).resize(edges), 0.7)


@torch.inference_mode()
def test_transformers_computes_our_logits(peer):
    """Two pictures in one prompt, through its processor and through ours, and every token's
    logits.
    """
    theirs, processor = peer
    decoder, eyes = load_llava(FOLDER, "cpu", "float32")
    pictures = [picture_of((64, 64)), picture_of((90, 70))]
    text = f"{TEXT}a\n# <image>\n# And this?\n"
    inputs = processor(images=pictures, text=text, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    ours = [read_picture(picture, VISION) for picture in pictures]
    pixels = torch.stack([normalized(one.pixels, VISION) for one in ours])
    torch.testing.assert_close(inputs["pixel_values"], pixels, atol=1e-6, rtol=1e-6)
    tokenizer = processor.tokenizer
    prompt = {"prompt_token_ids": tokenizer(text)["input_ids"], "multi_modal_data": {"image": ours}}
    assert whole_ids(eyes, prompt)[0] == ids
    want = theirs(**inputs).logits[0]
    got = plain_logits(decoder, eyes, ids, ours)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    # In float64 the towers agree to the last digits.
    towers = theirs.model.vision_tower, theirs.model.multi_modal_projector
    for tower in towers:
        tower.double()
    rows = theirs.model.get_image_features(pixels.double(), return_dict=True).pooler_output
    got = eyes.double()(pixels.double())
    torch.testing.assert_close(got, torch.stack(list(rows)), atol=1e-9, rtol=1e-9)
    for tower in towers:
        tower.float()


@pytest.mark.sample(1, of="shapes of pictures")
@pytest.mark.parametrize("edges", [(32, 32), (33, 200), (500, 31), (640, 480)])
def test_pictures_of_any_shape_become_the_same_pixels(edges, peer):
    _, processor = peer
    picture = picture_of(edges)
    want = processor.image_processor(picture, return_tensors="pt")["pixel_values"][0]
    got = normalized(read_picture(picture, VISION).pixels, VISION)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_both_kinds_of_folders_hold_the_same_model(whole):
    """Also as transformers saves it today, under other names."""
    ours = load_llava(FOLDER, "cpu", "float32")
    named = load_file(whole / "model.safetensors")
    renamed = whole.parent / "renamed"
    renamed.mkdir()
    for file in whole.glob("*.json"):
        (renamed / file.name).write_bytes(file.read_bytes())
    new = {}
    for name, tensor in named.items():
        name = name.replace("language_model.model.", "language_model.").replace("vision_model.", "")
        new[f"model.{name}"] = tensor
    save_file(new, renamed / "model.safetensors", {"format": "pt"})
    for folder in (whole, renamed):
        for mine, theirs in zip(ours, load_llava(folder, "cpu", "float32")):
            want = mine.state_dict()
            got = theirs.state_dict()
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_the_decoder_is_models_tiny_and_every_text_keeps_its_tokens():
    """No weight of it was changed, and the image token is the byte that no text has."""
    from lessons.toolbox.model.checkpoint import load_tokenizer

    decoder, _ = load_llava(FOLDER, "cpu", "float32")
    tiny = Decoder.from_pretrained("models/tiny").state_dict()
    assert all(torch.equal(weight, tiny[name]) for name, weight in decoder.state_dict().items())
    before, after = load_tokenizer("models/tiny"), load_tokenizer(FOLDER)
    text = "".join(map(chr, [*range(1, 0xD7FF, 37), *range(0x10000, 0x10FFFF, 9973)])) + "ÿ\xff"
    ids = before(text)["input_ids"]
    assert after(text)["input_ids"] == ids and VISION.image_token_id not in ids
    assert after("a<image>b")["input_ids"][2] == VISION.image_token_id
    assert ids[0] == 0 and after.decode(ids[1:]) == before.decode(ids[1:]) == text


BROKEN = {
    "vision_feature_layer": [-1, -2],
    "vision_config": {"model_type": "siglip_vision_model"},
    "projector_hidden_act": "relu",
    "image_token_index": 4096,
    "text_config": {"hidden_size": 384},
}


@pytest.mark.sample(2, of="configs of towers")
@pytest.mark.parametrize("key", BROKEN)
def test_a_config_that_the_tower_has_not_is_refused(key, tmp_path):
    for file in FOLDER.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: BROKEN[key]}))
    with pytest.raises(CheckpointError, match="accepted: "):
        read_vision_config(tmp_path)


@pytest.mark.parametrize("what", ["missing", "another shape", "of no use"])
def test_a_tensor_that_does_not_fit_is_named(what, tmp_path):
    for file in FOLDER.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    named = load_file(FOLDER / EYES)
    name = "multi_modal_projector.linear_2.weight"
    if what == "missing":
        del named[name]
    elif what == "another shape":
        named[name] = named[name][:1].clone()
    else:
        named["vision_tower.vision_model.encoder.layers.9.mlp.fc1.bias"] = torch.zeros(2)
    save_file(named, tmp_path / EYES)
    with pytest.raises(CheckpointError, match=r"tensor \S+ in .*: got shape .*; accepted: "):
        load_llava(tmp_path)


def test_writing_a_whole_folder_is_a_command(tmp_path, capsys):
    main([str(FOLDER), str(tmp_path / "new")])
    assert (tmp_path / "new" / "model.safetensors").is_file()
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(tmp_path / "newer")])
    assert "accepted: a folder that names its decoder" in capsys.readouterr().err
