"""One step of a warp as a figure: the line of the source, the instruction and its neighbours, the
registers of 32 lanes, and the memory that a load or store asks for: sector by sector, or, in shared
memory, pass by pass.

    steps_figure([(recording, 16)], title="...")       recording: of toolbox.gpu.recorder

Several steps make one figure, each a few lines high, for a page that nothing moves on.
"""

import textwrap

import numpy as np
from matplotlib.patches import Rectangle

from lessons.toolbox.draw.figure import ClassFigure, frame, style
from lessons.toolbox.gpu.counters import BANKS, SECTOR, WARP, WORD
from lessons.toolbox.gpu.recorder import Recording, Request, Step
from lessons.toolbox.gpu.words import in_words

# inches: of the figure, of names, of source lines, of a line of text, of a lane
WIDTH, LEFT, SOURCE, LINE, CELL = 13.8, 1.75, 6.5, 0.25, 0.375
NOW, READ, WRITTEN, OFF, UNUSED = "#FFE9A8", "#EEEEEE", "#BFD9EA", "white", "#F6D5BC"
LOADED, STORED, INK, PALE, EDGE = "#0072B2", "#F3B37A", "#222222", "#777777", "#BBBBBB"
MOST_DIGITS, CUT = 3, "…"  # of a number in a lane's cell; what is written for a longer one
WIDE = 0.25  # inches of a cell that holds a number of two digits
ROW_OF_SECTORS = 4  # and twice as many, half as wide, where that makes too many rows


@style()
def steps_figure(
    shown: list[tuple[Recording, int]], title: str, caption: str, around: int = 2
) -> ClassFigure:
    """Steps below each other. shown: (recording, number of the step from 0); around: lines of code
    above and below the one that runs.
    """
    heights = [_height(recording.steps[at], around) for recording, at in shown]
    if len(shown) == 1:  # the room of the tallest, so that nothing jumps when a slider moves
        heights = [max(_height(step, around) for step in shown[0][0].steps)]
    fig, ax = frame(title, caption, (WIDTH, sum(heights) + 0.9))
    ax.set(xlim=(0, WIDTH), ylim=(sum(heights), 0), xticks=[], yticks=[])
    ax.set_axis_off()
    top = 0.0
    for (recording, at), height in zip(shown, heights):
        _Panel(ax, recording, at, around).draw(top)
        top += height
    return fig


def _height(step: Step, around: int) -> float:
    strips = len(step.read) + len(step.written) + 1  # and the numbers of lanes
    memory = _rows(step.request) + 1.2 if step.request else 0
    return LINE * (2 * around + 1) + 0.55 + CELL * (strips + memory) + 0.45


def _rows(request: Request) -> int:
    if request.kind == "shared":
        return len(passes_of(request)) + 1  # and the numbers of banks
    return -(-len(_sectors(request)) // _in_a_row(request))


def _sectors(request: Request) -> np.ndarray:
    """The sectors that are asked for, in order."""
    first, last = request.address // SECTOR, (request.address + request.size - 1) // SECTOR
    return np.unique(np.concatenate([first, last]))


def passes_of(request: Request) -> list[dict[int, list[int]]]:
    """For each pass of shared memory: {bank: the lanes that it answers}. Lanes that ask for the
    same word are answered together; different words of one bank have to wait for each other.
    """
    found: list[dict[int, list[int]]] = []
    part = min(WARP, WARP * WORD // request.size)  # lanes that are served together
    for first in range(0, WARP, part):
        waiting: dict[int, dict[int, list[int]]] = {}  # {bank: {word: lanes}}
        for lane, address in zip(request.lanes.tolist(), request.address.tolist()):
            if not first <= lane < first + part:
                continue
            for word in range(address // WORD, (address + request.size - 1) // WORD + 1):
                waiting.setdefault(word % BANKS, {}).setdefault(word, []).append(lane)
        for number in range(max(map(len, waiting.values()), default=0)):
            answered = {bank: list(words.values()) for bank, words in waiting.items()}
            found.append({b: lanes[number] for b, lanes in answered.items() if number < len(lanes)})
    return found


def _in_a_row(request: Request) -> int:
    return ROW_OF_SECTORS * (2 if len(_sectors(request)) > 2 * ROW_OF_SECTORS else 1)


class _Panel:
    """Draws one step from a height on, in inches."""

    def __init__(self, ax, recording: Recording, at: int, around: int):
        self.ax, self.recording, self.around = ax, recording, around
        self.at, self.step = at, recording.steps[at]

    def draw(self, top: float) -> None:
        """All of it."""
        top = self.code(top)
        words = f"{self.at + 1} of {len(self.recording.steps)}.  {in_words(self.step.instruction)}"
        self.ax.text(0, top + 0.25, words, va="center", fontsize=13, fontweight="bold")
        top = self.lanes(top + 0.5)
        for name, values in self.step.read.items():
            top = self.strip(top, name, values, READ, np.ones(WARP, bool))
        for name, values in self.step.written.items():
            top = self.strip(top, f"→ {name}", values, WRITTEN, self.step.lanes)
        if self.step.request:
            draw = self.banks if self.step.request.kind == "shared" else self.memory
            draw(top + 0.1)

    # ---- the code

    def code(self, top: float) -> float:
        """Two columns: lines of the source, lines of PTX."""
        now = self.step.instruction.source.number
        own = sorted({i.source.number for i in self.recording.instructions if i.source})
        window = [n for n in range(now - self.around, now + self.around + 1)]
        source = [(n, self.recording.code(n)) if own[0] <= n <= own[-1] else None for n in window]
        indent = min(len(line) - len(line.lstrip()) for _, line in filter(None, source))
        place, instructions = self.step.place, self.recording.instructions
        places = range(place - self.around, place + self.around + 1)
        for row in range(2 * self.around + 1):
            y, is_now = top + LINE * (row + 0.5), row == self.around
            if is_now:
                box = Rectangle((-0.05, y - LINE / 2), WIDTH, LINE, facecolor=NOW, edgecolor="none")
                self.ax.add_patch(box)
            look = {"family": "monospace", "fontsize": 11, "va": "center"}
            look["color"] = INK if is_now else PALE
            if source[row]:
                number, line = source[row]
                self.ax.text(0, y, f"{number:>3}  {_cut(line[indent:], 58)}", **look)
            if 0 <= places[row] < len(instructions):
                self.ax.text(SOURCE, y, _cut(instructions[places[row]].text, 70), **look)
        return top + LINE * (2 * self.around + 1)

    # ---- the registers

    def lanes(self, top: float, what: str = "lane") -> float:
        self.ax.text(0, top + CELL / 2, what, color=PALE, fontsize=11, va="center")
        for lane in range(WARP):
            self._text(LEFT + CELL * (lane + 0.5), top + CELL / 2, str(lane), PALE)
        return top + CELL

    def strip(self, top, name: str, values, colour: str, taking) -> float:
        """One register: a cell for each lane, or one for all where they hold the same."""
        is_mask = values.dtype == bool
        texts, what = (
            (["on" if v else "off" for v in values], "") if is_mask else self._told(name, values)
        )
        label = f"{name}{what}"
        self.ax.text(0, top + CELL / 2, label, fontsize=11, va="center", family="monospace")
        y, height = top + 0.04, CELL - 0.08
        if len(set(texts)) == 1 and texts[0] != CUT:
            self._box(LEFT, y, CELL * WARP, height, OFF if texts[0] == "off" else colour)
            self._text(LEFT + CELL * WARP / 2, y + height / 2, f"{texts[0]} in every lane")
            return top + CELL
        for lane, (text, takes) in enumerate(zip(texts, taking)):
            ground = colour if takes and text != "off" else OFF
            self._box(LEFT + CELL * lane, y, CELL, height, ground)
            ink = INK if takes else PALE
            self._text(LEFT + CELL * (lane + 0.5), y + height / 2, text, ink)
        return top + CELL

    def _told(self, register: str, values: np.ndarray) -> tuple[list[str], str]:
        """(a text for each lane, what it is counted from)."""
        place = self.recording.place_in(values.astype(np.int64)) if values.itemsize == 8 else None
        if place:
            name, offsets = place
            texts = [str(offset) for offset in offsets]
            what = f" = {_short(name)} +"
            if set(texts) == {"0"}:
                return [f"the address of {_short(name)}"], ""
        elif self._is_float(register):
            texts, what = [f"{v:g}" for v in values.view(f"f{values.itemsize}")], ""
        else:
            texts, what = [str(v) for v in values.view(f"i{values.itemsize}")], ""
        if len(set(texts)) == 1:
            return texts[:1], what
        texts = [text if len(text) <= MOST_DIGITS else CUT for text in texts]
        return np.resize(texts, WARP).tolist(), what

    def _is_float(self, register: str) -> bool:
        """Whether the bits are a float: the tensor that they come from or go to says so, or a
        calculation.
        """
        if self.step.request and self.step.request.kind != "shared":
            name, _ = self.recording.place_in(self.step.request.address)
            return self.recording.dtypes.get(name, "") == "float32"
        return register.removeprefix("→ ") in self.recording.floats

    # ---- memory

    def memory(self, top: float) -> None:
        """The sectors that the lanes ask for: a cell is as many bytes as a lane wants."""
        request, counted = self.step.request, self.step.request.counted
        name, offsets = self.recording.place_in(request.address)
        count, least = counted["sectors"], counted["least_sectors"]
        pale = "fetched and not used" if request.kind == "loaded" else "not written"
        words = (
            f"Memory of {_short(name)}: {len(request.lanes)} lanes ask for {count} sectors of "
            f"{SECTOR} bytes, and {'no fewer' if count == least else least} would do"
        )
        if count * SECTOR > len(request.lanes) * request.size:
            words += f". Pale: {pale}"
        self.ax.text(0, top + 0.22, words, fontsize=12, fontweight="bold", va="center")
        top, per_row = top + 0.42, _in_a_row(request)
        whose = dict(zip((offsets // request.size).tolist(), request.lanes.tolist()))
        base = int(request.address[0] - offsets[0])
        cells = SECTOR // request.size
        width = (CELL * WARP / per_row - 0.12) / cells
        for number, sector in enumerate(_sectors(request) - base // SECTOR):
            row, column = divmod(number, per_row)
            x, y = LEFT + column * CELL * WARP / per_row, top + CELL * row
            if column == 0:
                self.ax.text(
                    0, y + CELL / 2, f"byte {sector * SECTOR}", va="center", fontsize=11, color=PALE
                )
            lanes = [whose.get(int(sector) * cells + cell) for cell in range(cells)]
            self.sector(x, y, width, lanes)

    def banks(self, top: float) -> None:
        """Shared memory: a column for each bank, a row for each pass."""
        request, counted = self.step.request, self.step.request.counted
        many, least = counted["passes"], counted["least_passes"]
        passes = passes_of(request)
        banks = len(set().union(*passes))
        words = (
            f"Shared memory: {len(request.lanes)} lanes meet in {banks} of {BANKS} banks: {many} "
            f"pass{'es' * (many != 1)}, and {'no fewer' if many == least else least} would do"
        )
        self.ax.text(0, top + 0.22, words, fontsize=12, fontweight="bold", va="center")
        top = self.lanes(top + 0.42, "bank")
        for number, answered in enumerate(passes):
            y = top + CELL * number
            self.ax.text(
                0, y + CELL / 2, f"pass {number + 1}", va="center", fontsize=11, color=PALE
            )
            for bank in range(BANKS):
                lanes = answered.get(bank)
                ground = LOADED if lanes else UNUSED
                self._box(LEFT + CELL * bank, y + 0.04, CELL, CELL - 0.08, ground)
                if lanes:
                    text = f"{lanes[0]}{'…' * (len(lanes) > 1)}"
                    self._text(LEFT + CELL * (bank + 0.5), y + CELL / 2, text, "white")

    def sector(self, x: float, y: float, width: float, lanes: list[int | None]) -> None:
        """Its cells, each with the lane that wants it. In a narrow cell there is no room for a
        number: it is written into the free cells to the right, if there are two.
        """
        colour, ink = (LOADED, "white") if self.step.request.kind == "loaded" else (STORED, INK)
        for cell, lane in enumerate(lanes):
            ground = UNUSED if lane is None else colour
            self._box(x + cell * width, y + 0.04, width, CELL - 0.08, ground)
        for cell, lane in enumerate(lanes):
            if lane is not None and width > WIDE:
                self._text(x + (cell + 0.5) * width, y + CELL / 2, str(lane), ink)
            elif lane is not None and lanes[cell + 1 : cell + 3] == [None, None]:
                self._text(x + (cell + 2) * width, y + CELL / 2, str(lane))

    def _box(self, x, y, width, height, colour) -> None:
        look = {"facecolor": colour, "edgecolor": EDGE, "linewidth": 0.6}
        self.ax.add_patch(Rectangle((x, y), width, height, **look))

    def _text(self, x, y, text: str, colour: str = INK) -> None:
        self.ax.text(x, y, text, ha="center", va="center", fontsize=11, color=colour)


def _short(name: str) -> str:
    return name.removesuffix("_ptr")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else textwrap.shorten(text, most, placeholder=" …")
