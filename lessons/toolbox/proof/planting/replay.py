"""A launch, recorded with its inputs, that can run again and again: with other code, under another
seed, with its warps in another order.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lessons.toolbox.gpu import machine
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.gpu.global_memory import Buffer
from lessons.toolbox.gpu.machine import Launch, Run
from lessons.toolbox.gpu.ptx import Kernel
from lessons.toolbox.gpu.rounding import ROUNDING
from lessons.toolbox.gpu.threads import WARP
from lessons.toolbox.proof.numerics import NotEquivalent, assert_close_to_oracle

ROW = 64  # numbers of a buffer that are judged as one row
SLOWER = 4  # times the steps of the right kernel: beyond that a wrong one does not end
UNITS = 4  # in the last place of the largest number: what another order of a sum may change


@dataclass
class Recorded:
    """What a kernel was launched with. contents: of each buffer, before the launch."""

    kernel: Kernel
    grid: tuple
    block: tuple
    buffers: list[Buffer]
    contents: list[np.ndarray]
    parameters: dict[str, bytes]
    shared_bytes: int
    maps: dict | None
    done: Launch | None = None
    results: dict[tuple, list[np.ndarray]] = field(default_factory=dict)

    @property
    def places(self) -> list[int]:
        """The instructions that some warp came to."""
        return sorted(place for place, warps in self.done.executed.items() if warps)

    @property
    def warp_instructions(self) -> int:
        return sum(self.done.executed.values())

    def play(self, kernel: Kernel, rounding: int, order: int, runner=None) -> list[np.ndarray]:
        """The buffers' bytes after a launch of `kernel`. Raises Fault, UnknownInstruction."""
        fresh = [
            Buffer(data.copy(), buffer.name, buffer.watched, buffer.dtype)
            for buffer, data in zip(self.buffers, self.contents)
        ]
        before, ROUNDING.seed = ROUNDING.seed, rounding
        most, machine.MOST_STEPS = machine.MOST_STEPS, self.most_steps(runner)
        try:
            machine.launch(
                kernel,
                self.grid,
                self.block,
                fresh,
                self.parameters,
                self.shared_bytes,
                seed=order,
                maps=self.maps,
                runner=runner,
            )
        finally:
            ROUNDING.seed, machine.MOST_STEPS = before, most
        return [buffer.data for buffer in fresh]

    def most_steps(self, runner) -> int:
        parts = 1 if runner is None else 8  # fronts that go on apart take more steps
        return 1000 + SLOWER * parts * self.done.steps

    def right(self, rounding: int, order: int, runner=None) -> list[np.ndarray]:
        """What the right kernel gives, kept."""
        key = (rounding, order, runner)
        if key not in self.results:
            self.results[key] = self.play(self.kernel, rounding, order, runner)
        return self.results[key]


class OneByOne(Run):
    """Warps in an order drawn from the seed: at each branch and barrier some of a front's warps (of
    a kernel with wgmma: of its warpgroups) are held back until the others can go no further. A
    kernel whose barriers order all that matters gives the same bits.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.held: dict[int, np.ndarray] = {}
        has_products = any(i.op == "wgmma" for i in self.threads.kernel.instructions)
        self.together = WARP * (4 if has_products and self.threads.warps % 4 == 0 else 1)
        fronts, self.fronts = self.fronts, {}
        self.take(fronts)

    def take(self, fronts: dict[int, np.ndarray]) -> None:
        """Hold back some of them."""
        for place, mask in fronts.items():
            groups = mask.reshape(-1, self.together).any(1)
            back = (self.threads.random.random(len(groups)) < 0.5) & groups
            if (back == groups).all():
                back[:] = False
            back = np.repeat(back, self.together) & mask
            if back.any():
                self.held[place] = self.held[place] | back if place in self.held else back
            super().take({place: mask & ~back} if back.any() else {place: mask})

    def wake(self) -> None:
        """Those that were held back go on first."""
        if self.held:
            fronts, self.held = self.held, {}
            super().take(fronts)
        else:
            super().wake()

    def unfinished(self) -> bool:
        return bool(self.held) or super().unfinished()


# ---------------------------------------------------------------- comparison


def numbers_of(buffer: Buffer, data: np.ndarray) -> Tensor:
    """A buffer's bytes as its tensor's numbers, [N]."""
    dtype = buffer.dtype if buffer.dtype is not None else torch.uint8
    whole = data[: len(data) // dtype.itemsize * dtype.itemsize]
    return torch.from_numpy(whole.copy()).view(dtype)


def as_rows(x: Tensor) -> Tensor:
    """[N] -> [rows, ROW]."""
    return torch.nn.functional.pad(x, (0, -len(x) % ROW)).view(-1, ROW)


def same_bits(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(some, others))


def judge(recorded: Recorded, found: list[np.ndarray], rounding: tuple[int, int], order) -> None:
    """Hold results against the right kernel's, by the rules of `proof.numerics`: the oracle is what
    that gives with the same rounding, the naive version what it gives with another one. What it
    leaves as it was has to stay so, bit by bit. Raises NotEquivalent.
    """
    exact, other = (recorded.right(seed, order) for seed in rounding)
    for buffer, was, got, right, plain in zip(
        recorded.buffers, recorded.contents, found, exact, other
    ):
        if np.array_equal(got, right):
            continue
        if np.array_equal(was, right):
            raise NotEquivalent("inputs", f"{buffer.name} was written to")
        out, want, naive = (numbers_of(buffer, data) for data in (got, right, plain))
        if not out.dtype.is_floating_point:
            naive = want  # codes and indices are exact
        else:
            finite = want.double().isfinite() & naive.double().isfinite()
            if not torch.equal(bits_of(out)[~finite], bits_of(want)[~finite]):
                raise NotEquivalent("E0", f"{buffer.name}: NaN or infinity at other places")
            if not out.double().isfinite()[finite].all():
                raise NotEquivalent("E0", f"{buffer.name}: NaN or infinity")
            is_small = out.dtype.itemsize == 1
            out, want, naive = (x.float() if is_small else x for x in (out, want, naive))
            out, want, naive = (as_rows(x.masked_fill(~finite, 0)) for x in (out, want, naive))
        assert_close_to_oracle(out, naive, want.double(), label=buffer.name)


def bits_of(x: Tensor) -> Tensor:
    return x.view(-1, 1).view(torch.uint8)


def is_rounding(recorded: Recorded, found: list, rounding: tuple[int, int], order) -> bool:
    """Whether results differ from the right ones by no more than another rounding makes them
    differ, or than a few units in the last place of the largest.
    """
    exact, other = (recorded.right(seed, order) for seed in rounding)
    for buffer, got, right, plain in zip(recorded.buffers, found, exact, other):
        if np.array_equal(got, right):
            continue
        out, want, naive = (numbers_of(buffer, data) for data in (got, right, plain))
        if not out.dtype.is_floating_point:
            return False
        out, want, naive = (x.double().nan_to_num(0, 0, 0) for x in (out, want, naive))
        unit = torch.finfo(numbers_of(buffer, got).dtype).eps * float(want.abs().max())
        granted = max(float((want - naive).abs().max()), UNITS * unit)
        if float((out - want).abs().max()) > granted:
            return False
    return True


__all__ = ["Fault", "OneByOne", "Recorded", "is_rounding", "judge", "same_bits"]
