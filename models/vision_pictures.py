"""Pictures with a name, drawn by code: a colour, and up to three digits on it.

picture, name = next(pictures(seed=1))     # PIL.Image, "red(4, 7)"
draw("blue", [1, 9], Random(0))            # one that you ask for
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import matplotlib
import numpy as np
from PIL import Image, ImageFont

COLOURS = {
    "red": (205, 40, 40),
    "green": (40, 155, 60),
    "blue": (40, 80, 210),
    "yellow": (235, 215, 50),
    "black": (25, 25, 25),
    "white": (235, 235, 235),
    "orange": (240, 140, 30),
    "purple": (125, 45, 160),
}
MOST_DIGITS = 3
EDGE = 64  # pixels
HEIGHTS = (24, 26, 28)  # of the type, for a picture of EDGE
CELL = 20  # pixels of each digit, from the left edge on
SHIFT = (2, 2)  # pixels by which all of them may stand beside the middle of their cells: x, y
JITTER = 18  # of each channel of a colour
# matplotlib's own, so they are here wherever the course is. The last is for held-out pictures only.
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif")
UNSEEN_FONT = "DejaVuSerif-Bold"


@cache
def glyph(font: str, height: int, digit: int) -> np.ndarray:
    """How much of each pixel the digit covers: [H, W], 0 to 1, without its margins."""
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    mask = ImageFont.truetype(str(file), height).getmask(str(digit), mode="L")
    covered = np.array(mask, dtype=np.float32).reshape(mask.size[::-1]) / 255
    rows, columns = np.flatnonzero(covered.any(1)), np.flatnonzero(covered.any(0))
    return covered[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def draw(
    colour: str, digits: list[int], random: Random, edge: int = EDGE, font: str | None = None
) -> Image.Image:
    """A square picture of `edge` pixels: the digits from left to right, each in a cell of its own.

    random: for shade, place, size and font. font: None for one of FONTS.
    """
    base = np.array(
        [c + random.randint(-JITTER, JITTER) for c in COLOURS[colour]], dtype=np.float32
    )
    canvas = np.broadcast_to(base, (edge, edge, 3)).copy()
    ink = 25 if base @ (0.299, 0.587, 0.114) > 120 else 235  # what is seen best
    font, height = font or random.choice(FONTS), random.choice(HEIGHTS) * edge // EDGE
    scale = edge / EDGE
    left, middle = (random.randint(-most, most) for most in SHIFT)
    for at, digit in enumerate(digits):
        covered = glyph(font, height, digit)[..., None]
        rows, columns, _ = covered.shape
        x = max(0, round((2 + left + CELL * (at + 0.5)) * scale - columns / 2))
        y = round((EDGE / 2 + middle) * scale - rows / 2)
        part = canvas[y : y + rows, x : x + columns]
        covered = covered[:, : part.shape[1]]  # a wide one may stand out on the right
        part[:] = part * (1 - covered) + ink * covered
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))


def name_of(colour: str, digits: list[int]) -> str:
    """What the model is to say: "red(4, 7)", or "red()" for no digits. It looks like a call,
    because the decoder knows Python best.
    """
    return f"{colour}({', '.join(map(str, digits))})"


def pictures(seed: int, font: str | None = None) -> Iterator[tuple[Image.Image, str]]:
    """Pictures and their names, without an end. font: None for the fonts of the training."""
    random = Random(seed)
    while True:
        colour = random.choice(list(COLOURS))
        digits = [random.randrange(10) for _ in range(random.randint(0, MOST_DIGITS))]
        yield draw(colour, digits, random, font=font), name_of(colour, digits)
