"""What a failure says about its cause: hints for results, for exceptions, and how often there is
one.
"""

import pytest
import torch

from lessons.toolbox.exercises.exercise import all_exercises
from lessons.toolbox.exercises.parts import hints_of
from lessons.toolbox.kernels.order import program_order
from lessons.toolbox.measure.device import interpreting
from tests.exercises.checking import assert_entries, assert_equal, check, compare, comparing
from tests.exercises.hint_rules import hint_of_exception, hint_of_message, hint_of_refusal
from tests.exercises.hinting import FIRST, all_hints
from tests.exercises.hints import hint_of_failure
from tests.exercises.running import (
    case_hint,
    checks_of,
    explained,
    forget_outcomes,
    general_hint,
    hint_for,
    run_check,
)
from tests.exercises.wrong import answers_of

GRID = torch.arange(12.0).reshape(3, 4) ** 1.5 + 1
LINE = torch.tensor([0.5, 0.3, 0.2])


def hint(got, want, **numbers):
    return hint_of_failure("", [(got, want)], numbers) or ""


# ---------------------------------------------------------------- by the result


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda x: x.where(x > 1, torch.nan), "NaN at element [0, 0]"),
        (lambda x: x / 0, "infinity everywhere"),
        (lambda x: x * 0, "0 everywhere"),
        (lambda x: x * 0 + 3, "3 everywhere"),
        (lambda x: -x, "the other sign"),
        (lambda x: x / 2, "1/2 of the expected one"),
        (lambda x: x + 5, "5 too large everywhere"),
        (lambda x: x.roll(1, 0), "index 0 of dimension 0 holds what belongs at index 2"),
        (lambda x: x.flip(1), "index 0 of dimension 1 holds what belongs at index 3"),
        (lambda x: torch.cat([x[:2], x[2:] ** 2]), "at the last index of dimension 0"),
        (lambda x: torch.cat([x[:, :1], x[:, 1:] ** 2], 1), "from index 1 on of dimension 1"),
        (lambda x: torch.cat([x[:2], 0 * x[2:]]), "yours is 0 there"),
        (lambda x: x * torch.linspace(0.99, 1.001, 12).view(3, 4), "nearly right"),
        (lambda x: x + x.sqrt(), "too large, none is too small"),
        (lambda x: x[0], "dimensions where 2 are asked for"),
        (lambda x: x.T, "in another order"),
        (lambda x: x[None], "size 1 too many"),
        (lambda x: x[:, :3], "dimension 1 has 3 entries and needs 4"),
    ],
)
def test_what_stands_out_in_a_tensor(spoil, said):
    assert said in hint(spoil(GRID), GRID)


def test_near_zero_is_not_right_up_to_a_rounding():
    want = torch.tensor([0.0, 0.3, 0.7], dtype=torch.float64)
    assert "0 itself is expected at element [0]" in hint(want.float().clamp(min=1e-8), want)
    assert "right up to a rounding" in hint(want * (1 + 1e-6), want)


def test_one_value_that_is_too_large_is_no_difference_of_all():
    want = torch.tensor([1e-8, 0.3, 7.1, 0.2, 3.9], dtype=torch.float64)
    assert "everywhere" not in hint(want.float().clamp(min=1e-5), want)


def test_values_that_are_there_twice_are_at_no_wrong_place():
    assert "wrong places" not in hint(torch.tensor([[0, 0, 0]]), torch.tensor([[0, 1, 1]]))


def test_a_square_that_is_transposed():
    assert "right when dimensions 0 and 1 are swapped" in hint(GRID[:, :3].T, GRID[:, :3])


@pytest.mark.parametrize(
    "got, want, said",
    [
        (torch.tensor([0.5, 0.3, 0.3]), LINE, "sums to 1.1"),
        (torch.tensor([True, True]), torch.tensor([True, False]), "allows 1 too many"),
        (torch.tensor([False, False]), torch.tensor([True, False]), "forbids 1 too many"),
        (torch.tensor([0.0, -1e9]), torch.tensor([0.0, -torch.inf]), "an infinity is expected"),
    ],
)
def test_probabilities_and_masks(got, want, said):
    assert said in hint(got, want)


@pytest.mark.parametrize(
    "got, want, said",
    [
        (7, 8, "one less"),
        (9, 8, "one more"),
        (0, 8, "yours is 0"),
        (3, 0, "0 is expected"),
        (1, 0, "0 is expected"),
        (-8.5, 8.5, "the other sign"),
        (1.048576, 1.0, "MB and MiB"),
        (12.5, 100.0, "bits and bytes"),
        (0.37, 0.63, "1 minus"),
        (-3.0, 0.63, "between 0 and 1"),
        (0.8, 1.25, "1 divided by"),
        (99.5, 100.0, "nearly right"),
        (float("nan"), 1.0, "0 / 0"),
        ([1, 2], [1, 2, 3], "ends too early: 2 of 3"),
        ([1, 2, 3], [1, 2], "goes on after the 2"),
        ([], [1, 2], "empty"),
        (["a"], [], "nothing is expected"),
        (([1, 2, 5], 1), ([1, 2, 4], 1), "only entry 0 is wrong"),
        (([1.5, 99.5], 1.0), ([1.5, 100.0], 1.0), "only entry 0 is wrong: yours is nearly right"),
        ([2, 1], [1, 2], "another order: reversed"),
        ([3, 4, 9], [2, 3, 8], "each entry is 1 too large"),
        ([1, 9, 3], [1, 2, 3], "only entry 1 is wrong"),
        ((1.5, 3.0), (1.5, 6.0), "only entry 1 is wrong"),
        ({1: "a"}, {1: "a", 2: "b"}, "lacks 2"),
        ({1, 3}, {1}, "has 3 too many"),
        ({1: 5, 2: 6}, {1: 5, 2: 7}, "only the values of 2 are wrong"),
    ],
)
def test_what_stands_out_in_numbers_and_lists(got, want, said):
    assert said in hint(got, want)


@pytest.mark.parametrize("got, want", [([1, 2], (1, 2)), (([(1, 2)], 3), ([[1, 2]], 3))])
def test_a_list_for_a_tuple_is_not_in_another_order(got, want):
    """Nor is any entry of it wrong."""
    with pytest.raises(AssertionError) as caught:
        assert_equal(got, want)
    said = hint_of_failure(str(caught.value), [(got, want)], {})
    assert said.startswith("the docstring promises a "), said


def test_a_factor_is_one_of_the_numbers_given():
    assert "36 times (num_layers?)" in hint(7200.0, 200.0, num_layers=36)
    assert "1/8 of (the root of q.shape[1]?)" in hint(GRID / 8, GRID, **{"q.shape[1]": 64})
    assert "1000 too large: prompt?" in hint(1041, 41, prompt=1000)
    assert "5 times the expected value" in hint(200.0, 40.0, seconds=5, slo=5)  # which of them?
    assert "root" not in hint(96, 192, count=4)  # 2 is everywhere
    assert "layers" not in hint(4.768, 1.768, layers=3)  # a difference says something of counts


@pytest.mark.parametrize("got, want", [(GRID.sin(), GRID.cos()), ([5, 9], [7, 2])])
def test_where_nothing_stands_out_nothing_is_said(got, want):
    """Of ids, one more is another one: no word on counting."""
    assert hint(got, want) == "" and hint([17], [18]) == ""


# ---------------------------------------------------------------- by the exception

LEARNERS = """
import torch

def first(x, window=2):
    scores = x[:, :2]
{body}
"""


def outcome(tmp_path, body, checks=None):
    path = tmp_path / "mine.py"
    path.write_text(LEARNERS.format(body=f"    {body}"))
    namespace = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)

    def values(impl, seed):
        compare(impl, {"x": torch.ones(3, 5)}, torch.ones(3, 5))

    (this,) = check("2.1")(values).checks.values()
    return run_check(this, lambda: namespace["first"], 0, path)


@pytest.mark.parametrize(
    "line, said",
    [
        ("return x + scores", "have 5 and 2 entries in dimension 1"),
        ("return x @ x", "summed over has to be equal"),
        ("return x[3]", "3 entries have the indices 0 to 3 - 1"),
        ("return x[:, 0, 0]", "the tensor has 2 dimensions"),
        ("return x[:0][0]", "something is empty there"),
        ("return x[-4]", "3 entries have the indices 0 to 3 - 1"),
        ("return [1][window]", "the list is shorter"),
        ("return {}[window]", "2 is not in the dictionary"),
        ("return x.view(7, 2)", "a view keeps the number of elements: [7, 2]"),
        ("return x.T.view(15)", "not contiguous"),
        ("return x if x > 0 else -x", "need one truth value"),
        ("return window / 0", "can be 0"),
        ("return None + window", "is None"),
        ("return wrong", "`wrong` has no value"),
        ("a, b = window, 1, 2", "has 2 names"),
        ("return torch.cat([x, x.T])", "same shape, but for the dimension"),
        ("return x.masked_fill(0, x > 1)", "PyTorch refuses what `masked_fill`"),
        ("x[:] = 0; return x", "put the result into a new tensor"),
        ("pass", "end without `return`"),
        ("return x.double()", "Convert the result at the end: .to(torch.float32)"),
    ],
)
def test_an_exception_is_explained(tmp_path, line, said):
    failure = outcome(tmp_path, line)
    assert said in (general_hint(failure) or ""), failure.message


def test_a_refusal_of_ones_own_is_no_refusal_of_the_course():
    where = "exercises/l20_parallelism.py, line 9: ValueError: size: got 4; accepted: 2"
    assert "your own line raises this ValueError" in hint_of_refusal(
        f"{where}: `raise ValueError(`"
    )
    assert hint_of_refusal(f"{where}: `pool.take(4)`") is None


def test_a_kernel_that_loads_nothing_is_not_told_to_load_less():
    said = hint_of_message("gemv[one_group]: your kernel loads elements of packed 0 times")
    assert said.startswith("nothing of `packed` is loaded by a kernel")


@pytest.mark.parametrize(
    "message, said",
    [
        ("your kernel `k` uses `np`, which no compiler knows, so", "`np` is Python's"),
        ("your kernel `k` uses `import numpy`, which no compiler knows", "`numpy` is Python's"),
        ("your kernel `k` uses `.handle`, which no compiler knows", "`.handle` is there in the"),
        ("your kernel `k` uses `SHIFT`, which no compiler knows", "make it tl.constexpr"),
        ("your answer reads numbers by a tensor's `numpy`: the kernel has to compute them", "only"),
        ("your kernel leaves out 5 of 20 elements of x, expected each", "which program is to load"),
        ("program 0 loads 7 elements outside the tensors", "which rows and columns are not there"),
        ("your kernel loads elements of `x` 2 times; once is enough", "load the same place of `x`"),
        ("nothing_is_sorted: sorted sorts: find the threshold by its bits", "at or above a number"),
        ("your function launches 3 kernels, and one is enough", "tl.program_id is the number"),
        (
            "refuses[3]: your function gave 4 heads to 3 ranks; raise ValueError that names size",
            "raise ValueError with `size` in its message",
        ),
        ("calls_are_few_and_small: 30 calls, expected 20 at most", "find nothing that another"),
    ],
)
def test_a_rule_that_is_broken_is_explained(message, said):
    assert said in hint_of_message(message)


def test_right_entries_in_another_order_are_seen_where_each_has_a_label():
    comparing.clear()
    with pytest.raises(AssertionError, match="the bytes is 3, expected 240"):
        assert_entries((320, 3, 240), (320, 240, 3), ("all", "the bytes", "the sequences"))
    said = hint_of_failure("", list(comparing), {})
    assert said == "the right entries in another order, from entry 1 on"
    comparing.clear()


def test_a_bare_index_error_names_all_that_is_needed(tmp_path):
    """The exercise, the line, the shapes, a hint."""
    failure = outcome(tmp_path, "return x[scores.shape[0]]")
    text = explained(failure, all_exercises("2.1")[0], None, None)
    where, given, values, said = text.splitlines()
    assert "mine.py, line 6: IndexError: index 3 is out of bounds" in where
    assert given.strip() == "exercise 2.1 was given: x [3, 5] float32"
    assert values.strip() == "in that line: x [3, 5] float32, scores [3, 2] float32"
    assert said.strip().startswith("hint: 3 entries have the indices")


@pytest.mark.parametrize("distance, said", [(64, "which lanes"), (8589934464, "32 bits")])
def test_out_of_bounds_far_away_is_no_mask(distance, said):
    """As the machinery of bounds says it."""
    message = f"the kernel read out of bounds: 1 of 8 addresses, {distance} bytes before the start"
    assert said in hint_of_exception(f"OutOfBounds: {message} of `v_ptr`")


def test_a_line_is_named_where_the_check_speaks(tmp_path):
    """A rule that is broken in the learner's code, not in what it returns."""
    namespace = {}
    path = tmp_path / "mine.py"
    path.write_text("def first(device):\n    device.start(1)\n")
    exec(compile(path.read_text(), str(path), "exec"), namespace)

    class Device:
        def start(self, n):
            assert n == 0, "start at 0"

    def starts(impl, seed):
        impl(Device())

    (this,) = check("2.1")(starts).checks.values()
    failure = run_check(this, lambda: namespace["first"], 0, path)
    assert failure.message == "starts: start at 0"
    assert "mine.py, line 2: `device.start(1)`" in failure.place


def test_without_a_hint_the_first_one_of_the_exercise_is_shown(tmp_path):
    entry = all_exercises("2.1")[0]
    torch.manual_seed(3)
    failure = outcome(tmp_path, "return torch.randn(3, 5)")
    assert general_hint(failure) is None
    assert explained(failure, entry, None, None).splitlines()[-1].strip() == (
        f"hint 1 of 3: {hints_of(entry)[0]}"
    )
    assert "hint 1" not in explained(failure, entry, "You forgot it.", None)


@pytest.mark.parametrize("entry", all_exercises(), ids=lambda entry: entry.id)
def test_an_exercise_has_three_hints(entry):
    assert len(hints_of(entry)) == 3


def test_a_case_that_fails_alone():
    def counts(impl, case, seed):
        assert_equal(impl(int(case)), int(case))

    cases = {"1": "one", "2": "two", "3": "an odd one"}
    checks = list(check("2.1", cases=cases)(counts).checks.values())
    mine = lambda x: x if x < 3 else 0
    assert case_hint(checks[2], mine, checks) == "it passes for 1, 2; not for 3: an odd one"
    assert case_hint(checks[2], lambda x: 0, checks) is None


# ---------------------------------------------------------------- how often


@pytest.mark.parametrize("lesson", ["01", "13", "16", "24"])
def test_three_of_four_failures_have_a_hint_of_their_own(lesson):
    """Of the wrong answers of a lesson, each as if nobody had registered it."""
    found = all_hints(lesson)
    own = [hinted for hinted in found if hinted.kind != FIRST]
    assert len(found) > 30 and len(own) >= 0.75 * len(found), f"{len(own)} of {len(found)}"


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: kernels are compiled here")
def test_a_slip_is_known_in_any_order_of_programs():
    """Which program leaves its tensors first depends on the order, and so does what the error
    says.
    """
    (entry,) = (entry for entry in all_exercises("23") if entry.id == "23.1")
    (slip,) = (a for a in answers_of("23").wrong_for("23.1") if a.name == "pair_as_a_row")
    this = next(one for one in checks_of(entry) if one.name == "rows[two_tiles]")
    for order in range(6):
        forget_outcomes()
        with program_order(order):
            found = hint_for(this, lambda **given: slip.function(**given), [slip], [this])
        assert found == slip.hint, order
