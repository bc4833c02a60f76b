"""Where the cache of a sequence that pauses can wait, and how long it takes to bring it back: host
memory, a disk, another machine. Lesson 26 is about these places.
"""

from typing import NamedTuple

from rich.table import Table

from lessons.l01_roofline.calculators import move_s, positive
from lessons.l01_roofline.planner.plan import Plan
from lessons.l01_roofline.planner.report import amount, duration

GB = 1e9
HOST_LINK, DISK_LINK = 64.0, 14.0  # GB/s: PCIe 5.0 with 16 lanes, one NVMe drive (lesson 26)


class Place(NamedTuple):
    """room_bytes: of all GPUs together; None: what another machine has. back_s: until a sequence
    is back on the GPUs.
    """

    name: str
    room_bytes: float | None
    back_s: float


def places(
    plan: Plan,
    host_gb: float = 0.0,
    disk_gb: float = 0.0,
    network_gbit: float | None = None,
    host_link: float = HOST_LINK,
    disk_link: float = DISK_LINK,
) -> list[Place]:
    """The places of a plan, and none that has no room. Sizes and links are those of one GPU: each
    keeps and moves its own part. What comes from a disk crosses host memory, too.

    host_gb, disk_gb: GB. host_link, disk_link: GB/s. network_gbit: Gb/s, of a link to another
    machine. Raises ValueError for a bandwidth that is none.
    """
    sequence_bytes = plan.cache_bytes

    def over(rate_gb: float, name: str) -> float:
        return move_s(sequence_bytes, plan.gpus * GB * positive(name, rate_gb))

    host_s, disk_s = over(host_link, "host_link"), over(disk_link, "disk_link")
    found = []
    if host_gb:
        found.append(Place("host memory", plan.gpus * GB * host_gb, host_s))
    if disk_gb:
        found.append(Place("disk", plan.gpus * GB * disk_gb, disk_s + host_s))
    if network_gbit is not None:
        found.append(Place("another machine", None, over(network_gbit / 8, "network_gbit")))
    return found


def places_table(plan: Plan, found: list[Place]) -> Table:
    """Sequences that each place holds, and the time back beside a prefill at its floor."""
    sequence_bytes = plan.cache_bytes
    again_s = plan.prefill.seconds
    table = Table("a sequence that pauses", "sequences", "back in", "against its prefill")
    table.add_row("HBM", str(plan.sequences), "0 s", "if no other one needs the room")
    for name, room_bytes, back_s in found:
        held = "" if room_bytes is None else str(int(room_bytes // sequence_bytes))
        faster = back_s < again_s
        ratio = again_s / back_s if faster else back_s / again_s
        said = f"{ratio:.3g} times {'faster' if faster else 'slower: compute it again'}"
        table.add_row(name, held, duration(back_s), said)
    rate = plan.kv_bytes_per_token * plan.context / again_s / plan.gpus
    slowest = f"below {amount(rate, 'B/s')} a GPU a link is slower"
    table.add_row("computed again", "", duration(again_s), slowest)
    return table
