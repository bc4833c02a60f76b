"""Proves that every way to all-reduce gives the sum on every rank, to the same digit, in the rounds
and with the bytes of its formulas.
"""

import pytest
import torch

from lessons.l20_parallelism.lab import loopback
from lessons.l20_parallelism.processes.collectives import WAYS, norm_between
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks

SHAPES = [(), (1,), (7,), (5, 3), (24,), (0,)]


def parts_of(seed: int, size: int, dtype=torch.float64) -> list[list[torch.Tensor]]:
    """[rank][shape]: what each rank adds, the same on all ranks that ask."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator, dtype=dtype) for s in SHAPES] for _ in range(size)]


def reduce_rank(world: Group, seed: int) -> list:
    """Each way and shape: what came, what went over the wire, whether x stayed as it was."""
    results = []
    for name, way in WAYS.items():
        for x in parts_of(seed, world.size)[world.rank]:
            world.wire.clear()
            before = x.clone()
            total = way.run(x, world)
            theirs = world.all_reduce(x.clone())
            facts = world.wire.calls["step"], world.wire.bytes["send"], torch.equal(x, before)
            results.append((name, total.tolist(), theirs.tolist(), *facts))
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.sample(1)
def test_every_way_gives_the_sum_on_every_rank(size, seed):
    ranks = run_ranks(size, reduce_rank, seed)
    sums = [sum(parts) for parts in zip(*parts_of(seed, size))]
    for number, cases in enumerate(zip(*ranks)):
        name, want = cases[0][0], sums[number % len(SHAPES)]
        for _, total, theirs, _, _, is_untouched in cases:
            assert is_untouched, name
            torch.testing.assert_close(torch.tensor(total, dtype=torch.float64), want)
            torch.testing.assert_close(torch.tensor(theirs, dtype=torch.float64), want)
        assert all(case[1] == cases[0][1] for case in cases), f"{name}: ranks differ"
        check_cost(name, size, 8 * want.numel(), [case[3] for case in cases], [c[4] for c in cases])


def check_cost(name: str, size: int, n: int, rounds: list[int], sent: list[int]) -> None:
    """Counted rounds and bytes of all ranks against the formulas. n: bytes of x."""
    way = WAYS[name]
    assert max(rounds) == way.rounds(size), name
    if name in ("ring", "two_shot"):
        # where size does not divide x, some ranks send a number more; all together send the formula
        assert sum(sent) == pytest.approx(size * way.bytes_sent(size, n)), name
        piece = 8 * 2 * (size - 1)
        assert max(sent) <= way.bytes_sent(size, n) + piece, name
    else:
        assert max(sent) == way.bytes_sent(size, n), name


def test_the_formulas_at_sizes_of_a_machine():
    """Eight GPUs: the ring sends 1.75 n in 14 rounds, one shot 7 n in one."""
    assert {name: way.rounds(8) for name, way in WAYS.items()} == {
        "one_shot": 1, "two_shot": 2, "ring": 14, "doubling": 3,
    }  # fmt: skip
    assert {name: way.bytes_sent(8, 1.0) for name, way in WAYS.items()} == {
        "one_shot": 7.0, "two_shot": 1.75, "ring": 1.75, "doubling": 3.0,
    }  # fmt: skip
    assert all(way.rounds(1) == way.bytes_sent(1, 5) == 0 for way in WAYS.values())
    assert WAYS["doubling"].rounds(6) == 4 and WAYS["doubling"].bytes_sent(6, 1) == 3


class CountingNorm(torch.nn.Module):
    """RMSNorm's arithmetic, and how many rows it was asked for."""

    rows = 0

    def forward(self, x):
        self.rows += len(x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def norm_rank(world: Group, seed: int, num_rows: int) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(world.size, num_rows, 4, generator=generator, dtype=torch.float64)
    norm = CountingNorm()
    out = norm_between(parts[world.rank], norm, world)
    return out.tolist(), norm.rows, world.wire.bytes["send"], norm(parts.sum(0)).tolist()


@pytest.mark.parametrize("size, num_rows", [(2, 6), (3, 7), (3, 2)])
@pytest.mark.sample(1)
def test_a_norm_fits_between_the_halves_of_an_all_reduce(size, num_rows, seed):
    """Each row is normed by one rank only, and the bytes are those of an all-reduce."""
    ranks = run_ranks(size, norm_rank, seed, num_rows)
    for out, _, _, want in ranks:
        torch.testing.assert_close(torch.tensor(out), torch.tensor(want))
    assert sum(rows for _, rows, _, _ in ranks) == num_rows
    n = num_rows * 4 * 8
    assert sum(sent for _, _, sent, _ in ranks) == pytest.approx(
        size * WAYS["ring"].bytes_sent(size, n)
    )


# ---------------------------------------------------------------- an instrument that is not ours

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 7001 52 0 0 0 0 0 0 9001 53 0 0 0 0 0 0
  eth0: 5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0
"""


def test_the_kernel_counts_what_the_formula_says():
    """Gloo's own all-reduce sends the bytes of a ring, by the counter of the operating system."""
    if not loopback.DEV.exists():
        pytest.skip(f"NOT RUN: needs {loopback.DEV}, which Linux has")
    n, size = 8_000_000, 3
    expected = size * WAYS["ring"].bytes_sent(size, n)
    # three times, because other programs are counted, too; one_shot would be 1.5 of it each time
    for _ in range(3):
        share = loopback.measured(size, n) / expected
        assert share > 0.99
        if share < 1.4:
            return
    pytest.fail(f"{share:.2f} times the bytes of a ring, three times")


def test_the_counter_of_the_loopback_interface_is_read():
    assert loopback.loopback_bytes(DEV) == 9001
    with pytest.raises(ValueError, match="no interface lo"):
        loopback.loopback_bytes("eth0: 1 2 3")


def test_the_command_prints_a_line_for_each_way(monkeypatch, capsys):
    monkeypatch.setattr(loopback, "loopback_bytes", lambda: 0)
    monkeypatch.setattr(loopback, "measured", lambda size, n, way: 10**6)
    assert loopback.main(["--ranks", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(WAYS)
    monkeypatch.undo()
    assert loopback.main(["--ranks", "0"]) == 2
    assert capsys.readouterr().err.startswith("loopback: size: got 0")
