"""tensormap: a kernel that makes a tensor map itself, for the copy engine (TMA).

    tensormap.replace        writes one field of the map's 128 bytes, in shared memory
    tensormap.cp_fenceproxy  a warp copies the 128 bytes to global memory
    fence.proxy.tensormap    from here on the copy engine may use the copy

NVIDIA does not say where a field is among the 128 bytes. Here each has a place of its own, so a map
is ordinary memory: what is not written stays what it was, and races show as elsewhere.

Source: NVIDIA, PTX ISA 9.0, 9.7.9.28 (tensormap.replace, with the values of its fields), 9.7.13.14
(tensormap.cp_fenceproxy), 9.7.13.4 (fence.proxy.tensormap), 5.5.8 (tensor maps).
"""

from dataclasses import dataclass

import numpy as np

from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.ptx import PARAMETERS, Instruction, Kernel
from lessons.toolbox.gpu.threads import WARP, reader

MAP_BYTES = 128
# field: (byte of the first, bytes of each)
FIELDS = {
    "global_address": (0, 8),
    "rank": (8, 4),
    "box_dim": (12, 4),
    "global_dim": (32, 4),
    "global_stride": (56, 8),
    "element_stride": (88, 4),
    "elemtype": (108, 4),
    "interleave_layout": (112, 4),
    "swizzle_mode": (116, 4),
    "fill_mode": (120, 4),
}
ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)  # u8, u16, …, f16, f32, …, bf16, tf32
SWIZZLES = (0, 32, 64, 128)  # bytes of a swizzled row


@dataclass(frozen=True)
class TensorMap:
    """A tensor as the copy engine sees it. Sizes, strides (bytes) and box: the innermost last."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int  # bytes
    swizzle: int  # bytes of a swizzled row, 0 for none

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element


def tensormap(instruction: Instruction, kernel: Kernel):
    """replace and cp_fenceproxy."""
    if instruction.has("cp_fenceproxy"):
        return copy_map(instruction, kernel)
    name = next(word for word in instruction.modifiers if word in FIELDS)
    place, size = FIELDS[name]
    target, *index, value = instruction.operands
    where = address_reader(target, kernel, "shared")
    offset = place + size * int(index[0], 0) if index else place
    given = reader(value, f"u{8 * size}")

    def run(threads, mask):
        lanes = threads.active(mask)
        at = threads.of(where(threads), lanes) + offset
        threads.shared.store(threads, at, size, [threads.of(given(threads), lanes)], lanes)

    return run


def copy_map(instruction: Instruction, kernel: Kernel):
    """A warp copies a map from shared to global memory, 4 bytes a lane."""
    target, source, _bytes = instruction.operands
    to = address_reader(target, kernel, "global")
    of = address_reader(source, kernel, "shared")

    def run(threads, mask):
        lanes = threads.active(mask)
        if (
            len(lanes) % WARP
            or (threads.lane[lanes] != np.tile(np.arange(WARP), len(lanes) // WARP)).any()
        ):
            threads.fail("a part of a warp copies a tensor map; accepted: whole warps", lanes)
        there, here = threads.of(to(threads), lanes), threads.of(of(threads), lanes)
        if (there % MAP_BYTES).any() or (here % MAP_BYTES).any():
            threads.fail(f"a tensor map at no multiple of {MAP_BYTES}", lanes)
        step = 4 * threads.lane[lanes]
        words = threads.shared.load(threads, here + step, 4, 1, lanes)
        threads.memory.store(threads, there + step, 4, words, lanes)
        threads.fenced_maps.difference_update(zip(threads.cta[lanes], there))

    return run


def acquire(instruction: Instruction, kernel: Kernel):
    """fence.proxy.tensormap::generic.acquire: the copy engine sees the map at an address."""
    if not instruction.has("tensormap_generic"):
        raise ValueError(instruction.text)
    where = address_reader(instruction.operands[0], kernel, "global")

    def run(threads, mask):
        lanes = threads.active(mask)
        threads.fenced_maps.update(zip(threads.cta[lanes], threads.of(where(threads), lanes)))

    return run


def maps_of(threads, addresses: np.ndarray, lanes: np.ndarray):
    """(tensor map, which of the lanes) for each map that lanes name by its address."""
    for address in np.unique(addresses):
        chosen = addresses == address
        if int(address) >= PARAMETERS:
            name, _ = threads.kernel.parameter_at(int(address))
            found = threads.maps.get(name)
        else:
            found = made_map(threads, int(address), lanes[chosen])
        if found is None:
            threads.fail("there is no tensor map at this address", lanes[chosen])
        yield found, chosen


def made_map(threads, address: int, lanes: np.ndarray) -> TensorMap | None:
    """The map that the kernel has made in global memory. Raises Fault where the copy engine may
    not see it yet.
    """
    first = lanes[:1]
    part = next(iter(threads.memory.parts(threads, np.array([address]), MAP_BYTES, first)))
    buffer, offset, _ = part
    if (threads.cta[first[0]], address) not in threads.fenced_maps:
        threads.fail("no fence.proxy.tensormap came after this tensor map was written", lanes)
    data = buffer.data[int(offset[0]) : int(offset[0]) + MAP_BYTES].tobytes()

    def field(name: str, count: int) -> tuple[int, ...]:
        place, size = FIELDS[name]
        return tuple(int(x) for x in np.frombuffer(data, f"u{size}", count, place))

    rank = field("rank", 1)[0] + 1
    kind, swizzle = field("elemtype", 1)[0], field("swizzle_mode", 1)[0]
    known = rank <= 5 and kind < len(ELEMENT_BYTES) and swizzle < len(SWIZZLES)
    plain = field("element_stride", rank if known else 1)
    if not known or any(x != 1 for x in plain) or any(field("interleave_layout", 1)):
        return None
    element = ELEMENT_BYTES[kind]
    strides = (element, *field("global_stride", rank - 1))
    return TensorMap(
        field("global_address", 1)[0],
        field("global_dim", rank)[::-1],
        strides[::-1],
        field("box_dim", rank)[::-1],
        element,
        SWIZZLES[swizzle],
    )


KNOWN = {"tensormap": tensormap, "fence": acquire}
