"""What a token's K and V cost: to keep, to move, and to compute again. Seconds and dollars.

    python -m lessons.l26_kv_transfer.costs          the table, for models and links

Everything is a prediction from data sheets and prices, nothing is measured, and every assumption
is an argument. Read `ways`, then `cheapest`: keeping costs dollars for each second of the pause,
computing again costs dollars once, so each way is a straight line over the pause, and the cheapest
ways are the lower edge of these lines.

Source of the idea: Gray and Putzolu 1987, The 5 Minute Rule for Trading Memory for Disc Accesses.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lessons.l01_roofline.calculators import kv_bytes_per_token, move_s
from lessons.l01_roofline.planner.models import ModelShape, find_model
from lessons.l15_chunked_prefill.lab.costs import EFFICIENCY, PCIE_BYTES_PER_S, StepCost
from lessons.toolbox.measure.hardware import CHIPS, Chip
from lessons.toolbox.model.arguments import is_number, refuse

GB, YEAR_S = 1e9, 365 * 24 * 3600


class Price(NamedTuple):
    """Dollars for a unit, and who says so, when."""

    dollars: float
    unit: str
    source: str
    date: str


GPU_HOUR = Price(
    2.50,
    "an hour of an H100 SXM",
    "an assumption: clouds asked 1.99 to 5.00 (mercatus-ai.com/blog/cloud-gpu-pricing)",
    "2026-05",
)
HOST_GB = Price(
    11.0,
    "a GB of server DDR5",
    "an assumption: 64 GB were quoted above 700 (particle.news), and lists are not public",
    "2025-11",
)
DISK_GB = Price(
    0.365,
    "a GB of enterprise NVMe",
    "VDURA's Flash Volatility Index (quoted by servernews.ru/1135611): 30 TB TLC 10,950",
    "2026-Q1",
)
PRICES = GPU_HOUR, HOST_GB, DISK_GB
KEPT_YEARS = 3  # after which memory and disks have paid for themselves, an assumption
# The GPU waits for this share of a copy. 1: for all of it, the worst case; 0: the copy is hidden.
WAITING = 1.0

# Bytes a second in one direction. Data sheets; a real copy reaches 80 to 90 % of them.
LINKS = {
    "PCIe 5.0": PCIE_BYTES_PER_S,
    "NVMe": 14e9,  # one drive, reading: Micron 9550 data sheet, 2024
    "400 Gb/s": 50e9,
    "100 Gb/s": 12.5e9,
    "25 Gb/s": 3.125e9,
}
# (model, bits of a cached value)
MODELS = {
    "Llama-2-7B, MHA": ("llama-2-7b", 16),
    "Llama-3-8B, GQA": ("llama-3-8b", 16),
    "Llama-3-8B, FP8 cache": ("llama-3-8b", 8),
    "Llama-3-70B, GQA": ("llama-3-70b", 16),
    "DeepSeek-V3, MLA": ("deepseek-v3", 16),
}
CONTEXT = 8192  # tokens: attention makes a later token more expensive to compute again


class Token(NamedTuple):
    """One token of a model in the mean of a context: what it keeps, and the GPU seconds that
    computing it again takes.
    """

    kv_bytes: float
    compute_s: float

    def move_s(self, bytes_per_s: float) -> float:
        """Seconds to move it once over a link."""
        return move_s(self.kv_bytes, bytes_per_s)


def token_of(
    model: ModelShape | str,
    bits: float = 16,
    context: int = CONTEXT,
    chip: Chip = CHIPS["h100"],
    efficiency: float = EFFICIENCY,
) -> Token:
    """The mean token of a context, on one GPU. bits: of a cached value. efficiency: the share of
    the chip's FLOP/s that a large prefill reaches.

    Of a model on several GPUs the times are those of all of them together: each moves its own part
    over a link of its own.
    """
    shape = find_model(model) if isinstance(model, str) else model
    cost = StepCost(shape, chip, efficiency=efficiency)
    return Token(kv_bytes_per_token(shape, bits), cost.recompute_s(context) / context)


def least_worth_sending(token: Token, bytes_per_s: float, fixed_s: float) -> float:
    """From how many tokens on a prompt is worth computing on another GPU than its answer. The GPU
    that decodes is spared n · compute_s; the answer waits for n tokens on the link, and fixed_s
    seconds for the second request. infinity: the link is slower than computing.
    """
    check(bytes_per_s=bytes_per_s)
    if not is_number(fixed_s, 0):
        refuse("fixed_s", fixed_s, "seconds, 0 or more")
    spared_s = token.compute_s - token.move_s(bytes_per_s)
    return fixed_s / spared_s if spared_s > 0 else math.inf


# ---------------------------------------------------------------- dollars over the pause


class Way(NamedTuple):
    """A way to have a token's K and V again after a pause: dollars once, and for each second."""

    name: str
    once: float
    per_s: float

    def dollars(self, pause_s: float) -> float:
        return self.once + self.per_s * pause_s


def ways(
    token: Token,
    chip: Chip = CHIPS["h100"],
    gpu_hour: float = GPU_HOUR.dollars,
    host_gb: float = HOST_GB.dollars,
    disk_gb: float = DISK_GB.dollars,
    years: float = KEPT_YEARS,
    link: float = LINKS["PCIe 5.0"],
    disk_link: float = LINKS["NVMe"],
    waiting: float = WAITING,
) -> list[Way]:
    """Keep it in HBM, in host memory, on a disk, or compute it again.

    A byte of HBM costs its share of the GPU's rent, because another request could use it. host_gb,
    disk_gb: dollars that a GB costs to buy, spread over `years`. link: host to GPU, bytes/s;
    disk_link: disk to host. A token goes both ways. Raises ValueError for a number that is none.
    """
    check(gpu_hour=gpu_hour, host_gb=host_gb, disk_gb=disk_gb, years=years, link=link)
    check(disk_link=disk_link)
    if not is_number(waiting, 0, 1):
        refuse("waiting", waiting, "0 (copies are hidden) to 1 (the GPU waits for them)")
    gpu_s = gpu_hour / 3600
    bought_s = years * YEAR_S * GB  # dollars for a GB, over this: dollars for a byte and a second
    there_and_back = 2 * waiting * gpu_s
    host_once = there_and_back * token.move_s(link)
    disk_once = host_once + there_and_back * token.move_s(disk_link)
    return [
        Way("HBM", 0.0, token.kv_bytes * gpu_s / chip.memory_bytes),
        Way("host", host_once, token.kv_bytes * host_gb / bought_s),
        Way("disk", disk_once, token.kv_bytes * disk_gb / bought_s),
        Way("compute", token.compute_s * gpu_s, 0.0),
    ]


def crossing_s(one: Way, other: Way) -> float:
    """The pause after which `other`, which costs less a second, is cheaper than `one`."""
    if other.per_s >= one.per_s:
        refuse("other", other.name, f"a way that costs less a second than {one.name}")
    return max(0.0, (other.once - one.once) / (one.per_s - other.per_s))


def cheapest(choices: Sequence[Way]) -> list[tuple[str, float]]:
    """[(way, the pause in seconds from which it is the cheapest)], the lower edge of the lines."""
    best = min(choices, key=lambda way: (way.once, way.per_s))
    found, since = [(best.name, 0.0)], 0.0
    while later := [way for way in choices if way.per_s < best.per_s]:
        # Of two that cross at one moment, the one that costs less from then on.
        best, since = min(
            ((way, max(since, crossing_s(best, way))) for way in later),
            key=lambda pair: (pair[1], pair[0].per_s),
        )
        found.append((best.name, since))
    return found


def memory_in_and_out_s(chip: Chip = CHIPS["h100"], link: float = LINKS["PCIe 5.0"]) -> float:
    """Seconds to move all of a GPU's memory out over a link and in again. If host memory were
    free, this would be the pause from which it is cheaper than HBM: 2 · memory / bandwidth.
    """
    check(link=link)
    return 2 * chip.memory_bytes / link


def check(**values: float) -> None:
    """Raise ValueError that names the first value that is no number above 0."""
    for name, value in values.items():
        if not is_number(value, 0) or value == 0:
            refuse(name, value, "a number above 0")


UNITS = {"days": 86400, "h": 3600, "min": 60, "s": 1}


def in_words(seconds: float) -> str:
    """A pause for people: "2.5 s", "15 min", "29 h", "4.2 days"."""
    unit = next((unit for unit, size in UNITS.items() if seconds >= 2 * size), "s")
    count = seconds / UNITS[unit]
    return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"


def main() -> None:
    print(f"{'':22} {'KiB':>6} {'again':>9} " + " ".join(f"{name:>9}" for name in LINKS))
    for name, (model, bits) in MODELS.items():
        token = token_of(model, bits)
        moved = " ".join(f"{1e6 * token.move_s(rate):6.1f} µs" for rate in LINKS.values())
        print(f"{name:22} {token.kv_bytes / 1024:6.1f} {1e6 * token.compute_s:6.1f} µs {moved}")
    for name, (model, bits) in MODELS.items():
        found = cheapest(ways(token_of(model, bits)))
        print(f"{name:22} " + ", ".join(f"{way} from {in_words(since)}" for way, since in found))


if __name__ == "__main__":
    main()
