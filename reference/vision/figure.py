"""The picture of the splice: patches of a picture, the prompt that they stand in, and what the
prefix cache is told of it.

    python -m reference.vision.figure

writes splice.svg beside this file. Ids, places and numbers are what the code gives.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from lessons.toolbox.draw.figure import GREY, PALETTE, ClassFigure, frame, save_svg, style
from lessons.toolbox.model.checkpoint import load_tokenizer
from reference.checkpoints.any_checkpoint import llava_folder
from reference.engine.text import encode
from reference.vision.config import read_vision_config
from reference.vision.pictures import Picture
from reference.vision.prompt import VisionInputs
from reference.vision.sight import PictureNames

HERE = Path(__file__).parent
SPLICE_SVG = HERE / "splice.svg"
ALT = (
    "Left: a picture of 32 x 32 pixels, cut into 16 numbered patches. Right: the 28 tokens of a "
    "prompt in four rows of eight. Tokens 3 to 18 are the rows of the patches, the others are "
    "text. Under each token stands the number by which the prefix cache knows it: a token's id, or "
    "a number below zero."
)
PROMPT = "# <image>\n# What is it?\n"
PER_LINE, BLOCK = 8, 16
TEXT, ROW = "#EEEEEE", PALETTE[4]


@style()
def draw_splice(picture: Picture) -> ClassFigure:
    """One picture in one prompt."""
    folder = llava_folder("models/tiny-vision")
    config, tokenizer = read_vision_config(folder), load_tokenizer(folder)
    ids, placed = VisionInputs(config, 1).place(encode(tokenizer, PROMPT), [picture])
    named = list(ids)
    PictureNames(config.tokens_per_image).put(named, placed)
    fig, (left, right) = frame(
        f"A picture is {config.tokens_per_image} rows of the prompt",
        "above: what the decoder is given at each place · below: what the prefix cache is told",
        (13, 5.2),
        (1, 2.6),
    )
    draw_patches(left, picture.pixels, config.patch_size)
    words = tokenizer.convert_ids_to_tokens(ids)
    shown = [
        word.replace("Ġ", "␣").replace("Ċ", "⏎").replace("<|endoftext|>", "start") for word in words
    ]
    draw_prompt(right, shown, named, placed[0].start, config.tokens_per_image)
    return fig


def draw_patches(ax: plt.Axes, pixels: np.ndarray, patch: int) -> None:
    """pixels: [S, S, 3], with the edges and the numbers of its patches."""
    ax.imshow(pixels, interpolation="nearest")
    count = len(pixels) // patch
    for edge in range(1, count):
        ax.axhline(edge * patch - 0.5, color="white", lw=1)
        ax.axvline(edge * patch - 0.5, color="white", lw=1)
    for at in range(count * count):
        y, x = divmod(at, count)
        box = dict(facecolor="white", edgecolor="none", pad=1.5)
        ax.text(x * patch + 0.3, y * patch + 1.4, str(at), bbox=box, size=9)
    ax.set(xticks=[], yticks=[])
    ax.set_xlabel("what the model sees of it")


def draw_prompt(ax: plt.Axes, words: list[str], named: list[int], start: int, rows: int) -> None:
    """A box for each place. named: what the cache is told."""
    for at, (word, number) in enumerate(zip(words, named)):
        line, column = divmod(at, PER_LINE)
        is_row = start <= at < start + rows
        place = (column, -1.5 * line)
        colour = ROW if is_row else TEXT
        ax.add_patch(plt.Rectangle(place, 0.92, 0.62, facecolor=colour, edgecolor=GREY))
        text = f"patch {at - start}" if is_row else word
        middle = column + 0.46
        ax.text(middle, place[1] + 0.31, text, ha="center", va="center", size=10)
        ax.text(middle, place[1] - 0.22, str(number), ha="center", va="center", size=10, color=GREY)
        if at and at % BLOCK == 0:
            y = place[1] + 0.82
            ax.plot([0, PER_LINE], [y, y], color=GREY, ls="--", lw=1.2)
            ax.text(PER_LINE, y, f" block {at // BLOCK}", va="center", color=GREY)
    lines = -(-len(words) // PER_LINE)
    ax.set_xlim(-0.1, PER_LINE + 1)
    ax.set_ylim(-1.5 * (lines - 1) - 0.6, 0.9)
    ax.set_axis_off()


def drawn_picture() -> Picture:
    """Two light bars on red, so that the patches differ."""
    pixels = np.empty((32, 32, 3), np.uint8)
    pixels[:] = (190, 60, 60)
    pixels[8:24, 6:12] = pixels[8:24, 18:24] = (240, 235, 225)
    return Picture.of(pixels)


if __name__ == "__main__":
    save_svg(draw_splice(drawn_picture()), SPLICE_SVG, alt=ALT)
