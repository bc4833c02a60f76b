"""The lesson's one picture: a head's pairs as clock hands.

python -m lessons.l04_positions.lab.pictures
    writes clocks.svg beside this file (computed, not measured)
"""

from pathlib import Path

from lessons.l04_positions.lab.figures import clock_hands
from lessons.toolbox.draw.figure import ClassFigure, save_svg

SVG = Path(__file__).parent / "clocks.svg"
ALT = (
    "Dials, one row per pair of coordinates, one column per position: the hand of the fastest pair "
    "has turned by one radian "
    "at position 1, that of the slowest by one radian only at position 1000."
)


def draw() -> ClassFigure:
    """Four pairs, seven positions."""
    return clock_hands()


if __name__ == "__main__":
    save_svg(draw(), SVG, alt=ALT)
