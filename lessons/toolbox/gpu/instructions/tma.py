"""cp.async.bulk.tensor: Hopper's copy engine (TMA) moves a box of a tensor between global and
shared memory, beside the warps.

A tensor map describes the tensor: its address, sizes, strides, the box and the swizzle
(`tensormap`). The host makes it, and it is a parameter, or the kernel makes it itself. One thread
starts a copy. A load tells an mbarrier when its bytes have come; a store belongs to a bulk group,
and its shared memory may be used again when the group has been waited for. Elements outside of the
tensor arrive as zeros, and are not stored.

Source: NVIDIA, PTX ISA 9.0, 9.7.9.27 (bulk tensor copies); 5.5 (tensors, boxes, swizzling modes).
"""

import numpy as np

from lessons.toolbox.gpu.instructions.descriptors import swizzled
from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.instructions.tensormap import TensorMap, maps_of
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import reader
from lessons.toolbox.gpu.values import UNSIGNED


def copy(instruction: Instruction, kernel: Kernel):
    """Loads, stores, and the groups of stores."""
    if instruction.has("commit_group", "wait_group"):
        return groups(instruction)
    if not instruction.has("tensor"):
        raise ValueError(instruction.text)
    first, second, *rest = instruction.operands
    is_load = not isinstance(first, tuple)
    target, (map_, coordinates) = (first, second) if is_load else (second, first)
    shared = address_reader(target, kernel, "shared")
    which = reader(map_.base, "u64")
    at = [reader(name, "s32") for name in coordinates]
    barrier = address_reader(rest[0], kernel, "shared") if is_load else None

    def run(threads, mask):
        every = threads.active(mask)
        addresses = threads.spread(which(threads))[every]
        for map_, chosen in maps_of(threads, addresses, every):
            lanes = every[chosen]
            start = np.stack([threads.spread(read(threads))[lanes] for read in at][::-1], axis=1)
            places = chunk_places(threads, map_, threads.of(shared(threads), lanes), lanes)
            offsets, inside = element_addresses(map_, start.astype(np.int64))
            if is_load:
                load(threads, map_, lanes, places, offsets, inside, barrier(threads)[lanes])
            else:
                store(threads, map_, lanes, places, offsets, inside)

    return run


def element_addresses(map_: TensorMap, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(addresses, whether they lie in the tensor) of a box's elements: [lanes, *box]."""
    address = np.full((len(start), *map_.box), map_.address, dtype=np.int64)
    inside = np.ones(address.shape, dtype=bool)
    for axis, (size, stride, box) in enumerate(zip(map_.sizes, map_.strides, map_.box)):
        shape = [1] * (len(map_.box) + 1)
        shape[axis + 1] = box
        index = start[:, axis].reshape(-1, *[1] * len(map_.box)) + np.arange(box).reshape(shape)
        inside &= (index >= 0) & (index < size)
        address += np.where((index >= 0) & (index < size), index, 0) * stride
    return address, inside


def chunk_places(threads, map_: TensorMap, address: np.ndarray, lanes) -> np.ndarray:
    """[lanes, chunks of 16 bytes]: where in shared memory the box lies, in its order."""
    if (address % 128).any():
        threads.fail("the copy engine wants shared memory at a multiple of 128", lanes)
    chunk = address[:, None] + 16 * np.arange(map_.box_bytes // 16)
    flat = swizzled(chunk, map_.swizzle).reshape(-1)
    each = np.repeat(lanes, map_.box_bytes // 16)
    return threads.shared.places(threads, flat, 16, each).reshape(len(lanes), -1)


def load(threads, map_: TensorMap, lanes, places, addresses, inside, barriers) -> None:
    """Start loads. They end later, each lane's in an order of its own."""
    each = np.repeat(lanes, places.shape[1])
    threads.shared.begin_copy(threads, places.reshape(-1), 16, each)
    boxes = np.zeros(addresses.shape, dtype=UNSIGNED[map_.element])
    who = np.broadcast_to(lanes.reshape(-1, *[1] * len(map_.box)), addresses.shape)[inside]
    boxes[inside] = threads.memory.load(threads, addresses[inside], map_.element, 1, who)[0]
    data = boxes.reshape(len(lanes), -1).view(np.uint8).reshape(len(lanes), -1, 16)
    place, engine = threads.pc, threads.clocks.agent("the copy engine")
    if threads.counts:
        threads.counts.copied(threads, map_.box_bytes, barriers, lanes)
    for k in range(len(lanes)):

        def end(k=k):
            threads.pc = place
            mine = np.repeat(lanes[k : k + 1], places.shape[1])
            threads.shared.end_copy(threads, places[k], data[k], mine, engine)
            threads.mbarriers.bring(int(barriers[k]), lanes[k : k + 1], map_.box_bytes)

        threads.events.append(end)


def store(threads, map_: TensorMap, lanes, places, addresses, inside) -> None:
    """Stores read shared memory until their group is waited for."""
    each = np.repeat(lanes, places.shape[1])
    marks = threads.shared.note_read_beside(threads, places.reshape(-1), 16, each)
    chunks = threads.shared.bytes.reshape(-1, 16)[places // 16]
    boxes = np.ascontiguousarray(chunks).view(UNSIGNED[map_.element]).reshape(addresses.shape)
    who = np.broadcast_to(lanes.reshape(-1, *[1] * len(map_.box)), addresses.shape)[inside]
    threads.memory.store(threads, addresses[inside], map_.element, [boxes[inside]], who)
    threads.stores.append((each, marks))


def groups(instruction: Instruction):
    """commit_group; wait_group n: waits for all groups. With n above 0 some may go on, which the
    machine does not use.
    """
    is_wait = instruction.has("wait_group")

    def run(threads, mask):
        if not is_wait:
            return
        here = np.zeros(threads.count, dtype=bool)
        here[threads.active(mask)] = True
        left = []
        for lanes, marks in threads.stores:
            done, still = here[lanes], ~here[lanes]
            if done.any():
                ended = [(warp[done], cell[done], stamp) for warp, cell, stamp in marks]
                threads.shared.end_read(threads, ended, threads.cta[lanes[done]])
            if still.any():
                marks = [(warp[still], cell[still], stamp) for warp, cell, stamp in marks]
                left.append((lanes[still], marks))
        threads.stores = left

    return run


KNOWN = {"cp": copy}
