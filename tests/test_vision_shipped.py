"""The model that sees, as it is shipped: it reads pictures, its text is models/tiny's, its card is
true.
"""

import asyncio
import json
from itertools import islice
from random import Random

import numpy as np
import pytest

from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from models.tokenizer import HERE
from models.train_vision import labels_of
from models.vision_card import FIGURES, HELD_OUT_SEED, card
from models.vision_folder import FOLDER, QUESTIONS, VISION, prompt_of
from models.vision_pictures import COLOURS, draw, name_of, pictures
from reference import LLM, SamplingParams
from reference.engine.async_engine import AsyncLLMEngine
from reference.engine.engine_args import EngineArgs
from reference.vision.checkpoint import EYES, load_llava
from reference.vision.config import read_vision_config
from reference.vision.figure import ALT, SPLICE_SVG, draw_splice, drawn_picture
from tests.engine_cases import assert_clean
from tests.vision_cases import plain_answer

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm():
    return LLM(str(FOLDER), kv_cache_memory_bytes=20_000_000, max_num_batched_tokens=64)


def seen(*images, text: str = prompt_of(QUESTIONS[0])) -> dict:
    return {"prompt": text, "multi_modal_data": {"image": [*images]}}


def test_it_reads_pictures_that_it_never_saw(llm):
    """A share with room for chance below what the card says, of fewer pictures."""
    drawn = list(islice(pictures(HELD_OUT_SEED + 1), 40))
    outputs = llm.generate([seen(picture) for picture, _ in drawn], GREEDY, use_tqdm=False)
    right = [out.outputs[0].text == name for out, (_, name) in zip(outputs, drawn)]
    said = json.loads(FIGURES.read_text("utf-8"))["right"]["the fonts of the training"]["whole"]
    assert np.mean(right) > said - 0.2
    assert {output.outputs[0].finish_reason for output in outputs} <= {"stop", "length"}
    assert_clean(llm.engine)


def test_the_engine_says_what_the_model_says_alone(llm):
    """Two questions about the same picture, and one about two."""
    decoder, eyes = load_llava(FOLDER)
    one, two = (draw(colour, [4, 7], Random(1), 100) for colour in ("red", "blue"))
    texts = [prompt_of(question) for question in QUESTIONS[:2]]
    prompts = [seen(one, text=text) for text in texts]
    prompts.append(seen(one, two, text=f"# <image>\n{prompt_of('And?')}"))
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    read = llm.engine.read_prompt
    for prompt, output in zip(prompts, outputs):
        _, ids, placed = read(prompt)
        # the same prompt with one token for each picture, as plain_answer wants it
        token, rows = VISION.image_token_id, VISION.tokens_per_image
        starts = {one.start for one in placed}
        short = [id for at, id in enumerate(ids) if id != token or at in starts]
        assert len(short) == len(ids) - len(placed) * (rows - 1)
        data = {"image": [one.picture for one in placed]}
        plain = {"prompt_token_ids": short, "multi_modal_data": data}
        want = plain_answer(decoder, eyes, plain, 16, decoder.config.eos_token_ids)
        assert output.outputs[0].token_ids == want


def test_text_is_answered_exactly_as_models_tiny_answers_it(llm):
    """Tokens and log-probabilities, bit for bit."""
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=2)
    prompts = ["def quicksort(", "import os\n", "class Colour:"]
    tiny = LLM("models/tiny", kv_cache_memory_bytes=20_000_000, max_num_batched_tokens=64)
    for ours, theirs in zip(
        llm.generate(prompts, params, use_tqdm=False),
        tiny.generate(prompts, params, use_tqdm=False),
    ):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.outputs == theirs.outputs


def test_the_async_engine_takes_the_same_prompt(llm):
    picture = draw("green", [3], Random(2))
    (want,) = llm.generate(seen(picture), GREEDY, use_tqdm=False)

    async def ask():
        engine = AsyncLLMEngine.from_engine_args(
            EngineArgs(str(FOLDER), kv_cache_memory_bytes=20_000_000)
        )
        try:
            return [out async for out in engine.generate(seen(picture), GREEDY, "a")][-1]
        finally:
            engine.shutdown()

    assert asyncio.run(ask()).outputs[0].token_ids == want.outputs[0].token_ids


def test_the_card_says_what_was_measured():
    assert (HERE / "VISION.md").read_text("utf-8") == card(json.loads(FIGURES.read_text("utf-8")))


def test_the_files_are_small_and_say_what_the_recipe_says():
    assert (FOLDER / EYES).stat().st_size < 6e6
    assert read_vision_config(FOLDER) == VISION


def test_names_are_read_back():
    random = Random()
    for _ in range(50):
        colour, count = random.choice(list(COLOURS)), random.randint(0, 3)
        digits = [random.randrange(10) for _ in range(count)]
        found = labels_of(name_of(colour, digits))
        assert found == [list(COLOURS).index(colour), *digits, *[10] * (3 - count)]


def test_the_figure_shows_the_splice():
    figure = draw_splice(drawn_picture())
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert ALT in SPLICE_SVG.read_text("utf-8")
