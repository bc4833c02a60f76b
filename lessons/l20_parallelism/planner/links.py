"""How long a collective takes: a latency for each round, and the bytes over the bandwidth (α and
β).

    seconds = base + rounds · hop + bytes / bandwidth

Every figure is a prediction from published ones; nothing was measured for this course.

- Bandwidths are those of data sheets, halved, because these add both directions.
- base and hop are those by which NCCL predicts its own times, to choose among its algorithms
  (NVIDIA/nccl, src/graph/tuning.cc, baseLat and hwLat of rings, as of 2022). It has two protocols
  for our purpose. LL sends a flag with every 4 bytes, so no rank waits for a fence: short hops, but
  a quarter of the bandwidth in an all-reduce. Simple sends whole buffers: long hops, all of it.
- one_shot and two_shot are not NCCL's. Their kernels read the other GPUs' memory directly, so we
  give one_shot the hops of LL and all of the bandwidth, and two_shot the hops of Simple. With that,
  an all-reduce of 0.5 to 4 MiB by four H100 is predicted within 15 % of the times that vLLM's pull
  request 24111 prints (a test has the table). Over PCIe, vLLM uses them for two GPUs at most.
- nvls: the switch of NVLink 4 and 5 adds what passes through it (NVLink SHARP, NVLS). A rank asks
  it for the sum of one piece, and hands the sum to it once, for all. It has the hops of two_shot,
  and the links "nvls4" and "nvls5" have it; the others say what GPUs do without.

Sources: Hockney 1994 for the model; Thakur, Rabenseifner & Gropp 2005 for collectives in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lessons.l20_parallelism.processes.collectives import WAYS
from lessons.toolbox.measure.hardware import Chip
from lessons.toolbox.model.arguments import check_positive, check_whole, refuse

NCCL = "hops: NVIDIA/nccl src/graph/tuning.cc"


@dataclass(frozen=True)
class Link:
    """What a GPU has to reach others. bytes_per_s: in one direction. ll_hop_s, bulk_hop_s: a round
    of a ring, under LL and Simple, in seconds. reads_directly: whether a kernel may read the memory
    of all other GPUs at this rate, as over NVSwitch. adds: whether the switch does the adding.
    """

    name: str
    bytes_per_s: float
    ll_hop_s: float
    bulk_hop_s: float
    source: str
    reads_directly: bool = False
    adds: bool = False


LINKS = {
    "nvlink3": Link("NVLink 3", 300e9, 0.6e-6, 3.4e-6, f"A100 data sheet, 600 GB/s; {NCCL}", True),
    "nvlink4": Link("NVLink 4", 450e9, 0.6e-6, 3.4e-6, f"H100 data sheet, 900 GB/s; {NCCL}", True),
    "nvlink5": Link(
        "NVLink 5", 900e9, 0.6e-6, 3.4e-6, f"DGX B200 data sheet, 1.8 TB/s; {NCCL}", True
    ),
    "nvls4": Link(
        "NVLink 4 with NVLS", 450e9, 0.6e-6, 3.4e-6, f"as NVLink 4, data sheet; {NCCL}", True, True
    ),
    "nvls5": Link(
        "NVLink 5 with NVLS", 900e9, 0.6e-6, 3.4e-6, f"as NVLink 5, data sheet; {NCCL}", True, True
    ),
    "pcie3": Link("PCIe 3 x16", 16e9, 1.0e-6, 5.7e-6, f"T4 data sheet, 32 GB/s; {NCCL}"),
    "pcie4": Link("PCIe 4 x16", 32e9, 1.0e-6, 5.7e-6, f"A100 data sheet, 64 GB/s; {NCCL}"),
    "pcie5": Link("PCIe 5 x16", 64e9, 1.0e-6, 5.7e-6, f"H100 data sheet, 128 GB/s; {NCCL}"),
    "ndr": Link(
        "InfiniBand NDR", 50e9, 2.7e-6, 14e-6, f"ConnectX-7 data sheet, 400 Gbit/s; {NCCL}"
    ),
}
# between the GPUs of one machine, by the chip's name; the others have PCIe 4
INSIDE = {
    "A100 80GB SXM": "nvlink3",
    "H100 SXM": "nvlink4",
    "H200": "nvlink4",
    "B200": "nvlink5",
    "T4": "pcie3",
}


class Protocol(NamedTuple):
    """base_s: of a collective, its launch and its meeting; share: of the link's bandwidth."""

    base_s: float
    is_low_latency: bool
    share: float


LL, SIMPLE = Protocol(6.6e-6, True, 1 / 4), Protocol(8.4e-6, False, 1)
PROTOCOLS = {
    "one_shot": (Protocol(6.6e-6, True, 1),),
    "two_shot": (SIMPLE,),
    "ring": (LL, SIMPLE),
    "doubling": (LL, SIMPLE),
}


@dataclass(frozen=True)
class Machine:
    """GPUs in boxes. inside: between those of a box; between: what each GPU has to other boxes."""

    chip: Chip
    inside: Link
    between: Link = LINKS["ndr"]
    gpus_per_box: int = 8


def machine_of(
    chip: Chip, inside: str | None = None, between: str = "ndr", gpus_per_box: int = 8
) -> Machine:
    """The usual box of a chip. inside, between: names of LINKS; None: what its data sheet says.
    Raises ValueError.
    """
    check_whole(gpus_per_box=gpus_per_box)
    inside = INSIDE.get(chip.name, "pcie4") if inside is None else inside
    for name, link in {"inside": inside, "between": between}.items():
        if link not in LINKS:
            refuse(name, link, f"one of {', '.join(LINKS)}")
    return Machine(chip, LINKS[inside], LINKS[between], gpus_per_box)


# ---------------------------------------------------------------- one collective


def all_reduce_times(n: float, size: int, machine: Machine) -> Iterator[tuple[float, str]]:
    """(seconds, way) of each way to sum n bytes over neighbouring GPUs. Across boxes only the ring
    is known: of its 2 (P − 1) rounds, 2 (boxes − 1) are between two, and a box's GPUs share the
    bytes that leave it.
    """
    boxes = -(-size // machine.gpus_per_box)
    if machine.inside.adds and size > 1 and boxes == 1:
        latency_s = SIMPLE.base_s + 2 * machine.inside.bulk_hop_s
        yield latency_s + nvls_bytes(size, n) / machine.inside.bytes_per_s, "nvls"
    for name, way in WAYS.items():
        is_direct = name in ("one_shot", "two_shot")
        if is_direct and size > 2 and not machine.inside.reads_directly:
            continue
        if boxes > 1 and name != "ring":
            continue
        for protocol in PROTOCOLS[name]:
            inside, between = (_hop_s(x, protocol) for x in (machine.inside, machine.between))
            crossings = 2 * (boxes - 1)
            latency_s = protocol.base_s + crossings * between
            latency_s += (way.rounds(size) - crossings) * inside
            sent = way.bytes_sent(size, n) / protocol.share
            wire_s = sent / machine.inside.bytes_per_s
            if boxes > 1:
                per_gpu = sent / machine.gpus_per_box
                wire_s = max(wire_s, per_gpu / machine.between.bytes_per_s)
            yield latency_s + wire_s, name


def nvls_bytes(size: int, n: float) -> float:
    """What a rank sends where the switch adds: (1 + 1 / P) · n, and as many come in.

    The switch reads all n bytes of every rank, a piece for each rank that asks. Each rank gets one
    added piece of n / P, and sends it once; the switch hands it to all.
    """
    return (1 + 1 / size) * n


def all_reduce_s(n: float, size: int, machine: Machine) -> float:
    """Seconds by the fastest way. n: bytes of the tensor; a GPU alone has nothing to send."""
    check_whole(size=size)
    return min(all_reduce_times(n, size, machine))[0] if size > 1 else 0.0


def all_gather_s(n: float, size: int, machine: Machine) -> float:
    """Seconds until each of the GPUs has n bytes, of which it had its share: as the second half of
    two_shot.
    """
    if size == 1:
        return 0.0
    link = machine.inside if size <= machine.gpus_per_box else machine.between
    return SIMPLE.base_s + link.bulk_hop_s + (size - 1) / size * n / link.bytes_per_s


def all_to_all_s(sent: float, size: int, machine: Machine) -> float:
    """Seconds for every GPU to send `sent` bytes, spread evenly over all of `size`, its own part
    included. What stays in the box and what leaves it travel at the same time.
    """
    if size == 1:
        return 0.0
    box = min(size, machine.gpus_per_box)
    inside_s = sent * (box - 1) / size / machine.inside.bytes_per_s
    if size <= machine.gpus_per_box:
        return LL.base_s + machine.inside.ll_hop_s + inside_s
    outside_s = sent * (size - box) / size / machine.between.bytes_per_s
    return LL.base_s + machine.between.ll_hop_s + max(inside_s, outside_s)


def send_s(n: float, link: Link) -> float:
    """Seconds of one message of n bytes."""
    check_positive(n=n)
    return LL.base_s + link.ll_hop_s + n / link.bytes_per_s


def _hop_s(link: Link, protocol: Protocol) -> float:
    return link.ll_hop_s if protocol.is_low_latency else link.bulk_hop_s
