"""Predicted times of results/counted beside what no chip can beat, and beside their neighbours."""

import copy

import pytest

from tests.prediction_floors import (
    FLOORS,
    NO_KERNELS,
    RECORDS,
    at,
    below_the_floor,
    record_of,
    seconds,
    times_in,
)

ROOT = RECORDS.parents[1]
WITH_TIMES = {x.name for x in RECORDS.glob("*.json") if any(times_in(record_of(x.name)))}


@pytest.mark.parametrize("name", FLOORS)
def test_no_prediction_is_below_its_floor(name):
    assert not below_the_floor(record_of(name), FLOORS[name])


@pytest.mark.parametrize("name", FLOORS)
def test_every_predicted_time_has_a_floor(name):
    held = [path for path, _ in FLOORS[name](record_of(name))]
    assert sorted(map(str, held)) == sorted(map(str, times_in(record_of(name))))


def test_every_record_with_times_is_held():
    assert {*FLOORS, *NO_KERNELS} == WITH_TIMES


@pytest.mark.parametrize("name", FLOORS)
def test_a_time_below_its_floor_is_told(name):
    """The time that is nearest to its floor, put a hundredth below it."""
    record = copy.deepcopy(record_of(name))
    held = [(path, work) for path, work in FLOORS[name](record) if work.floor_s]
    path, work = max(held, key=lambda one: one[1].floor_s / seconds(record, one[0]))
    at(record, path[:-1])[path[-1]] *= 0.99 * work.floor_s / seconds(record, path)
    assert len(below_the_floor(record, FLOORS[name])) == 1


# ---------------------------------------------------------------- neighbours

# record, path with {} in place of a size, sizes in order, the power of a size that is its work
LARGER = [
    *(
        ("l09_eight_bits.json", ("kernels", kernel, part, "{}", "predicted_s"), (8192, 16384), 2)
        for kernel in ("Triton, 8 bits", "Gluon, 8 bits", "Gluon, 16 bits")
        for part in ("causal", "full")
    ),
    ("l12_latents.json", ("kernels", "Triton", "at", "{}", "predicted_us"), (512, 1024), 1),
    ("l12_latents.json", ("kernels", "Gluon", "at", "{}", "predicted_us"), (1024, 2048), 1),
    *(
        ("l19_latents.json", ("predicted", "{}", form, "predicted_s"), (16, 128), 1)
        for form in ("16 bits", "fp8_ds_mla")
    ),
    *(
        ("l19_block_scaled.json", ("predicted", "{} of 28672 x 4096", form, "seconds"),
         (16, 128, 1024, 8192), 1)
        for form in ("nvfp4", "mxfp4", "fp8", "bf16")
    ),
    ("l27_predicted.json", ("step", "{}", "predicted_s"), (1, 8, 64), 1),
    ("l27_predicted.json", ("prompt", "{}", "predicted_s"), (1024, 4096), 1),
    ("l28_predicted.json", ("32768", "{}", "predicted_s"), (1, 8, 64), 1),
]  # fmt: skip


@pytest.mark.parametrize("name, path, sizes, power", LARGER)
def test_more_work_takes_more_time_and_not_much_more_than_its_share(name, path, sizes, power):
    times = [seconds(record_of(name), tuple(key.format(size) for key in path)) for size in sizes]
    for (size, time), (larger, longer) in zip(zip(sizes, times), [*zip(sizes, times)][1:]):
        assert time < longer < 1.1 * time * (larger / size) ** power


def test_few_rows_of_four_bits_take_about_as_long_as_one():
    """They read the same codes, and 8 rows are multiplied where one is."""
    calls = record_of("l18_tensor_cores.json")["calls"]
    times = {(each["name"], each["matrix"], each["rows"]): each["predicted_s"] for each in calls}
    for (name, matrix, rows), time in times.items():
        assert 0.99 < time / times[name, matrix, 1] < (1.15 if rows <= 8 else 1.3)


def test_a_mask_makes_no_kernel_faster():
    """By the products that it leaves, and but for the last wave, which may be a 32nd of a launch
    without a mask and costs nearly nothing with one.
    """
    for each in record_of("l09_eight_bits.json")["kernels"].values():
        for tokens in ("8192", "16384"):
            assert each["causal"][tokens]["tflops"] <= 1.04 * each["full"][tokens]["tflops"]


# record, where its formats are, the cheaper one, the dearer one
CHEAPER = [
    *(
        ("l19_block_scaled.json", ("predicted", shape), *pair)
        for shape in record_of("l19_block_scaled.json")["predicted"]
        for pair in (("mxfp4", "nvfp4"), ("nvfp4", "fp8"), ("fp8", "bf16"))
    ),
    ("l19_latents.json", ("predicted", "16"), "fp8_ds_mla", "16 bits"),
    ("l19_latents.json", ("predicted", "128"), "fp8_ds_mla", "16 bits"),
    *(
        ("l19_products.json", ("predicted", shape), form, "16-bit cache")
        for shape in record_of("l19_products.json")["predicted"]
        for form in ("products", "numbers")
    ),
    *(
        ("l23_codes.json", (form, tokens), form, "16 bits")
        for form in ("mxfp4", "fp8")
        for tokens in ("16", "2048")
    ),
]
# Of those that take longer all the same: what the lesson says about it.
LONGER = {
    ("l19_latents.json", "128"): "Then codes save memory and no time",
    ("l19_products.json", "numbers"): "Numbers that are made of codes take longer",
    ("l23_codes.json", "2048"): "codes save no time",
}


@pytest.mark.parametrize("name, path, cheaper, dearer", CHEAPER)
def test_a_cheaper_format_takes_no_longer_or_the_lesson_says_why(name, path, cheaper, dearer):
    times = at(record_of(name), path)
    key = "seconds" if "seconds" in times[cheaper] else "predicted_s"
    if times[cheaper][key] > times[dearer][key]:
        (reason,) = (LONGER[name, k] for k in (path[-1], cheaper) if (name, k) in LONGER)
        (more,) = ROOT.glob(f"lessons/{name[:3]}_*/MORE.md")
        assert reason in more.read_text(encoding="utf-8")
