"""Proves the model of latency and bandwidth against times that others have published, and what it
says of tensor parallelism: where more GPUs stop paying, and how far "linear" is from a table's 88
%.
"""

import random

import pytest

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import MODELS
from lessons.l20_parallelism.pipeline import schedule
from lessons.l20_parallelism.planner.links import (
    LINKS,
    all_gather_s,
    all_reduce_s,
    all_reduce_times,
    all_to_all_s,
    machine_of,
    nvls_bytes,
    send_s,
)
from lessons.l20_parallelism.planner.scaling import (
    DEGREES,
    StageTime,
    Work,
    all_reduce_s_for,
    best_tp,
    decode_step,
    efficiency,
    in_turn,
    prefill,
    stage_time,
)
from lessons.l20_parallelism.planner.shares import Layout
from lessons.l20_parallelism.processes.collectives import WAYS
from lessons.toolbox.measure.hardware import CHIPS

H100 = CHIPS["h100"]
NVLINK, PCIE = machine_of(H100), machine_of(H100, "pcie5")
LARGE, MIXTRAL = MODELS["llama-3-70b"], MODELS["mixtral-8x7b"]
MIB = 2**20


def by_way(n, size, machine):
    """The best time of each way in µs."""
    times = {}
    for seconds, way in all_reduce_times(n, size, machine):
        times[way] = min(times.get(way, seconds * 1e6), seconds * 1e6)
    return times


@pytest.mark.parametrize(
    "mebibytes, one_shot_us, two_shot_us, nccl_us",
    [
        (0.5, 10, 18, 17),
        (1, 15, 19, 19),
        (1.5, 19, 19, 22),
        (2, 22, 23, 26),
        (3, 30, 25, 31),
        (4, 38, 29, 37),
    ],
)
def test_an_all_reduce_takes_what_others_measured(mebibytes, one_shot_us, two_shot_us, nccl_us):
    """vllm-project/vllm, pull request 24111: four H100, bfloat16. Its columns ca_1stage,
    symm_mem_two_shot and pynccl. NCCL has trees and a switch that adds, too, so it may beat a ring.
    """
    times = by_way(mebibytes * MIB, 4, NVLINK)
    assert times["one_shot"] == pytest.approx(one_shot_us, rel=0.15)
    assert times["two_shot"] == pytest.approx(two_shot_us, rel=0.15)
    assert nccl_us * 0.95 < times["ring"] < nccl_us * 1.5


@pytest.mark.parametrize(
    "mebibytes, nvls_us", [(0.5, 16), (1, 18), (1.5, 21), (2, 23), (3, 28), (4, 33)]
)
def test_a_switch_that_adds_takes_what_others_measured(mebibytes, nvls_us):
    """The column symm_mem_multimem of the same table. Its times have copies into the shared buffer
    and out of it, too. With four GPUs two shots are as fast there: 29 µs for 4 MiB.
    """
    times = by_way(mebibytes * MIB, 4, machine_of(H100, "nvls4"))
    assert times["nvls"] == pytest.approx(nvls_us, rel=0.2)


def test_a_switch_that_adds_sends_fewer_bytes_from_four_gpus_on():
    assert nvls_bytes(8, 8) == 9 and WAYS["ring"].bytes_sent(8, 8) == 14
    assert nvls_bytes(3, 3) == WAYS["ring"].bytes_sent(3, 3) == 4
    assert nvls_bytes(2, 2) > WAYS["ring"].bytes_sent(2, 2)
    with_it, without = machine_of(H100, "nvls4"), NVLINK
    assert set(by_way(MIB, 8, with_it)) - set(by_way(MIB, 8, without)) == {"nvls"}
    assert all_reduce_s(10e9, 8, with_it) == pytest.approx(9 / 8 * 10e9 / 450e9, rel=0.01)
    # few bytes still go in one shot, and between boxes there is no such switch
    assert all_reduce_s(16384, 8, with_it) == all_reduce_s(16384, 8, without)
    assert all_reduce_s(10e9, 16, with_it) == all_reduce_s(10e9, 16, without)


def test_the_best_way_depends_on_the_bytes():
    """Few bytes: one shot. Many: the ways that send the fewest."""
    small, large = by_way(16 * 1024, 8, NVLINK), by_way(256 * MIB, 8, NVLINK)
    assert min(small, key=small.get) == "one_shot"
    assert min(large, key=large.get) in ("two_shot", "ring")
    assert large["two_shot"] < large["one_shot"] / 3
    assert set(by_way(MIB, 2, PCIE)) == set(WAYS)
    assert set(by_way(MIB, 4, PCIE)) == {"ring", "doubling"}
    assert set(by_way(MIB, 16, NVLINK)) == {"ring"}


def test_large_messages_go_at_the_bandwidth_and_small_ones_at_the_latency():
    n = 10e9
    assert all_reduce_s(n, 8, NVLINK) == pytest.approx(2 * 7 / 8 * n / 450e9, rel=0.01)
    assert all_gather_s(n, 8, NVLINK) == pytest.approx(7 / 8 * n / 450e9, rel=0.01)
    assert all_to_all_s(n, 8, NVLINK) == pytest.approx(7 / 8 * n / 450e9, rel=0.01)
    # 32 GPUs in 4 boxes: three quarters leave the box over 50 GB/s
    assert all_to_all_s(n, 32, NVLINK) == pytest.approx(24 / 32 * n / 50e9, rel=0.01)
    # 16 GPUs in 2 boxes: each carries an eighth of what a ring sends between the boxes
    assert all_reduce_s(n, 16, NVLINK) == pytest.approx(2 * 15 / 16 * n / 400e9, rel=0.01)
    assert send_s(n, LINKS["pcie4"]) == pytest.approx(n / 32e9, rel=0.01)
    assert 6e-6 < all_reduce_s(8, 8, NVLINK) < 8e-6 < all_reduce_s(8, 8, PCIE)
    # 30 steps, of which 2 are between the boxes
    assert all_reduce_s(8, 16, NVLINK) == pytest.approx(6.6e-6 + 28 * 0.6e-6 + 2 * 2.7e-6, rel=0.01)
    assert all_reduce_s(n, 1, NVLINK) == all_gather_s(n, 1, PCIE) == all_to_all_s(n, 1, PCIE) == 0


@pytest.mark.parametrize("name", LINKS)
def test_links_say_where_their_figures_are_from(name):
    link = LINKS[name]
    assert "data sheet" in link.source and "tuning.cc" in link.source
    assert 0 < link.ll_hop_s < link.bulk_hop_s < 1e-4 and 1e10 < link.bytes_per_s < 1e12


def test_machines_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="between: got 'rope'; accepted: one of nvlink3"):
        machine_of(H100, between="rope")
    with pytest.raises(ValueError, match="gpus_per_box: got 0"):
        machine_of(H100, gpus_per_box=0)
    with pytest.raises(ValueError, match="size: got 0"):
        all_reduce_s(1, 0, NVLINK)
    assert machine_of(CHIPS["l40s"]).inside.name == "PCIe 4 x16"


# ---------------------------------------------------------------- scaling


def decode_steps(machine, batch=1, context=4096, degrees=DEGREES):
    return [decode_step(LARGE, machine, Layout(tp=tp), batch, context) for tp in degrees]


def test_tensor_parallelism_stops_paying_at_the_edge_of_the_box():
    steps = decode_steps(NVLINK)
    assert best_tp(steps) == 8 and efficiency(steps)[0] == 1
    shares = efficiency(steps)
    assert shares == sorted(shares, reverse=True)
    assert shares[3] > 0.75 and shares[4] < 0.5  # 16 GPUs are two boxes
    in_one_box = machine_of(H100, gpus_per_box=16)
    assert best_tp(decode_steps(in_one_box)) == 16
    assert all(a > b for a, b in zip(shares[1:], efficiency(decode_steps(PCIE))[1:]))


def test_a_prefill_needs_the_bandwidth_more():
    """8192 tokens: over PCIe eight GPUs are not twice as fast as one."""
    fast, slow = (
        [prefill(LARGE, machine, Layout(tp=tp), 8192) for tp in (1, 8)]
        for machine in (NVLINK, PCIE)
    )
    assert fast[0].seconds / fast[1].seconds > 5
    assert slow[0].seconds / slow[1].seconds < 2


def test_eighty_eight_percent_is_not_linear():
    """What 88 % at 8 GPUs allows each of the 161 all-reduces of a 70B step, and that it is of the
    size of what they take.
    """
    step = decode_steps(NVLINK, degrees=(8,))[0]
    allowed = all_reduce_s_for(0.88, step.floor_s, 161)
    assert 161 * allowed / step.floor_s == pytest.approx(12 / 88)
    assert allowed < all_reduce_s(2 * LARGE.hidden_size, 8, NVLINK) < 2 * allowed


def test_messages_are_counted_layer_by_layer():
    """Two sums a layer, one for the embedding, and a gather of logits."""
    step = decode_step(LARGE, NVLINK, Layout(tp=8), 4, 1024)
    sum_s = all_reduce_s(4 * 8192 * 2, 8, NVLINK)
    gather_s = all_gather_s(4 * 128256 * 2, 8, NVLINK)
    assert step.communication_s == pytest.approx(161 * sum_s + gather_s)
    assert decode_step(LARGE, NVLINK, Layout(dp=8), 4, 1024).communication_s == 0


def test_tokens_travel_to_experts_only_where_replicas_share_them():
    """Mixtral on 4 GPUs: with EP4 under DP4 every token goes to 2 experts and back, twice a
    layer.
    """
    apart = decode_step(MIXTRAL, NVLINK, Layout(dp=4), 8, 1024)
    shared = decode_step(MIXTRAL, NVLINK, Layout(dp=4, ep=4), 8, 1024)
    travel_s = all_to_all_s(8 * 4096 * 2 * 2, 4, NVLINK)
    assert apart.communication_s == 0
    assert shared.communication_s == pytest.approx(32 * 2 * travel_s)
    # 32 tokens meet, so all 8 experts are read, but a GPU reads its 2 only
    assert shared.floor_s < 0.4 * apart.floor_s


@pytest.mark.parametrize("ep", [1, 4])
def test_experts_do_the_same_work_wherever_they_are(ep):
    """Per GPU as many FLOPs for experts that are cut as for whole ones, in the mean."""
    work = Work.decode(8, 1024)
    cut = stage_time(MIXTRAL, NVLINK, Layout(tp=4), 0, work).floor.flops
    assert stage_time(MIXTRAL, NVLINK, Layout(tp=4, ep=ep), 0, work).floor.flops == pytest.approx(
        cut
    )
    alone = stage_time(MIXTRAL, NVLINK, Layout(dp=4), 0, work).floor.flops
    assert stage_time(MIXTRAL, NVLINK, Layout(dp=4, ep=ep), 0, work).floor.flops == pytest.approx(
        alone
    )


def test_stages_share_the_cache_of_a_long_context():
    """One stage reads all K and V of 32 sequences; four read a quarter each, at the same time."""
    one, four = (decode_step(LARGE, NVLINK, Layout(pp=pp), 32, 32768) for pp in (1, 4))
    assert four.seconds < 0.6 * one.seconds
    assert four.idle_s < 0.2 * four.seconds


def test_micro_batches_in_turn_take_what_the_schedule_says():
    """Held against pipeline.py's schedule of the same times."""
    for _ in range(10):
        time, count = random.uniform(1, 2), random.randint(1, 7)
        times = [StageTime(calc.Floor(0, 0, 1, 1), time)] * random.randint(1, 5)
        stages = [time] * len(times)
        once = max(piece.end for piece in schedule(stages, count))
        assert in_turn(times, count, come_back=False).seconds == pytest.approx(once)
        before, after = (max(p.end for p in schedule(stages, count, steps)) for steps in (20, 21))
        assert in_turn(times, count, come_back=True).seconds == pytest.approx(after - before)
