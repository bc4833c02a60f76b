"""Frames of a recorded run as one animated SVG, which a browser plays without any script.

Everything that changes has an <animate> with its values, and only those that differ from the one
before. A viewer that plays nothing shows the frame STILL, and `still` has this frame alone, for
people who asked their system for less motion.
"""

import re
from html import escape
from typing import NamedTuple

from reference.trace.film.run import Frame, frames

WIDTH, HEIGHT = 960, 540
SECONDS = 30
REST = 0.05  # the share of the film that shows the end
STILL = 0.3  # which of the frames is seen where nothing moves
NOTE_STEPS = 6  # a note stays for so many steps, unless another one comes
COLUMNS = 9  # blocks beside each other
# Okabe and Ito's colours, and one grey: eight requests
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A900", "#8A8A8A")


class Look(NamedTuple):
    """Colours of a theme."""

    ground: str
    ink: str
    pale: str  # words beside
    empty: str  # places that hold nothing
    cached: str  # a free block that the prefix cache remembers


LOOKS = {
    "film.svg": Look("#ffffff", "#1a1a1a", "#555555", "#e9e9e9", "#c9c9c9"),
    "film_dark.svg": Look("#0d1117", "#e6edf3", "#9aa4ae", "#21262d", "#4a525b"),
}
PHASES = {"waits": "waits", "prompt": "prompt", "answer": "answers", "done": "done"}
ALT = (
    "A run of the engine in 30 seconds: eight requests arrive, four run in one batch at a time, "
    "and blocks of the cache are filled, shared and given back."
)


class Film:
    """What is drawn, and when each frame begins."""

    def __init__(self, found: dict, look: Look):
        self.found, self.look = found, look
        self.frames = frames(found)
        count = len(self.frames)
        self.starts = [(1 - REST) * at / (count - 1) for at in range(count)]
        self.still = int(STILL * count)
        self.parts: list[str] = []

    def rect(self, more: str = "", **attributes) -> None:
        """A box. attributes: a value, or a list of one a frame."""
        moved = {name: of for name, of in attributes.items() if isinstance(of, list)}
        values = attributes | {name: of[self.still] for name, of in moved.items()}
        said = " ".join(f'{name}="{short(value)}"' for name, value in values.items())
        inside = "".join(self.animate(name, of) for name, of in moved.items())
        end = f">{inside}</rect>" if inside else "/>"
        self.parts.append(f"<rect {said}{more}{end}")

    def text(self, x, y, words, size=15, fill="", more="", shown=None) -> None:
        """Words. shown: in which frames, one truth each; None: always."""
        fill = fill or self.look.ink
        inside = ""
        if shown is not None:
            values = ["visible" if one else "hidden" for one in shown]
            inside, more = (
                self.animate("visibility", values),
                f'{more} visibility="{values[self.still]}"',
            )
        self.parts.append(
            f'<text x="{short(x)}" y="{short(y)}" font-size="{size}" fill="{fill}"{more}>'
            f"{escape(words)}{inside}</text>"
        )

    def animate(self, name: str, values: list) -> str:
        """The change of an attribute over the frames; "" if there is none."""
        at = [n for n, value in enumerate(values) if n == 0 or value != values[n - 1]]
        if len(at) == 1:
            return ""
        times = ";".join(short(round(self.starts[n], 4)) for n in at)
        said = ";".join(short(values[n]) for n in at)
        return (
            f'<animate attributeName="{name}" dur="{SECONDS}s" repeatCount="indefinite" '
            f'calcMode="discrete" keyTimes="{times}" values="{said}"/>'
        )


def film(found: dict, look: Look) -> str:
    """The whole SVG."""
    drawn = Film(found, look)
    draw_requests(drawn, x=20, y=60)
    draw_batch(drawn, x=20, y=400)
    draw_blocks(drawn, x=590, y=84)
    draw_words(drawn)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'font-family="DejaVu Sans, Verdana, sans-serif"><title>{escape(ALT)}</title>'
    )
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{look.ground}"/>'
    return "\n".join([head, ground, *drawn.parts, "</svg>\n"])


def still(moving: str) -> str:
    """The frame of a film that is seen where nothing moves."""
    frame = re.sub(r"<animate [^>]*/>", "", moving)
    return re.sub(r'<text [^>]*visibility="hidden".*?</text>\n', "", frame)


def pictures(found: dict) -> dict[str, str]:
    """{file: SVG}: the films, and a still of each."""
    films = {name: film(found, look) for name, look in LOOKS.items()}
    return films | {still_of(name): still(moving) for name, moving in films.items()}


def still_of(name: str) -> str:
    """The file of a film's still."""
    return name.replace(".svg", "_still.svg")


def short(value) -> str:
    """A number without idle digits; anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- the parts of the picture


def draw_requests(drawn: Film, x: float, y: float) -> None:
    """A row for each request: its prompt, how far it is, and what it does."""
    look, room = drawn.look, 250
    requests = {int(row): one for row, one in drawn.found["requests"].items()}
    longest = max(one["prompt_tokens"] + one["max_tokens"] for one in requests.values())
    drawn.text(x, y, "Requests: prompt | answer, in tokens", 15, look.pale)
    for row, one in requests.items():
        top, left = y + 16 + row * 38, x + 215
        wide = room * (one["prompt_tokens"] + one["max_tokens"]) / longest
        here = [frame.phase[row] for frame in drawn.frames]
        shown = [bool(phase) for phase in here]
        drawn.text(x, top + 19, f"{row}", 15, COLOURS[row], ' font-weight="bold"', shown)
        drawn.text(x + 20, top + 19, clipped(one["prompt"]), 13, look.ink, MONO, shown)
        opacity = [1 if yes else 0.25 for yes in shown]
        drawn.rect(x=left, y=top + 4, width=wide, height=20, fill=look.empty, opacity=opacity)
        done = [room * frame.computed.get(row, 0) / longest for frame in drawn.frames]
        drawn.rect(x=left, y=top + 4, width=done, height=20, fill=COLOURS[row])
        border = left + room * one["prompt_tokens"] / longest
        drawn.rect(x=border - 1, y=top + 1, width=2, height=26, fill=look.ink, opacity=opacity)
        for phase, word in PHASES.items():
            drawn.text(
                left + room + 8, top + 19, word, 13, look.pale, "", [p == phase for p in here]
            )


MONO = ' font-family="DejaVu Sans Mono, monospace"'


def draw_batch(drawn: Film, x: float, y: float) -> None:
    """The tokens of the step, each in its request's colour."""
    most = drawn.found["about"]["max_num_batched_tokens"]
    drawn.text(x, y, f"One pass of the model: {most} tokens at most", 15, drawn.look.pale)
    for place in range(most):
        fills = [
            COLOURS[frame.batch[place]] if place < len(frame.batch) else drawn.look.empty
            for frame in drawn.frames
        ]
        drawn.rect(x=x + place * 22, y=y + 12, width=19, height=26, fill=fills)


def draw_blocks(drawn: Film, x: float, y: float) -> None:
    """The cache: its blocks, how full each is and whose."""
    look, about = drawn.look, drawn.found["about"]
    size, side, gap = about["block_size"], 34, 6
    drawn.text(x, y - 24, f"The KV cache: {about['num_blocks']} blocks", 15, look.pale)
    for block in range(about["num_blocks"]):
        left = x + block % COLUMNS * (side + gap)
        top = y + block // COLUMNS * (side + gap + 14)
        drawn.rect(x=left, y=top, width=side, height=side, fill=look.empty)
        fills, heights = zip(*(of_block(frame, block, size, side, look) for frame in drawn.frames))
        tops = [top + side - height for height in heights]
        drawn.rect(x=left, y=tops, width=side, height=list(heights), fill=list(fills))
        shared = [int(len(frame.owners[block]) > 1) for frame in drawn.frames]
        more = f' stroke="{look.ink}" stroke-width="3"'
        drawn.rect(more, x=left, y=top, width=side, height=side, fill="none", opacity=shared)
        for other in range(1, max(len(frame.owners[block]) for frame in drawn.frames)):
            owner = [f.owners[block][other : other + 1] for f in drawn.frames]
            fills = [COLOURS[row[0]] if row else look.empty for row in owner]
            widths = [12 * len(row) for row in owner]
            drawn.rect(x=left + side - 12 * other, y=top, width=widths, height=side, fill=fills)
    below = y + (about["num_blocks"] + COLUMNS - 1) // COLUMNS * (side + gap + 14) + 6
    for line, words in enumerate(
        (
            f"a block holds K and V of {size} tokens, and fills from below",
            "framed: several requests share it",
            "grey: free, but the prefix cache remembers it",
        )
    ):
        drawn.text(x, below + line * 20, words, 13, look.pale)


def of_block(frame: Frame, block: int, size: int, side: int, look: Look) -> tuple[str, float]:
    """(colour, height) of what is in a block."""
    owners = frame.owners[block]
    if owners:
        return COLOURS[owners[0]], side * frame.rows[block] / size
    return (look.cached, float(side)) if block in frame.known else (look.empty, 0.0)


def draw_words(drawn: Film) -> None:
    """The title, the number of the step, and what is worth saying of it."""
    look, count = drawn.look, len(drawn.frames)
    drawn.text(20, 30, "What an inference engine does, step by step", 20, look.ink, BOLD)
    for at, frame in enumerate(drawn.frames):
        running, done = len(set(frame.batch)), list(frame.phase.values()).count("done")
        used = sum(1 for owners in frame.owners if owners)
        words = f"step {at}: {running} requests run, {done} are done, {used} blocks are used"
        drawn.text(20, 475, words, 15, look.ink, "", [at == other for other in range(count)])
    for at, words in notes_of(drawn.frames).items():
        end = min([other for other in notes_of(drawn.frames) if other > at] + [at + NOTE_STEPS])
        shown = [at <= other < end for other in range(count)]
        drawn.text(20, 505, words, 16, look.ink, BOLD, shown)


BOLD = ' font-weight="bold"'


def notes_of(found: list[Frame]) -> dict[int, str]:
    """{frame: what is said from it on}."""
    return {at: frame.notes[0] for at, frame in enumerate(found) if frame.notes}


def clipped(words: str) -> str:
    """What fits beside a row."""
    return words if len(words) <= 24 else words[:23] + "…"
