"""Slides in their order: a PNG each, one PDF of them all, and a page that a keyboard turns.

The page needs no server and no network. Without JavaScript it shows all slides below each other.
"""

import html
import textwrap
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from lessons.toolbox.draw.figure import foot, style

SLIDE_PIXELS = 1920  # the width of most projectors
SIZE = (12.8, 7.2)  # inches of a slide with words
PAGE = Path(__file__).with_name("deck.html")


@dataclass(frozen=True)
class Slide:
    """One of the deck. part: the lesson's number, or "engine"; says: what a screen reader reads."""

    file: str
    part: str
    says: str


class Deck:
    """A folder that slides are added to. It is a context: at its end the PDF is whole, and the page
    is written. Raises OSError.
    """

    def __init__(self, out: Path):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.slides = out, []
        self.part = "engine"  # to which the next slide belongs

    def __enter__(self) -> "Deck":
        self.pdf = PdfPages(self.out / "slides.pdf", metadata={"Title": "The Inference Ladder"})
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.pdf.close()
        if kind is None:
            (self.out / "index.html").write_text(page(self.slides), encoding="utf-8")

    def add(self, fig: Figure, name: str) -> None:
        """A figure as the next slide. name: of its PNG, without the ending."""
        save_slide(fig, self.out / f"{name}.png")
        with style():
            self.pdf.savefig(fig)
        said = fig.get_suptitle() or " ".join(text.get_text() for text in fig.texts)
        self.slides.append(Slide(f"{name}.png", self.part, " ".join(said.split())))

    def add_words(self, name: str, title: str, lines: list[str]) -> None:
        """A slide of words."""
        self.add(words(title, lines), name)


def save_slide(fig: Figure, path: Path) -> None:
    """Write a figure as a PNG of a projector's width, without the line under it."""
    foot(fig, "")
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        fig.savefig(path, dpi=SLIDE_PIXELS / fig.get_figwidth())


def words(title: str, lines: list[str]) -> Figure:
    """A slide of words that fill it: the more words there are, the smaller they get."""
    with style():
        fig = Figure(figsize=SIZE, layout="none")
        FigureCanvasAgg(fig)
        for points in range(34, 15, -2):
            for text in list(fig.texts):
                text.remove()
            bottom = write_words(fig, title, lines, points)
            if bottom > 0.06:
                break
    return fig


def write_words(fig: Figure, title: str, lines: list[str], points: int) -> float:
    """Put them onto a figure. Returns how high above its bottom they end, from 0 to 1."""
    per_line = int(SIZE[0] * 72 * 0.9 / (points * 0.6))  # a letter is 0.6 of its height wide
    step = points * 1.35 / (72 * SIZE[1])
    head = textwrap.fill(title, int(per_line * 0.92))
    top = 0.93
    fig.text(0.05, top, head, size=points, weight="bold", va="top", linespacing=1.2)
    top -= step * (head.count("\n") + 2)
    for line in lines:
        rest = "    " if line.startswith("•") else ""  # below the first word of a point
        said = textwrap.fill(line, per_line, subsequent_indent=rest)
        fig.text(0.05, top, said, size=points, va="top", linespacing=1.2)
        top -= step * (said.count("\n") + 1.6)
    return top


def page(slides: list[Slide]) -> str:
    """index.html: the slides, and a list of the parts."""
    pictures, parts = [], []
    for at, slide in enumerate(slides):
        if slide.part not in parts:
            parts.append(slide.part)
        says, loading = html.escape(slide.says, quote=True), "lazy" if at else "eager"
        pictures.append(
            f'<img src="{html.escape(slide.file)}" alt="{says}" data-part="{slide.part}" '
            f'loading="{loading}">'
        )
    links = [f'<a href="#{part}">{named(part, slides)}</a>' for part in parts]
    text = PAGE.read_text(encoding="utf-8")
    return text.replace("<!-- slides -->", "\n".join(pictures)).replace(
        "<!-- parts -->", "\n".join(links)
    )


def named(part: str, slides: list[Slide]) -> str:
    """A part in the list: its first slide's words."""
    first = next(slide for slide in slides if slide.part == part)
    return html.escape(first.says.partition(" · ")[0] if part == "engine" else first.says[:110])
