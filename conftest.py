"""Kernels run in the interpreter where there is no GPU, and a test that needs a GPU says so instead
of passing.
"""

import gc
import os
from collections import Counter

import pytest

# first, because it decides how Triton runs before any test imports Triton
import lessons  # noqa: F401
from lessons.toolbox.gpu import nvrtc

# also mends the interpreter for kernels that tests declare themselves
from lessons.toolbox.kernels.triton_ import TritonMissing
from lessons.toolbox.measure.device import has_gpu, has_triton

# what commands print is compared in English, whatever language the machine speaks
os.environ["INFERENCE_LADDER_LANG"] = "en"

# the `proof` fixture, through which a test of equivalence records its proof; --since REVISION; the
# random numbers of a run; what tests cost; --quick, which draws by it
OURS = ("since", "seeds", "seconds", "sample")
pytest_plugins = ["lessons.toolbox.proof.record", *(f"tests.{name}" for name in OURS)]


@pytest.fixture
def interpreted_films(monkeypatch):
    """Films stay Triton's interpreter's, for tests of what is drawn, because those of compiled code
    come from another process.
    """
    monkeypatch.setattr("lessons.toolbox.draw.film_panels.compiled", lambda film, launches: film)


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="the long forms of the tests too (make test-all)"
    )


def pytest_collection_modifyitems(items):
    missing = {"cuda_cpp": nvrtc.why_not_here(), "gpu": not has_gpu() and "needs a CUDA device"}
    for item in items:
        for marker, why in missing.items():
            if why and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"NOT RUN: {why}"))


def pytest_collection_finish():
    """What was imported and collected stays to the end, so no collection of garbage looks at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Without Triton, as on macOS, a test that needs it is NOT RUN, which is neither a failure nor
    a pass.
    """
    try:
        return (yield)
    except TritonMissing:
        pytest.skip("NOT RUN: needs Triton")
    except ModuleNotFoundError as error:
        if has_triton() or (error.name or "").partition(".")[0] != "triton":
            raise
        pytest.skip("NOT RUN: needs Triton")


def pytest_terminal_summary(terminalreporter):
    reasons = (str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for reason, count in Counter(reason for reason in reasons if "NOT RUN" in reason).items():
        terminalreporter.write_line(
            f"{reason.removeprefix('Skipped: ')} ({count}). A skip has proved nothing."
        )
