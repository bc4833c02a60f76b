"""The time model: what a hand works out for a few instructions, and the record of its errors."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.gpu.arguments import WATCHERS
from lessons.toolbox.gpu.counters import counting
from lessons.toolbox.gpu.ptx import Instruction, Line
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.profile import measured, points
from lessons.toolbox.profile.counted import KernelProfile
from lessons.toolbox.profile.engines import Flag, SMWithEngine
from lessons.toolbox.profile.figure import model_figure
from lessons.toolbox.profile.replay import CONSTANTS, Cost, Unpredicted, cost_of
from lessons.toolbox.profile.time_model import predict
from tests.toolbox.gpu.running import run

LOAD = "ld.global.u64 %rd{to}, [%rd{of}];\n"


def profile_of(body: str, size: int = 1 << 16, **options) -> KernelProfile:
    with counting():
        done = run(body, [np.zeros(size, np.uint8)], **options)
    found = KernelProfile(done.kernel, lookup("h200"), done.grid, done.warps, done.shared_bytes)
    found.add(done)
    return found


def clocks(body: str, **options) -> float:
    return predict(profile_of(body, **options)).clocks


def test_loads_that_depend_on_each_other_wait_for_each_other():
    apart = "".join(LOAD.format(to=k, of=30).replace("]", f"+{1024 * k}]") for k in range(1, 5))
    chain = "".join(
        LOAD.format(to=k, of=k - 1 if k > 1 else 30).replace("]", f"+{1024 * k}]") + back(k)
        for k in range(1, 5)
    )
    more = clocks(chain) - clocks(apart)
    assert more == pytest.approx(3 * CONSTANTS.memory, rel=0.1)


def back(k: int) -> str:
    """The address again, because the machine's buffer holds zeros."""
    return f"add.u64 %rd{k}, %rd{k}, %rd30;\n"


def test_a_second_load_of_the_same_bytes_comes_from_a_cache():
    body = LOAD.format(to=1, of=30) + back(1) + LOAD.format(to=2, of=1)
    far = body.replace("[%rd1]", "[%rd1+4096]")
    assert clocks(far) - clocks(body) == pytest.approx(CONSTANTS.memory - CONSTANTS.l1, rel=0.05)


@pytest.mark.parametrize("step, passes", [(4, 1), (8, 2), (128, 32)])
def test_bank_conflicts_cost_a_clock_a_pass(step, passes):
    body = f"mul.lo.u32 %r1, %r70, {step};\n" + 20 * "st.shared.b32 [%r1], %r70;\n"
    ours = clocks(body, shared=8192) - clocks(body.replace(f", {step};", ", 4;"), shared=8192)
    # because a few are hidden while the code itself arrives
    assert ours == pytest.approx(20 * (passes - 1), abs=passes + 2)


def test_a_barrier_waits_for_the_last_warp():
    work = "setp.lt.u32 %p1, %r70, 32;\n@!%p1 bra SKIP;\n" + 50 * "add.u32 %r1, %r70, 1;\n"
    work += "SKIP:\nbar.sync 0;\n"
    rest = 50 * "mul.lo.u32 %r2, %r70, 3;\n"
    both, first, second = clocks(work + rest, threads=64), clocks(work), clocks(rest)
    assert both > 0.95 * (first + second - CONSTANTS.start)


def test_programs_that_do_not_fit_run_in_waves():
    body = "mul.wide.u32 %rd1, %r70, 4;\n" + 40 * "mul.lo.u32 %r1, %r70, 3;\n"
    small, large = (predict(profile_of(body, grid=132 * n)).clocks for n in (32, 96))
    assert large == pytest.approx(3 * small, rel=0.01)


def test_bandwidth_is_shared_and_latency_is_not():
    """132 SMs that load 512 bytes a warp wait for memory's latency; with 64 warps each they are
    limited by its rate.
    """
    body = "mad.lo.u32 %r1, %r71, %r72, %r70;\nmul.wide.u32 %rd1, %r1, 16;\n"
    body += "add.u64 %rd1, %rd1, %rd30;\n"
    body += "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1];"
    few, many = (
        profile_of(body.replace("%r72", str(threads)), size=16 * 132 * threads, grid=132,
                   threads=threads)
        for threads in (32, 1024)
    )  # fmt: skip
    assert predict(few).limit == "latency"
    waited = CONSTANTS.start + CONSTANTS.memory
    rate = CONSTANTS.memory_share * 4.8e12 / 132 / lookup("h200").clock_hz
    assert predict(many).clocks - waited == pytest.approx(1024 * 16 / rate, rel=0.15)


FLAG = """
setp.eq.u32 %p1, %r70, 0;
@%p1 mbarrier.init.shared::cta.b64 [0], {arrivals};
bar.sync 0;
setp.lt.u32 %p2, %r70, 32;
@!%p2 bra WAIT;
{work}
@%p1 mbarrier.arrive.shared::cta.b64 _, [0];
ret;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [0], {parity};
@!%p3 bra WAIT;
{rest}
"""


def flag_clocks(work: int, rest: int, parity: int = 0) -> float:
    """Of two warps: one does some work and arrives, the other waits for it and does the rest."""
    counted = 10 * "mul.lo.u32 %r1, %r70, 3;\n"
    body = FLAG.format(arrivals=1 + parity, work=work * counted, rest=rest * counted, parity=parity)
    return clocks(body, threads=64, shared=64)


def test_a_warp_waits_at_an_mbarrier_until_the_other_has_arrived():
    short = flag_clocks(1, 1)
    assert flag_clocks(11, 11) - short == pytest.approx(2 * (flag_clocks(11, 1) - short), rel=0.1)
    # a wait for parity 1 passes while the first phase is incomplete, so both go on side by side
    beside = flag_clocks(11, 11, parity=1) - flag_clocks(1, 1, parity=1)
    assert beside == pytest.approx(flag_clocks(11, 1) - short, rel=0.1)


def test_a_barrier_of_some_warps_holds_no_others():
    """Two warps meet at barrier 2. The third, which works for long, is not waited for."""
    body = "setp.lt.u32 %p1, %r70, 64;\n@!%p1 bra LONG;\nbar.sync 2, 64;\n"
    body += 20 * "mul.lo.u32 %r1, %r70, 3;\n" + "ret;\nLONG:\n{}"
    long = 100 * "mul.lo.u32 %r1, %r70, 3;\n"
    alone = clocks("setp.lt.u32 %p1, %r70, 64;\n@%p1 ret;\n" + long, threads=96)
    assert clocks(body.format(long), threads=96) == pytest.approx(alone, rel=0.1)


def test_the_copy_engine_shares_the_bandwidth_and_fills_shared_memory():
    """Ten tiles take their bytes over the rate of L2; each also takes passes of shared memory."""
    flag = Flag(expected=1, left=1)
    cost = Cost("load/store", 1, CONSTANTS.l2, (), (), kind="engine")
    sm = SMWithEngine([], CONSTANTS, l2_rate=32.0, memory_rate=32.0)
    sm.flags, sm.arriving = {}, []
    for _ in range(10):
        sm.act(cost, flag, "copy", 1, 8192, 0.0)
    assert not flag.phases and flag.bytes == -81920
    sm.act(cost, flag, "expect", 1, 81920, 0.0)
    assert flag.phases == 1 and flag.done == pytest.approx(81920 / 32 + CONSTANTS.l2)
    assert sum(passes for _, passes in sm.arriving) == 81920 / 128


def test_a_product_waits_for_its_operands():
    """64 passes of operands hold a matrix unit whose product takes 32 clocks."""
    cost = Cost("matrix", 32, CONSTANTS.matrix, (), (), kind="product", passes=64)
    found = []
    for passes in (16, 64):
        sm = SMWithEngine([replace(cost, passes=passes)], CONSTANTS, 32.0, 32.0)
        found.append(sm.run([[(np.zeros(20, dtype=int), {})]]))
    assert found[1] - found[0] == pytest.approx(20 * 32, rel=0.05)


def test_tensor_memory_is_not_predicted():
    instruction = Instruction("tcgen05", ("wait::ld",), (), None, False, Line(), "tcgen05.wait::ld")
    with pytest.raises(Unpredicted, match="tensor memory"):
        cost_of(instruction, {}, 100, CONSTANTS)


@pytest.mark.parametrize(
    "grid, samples, warned",
    [
        ((16, 90, 1), 6, True),  # 0, and then the last of each row: tiles that no expert uses
        ((16, 90, 1), 5, False),
        ((16, 91, 1), 6, False),
        ((32, 64, 1), 5, True),
        ((3, 16, 25), 6, True),
        ((1, 3, 25), 6, True),
        ((90, 1, 1), 6, False),
        ((1, 90, 1), 6, False),
        ((2, 1, 1), 6, False),  # all of them run
    ],
)
def test_a_sample_that_meets_one_index_is_told(grid, samples, warned, monkeypatch):
    monkeypatch.setattr(points, "SAMPLE", samples)

    def call():
        done = run("mov.u32 %r1, %r70;", [np.zeros(64, np.uint8)], grid=grid)
        for watch in list(WATCHERS):
            watch(done)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        points.profiled_sample(call)
    assert [x for x in told if "one index in the first dimension" in str(x.message)] == told
    assert bool(told) == warned


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(points.RECORD.read_text(encoding="utf-8"))


def test_the_record_says_what_its_points_say(record):
    found = points.summary(record["table"])
    assert found == {name: record[name] for name in found}
    benchmarks = {p["source"] for p in record["table"]} - {"counters.json"}
    assert record["points"] >= 20 and len(benchmarks) >= 5


def test_the_points_are_those_of_the_measurements(record):
    """Every measured time of the table is in the record that it names."""
    times = {(f"{p.record}.json", f"{p.series}, {p.x}"): p.measured_s for p in points.larger()}
    for point in record["table"]:
        if point["source"] != "counters.json":
            assert point["measured_s"] == times.pop((point["source"], point["name"]))
    assert not times, "a point of the table was not predicted"


def test_the_launches_are_those_that_the_gpu_counted(record):
    """But for functions whose kernel is another today."""
    mine = [
        (point["lesson"], point["name"], point["measured_s"])
        for point in record["table"]
        if point["source"] == "counters.json"
    ]
    assert mine == [
        (each["lesson"], f"{each['function']}: {each['kernel']}", each["duration_s"])
        for each in sorted(measured.measured(), key=lambda each: each["lesson"])
        if (each["lesson"], each["function"]) not in measured.REPLACED
    ]


def test_the_model_is_as_good_as_the_course_says(record):
    everything = record["errors"]["all"]
    assert everything["median"] <= 0.15
    assert record["pairs_right"] >= 0.9 * record["pairs"]


def test_the_figure_has_a_mark_for_each_point(record):
    figure = model_figure(record)
    assert sum(len(marks.get_offsets()) for marks in figure.axes[0].collections[1:]) == len(
        record["table"]
    )
    assert not texts_outside(figure) and not overlapping_texts(figure)
