"""The lesson's one picture: a head's pairs as clock hands.

python -m lessons.l04_positions.lab.pictures
    writes clocks.svg beside this file (computed, not measured)
"""

from pathlib import Path

from lessons.l04_positions.lab.figures import clock_hands
from lessons.toolbox.draw.figure import ClassFigure, save_svg


def draw() -> ClassFigure:
    """Four pairs, seven positions."""
    return clock_hands()


if __name__ == "__main__":
    save_svg(draw(), Path(__file__).parent / "clocks.svg")
