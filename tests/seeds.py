"""Where the tests' random numbers come from: one seed a run, from which each test and each shared
fixture has its own.

The seed of a run is new. With `--quick` it is that of the version, the tree that git has at HEAD,
so a run that passed passes again wherever this version is tested, and the next version draws anew.
`LADDER_SEED=7` is that seed; pytest prints the one in force.
"""

import hashlib
import os
import random

import numpy as np
import pytest
import torch

from lessons.toolbox.gpu import rounding
from lessons.toolbox.gpu.arguments import ORDER
from lessons.toolbox.kernels.order import program_order
from tests.since import git

VARIABLE = "LADDER_SEED"


def pytest_configure(config):
    # in the environment, because the processes of a run have to agree
    if not os.environ.get(VARIABLE):
        version = config.getoption("--quick") and git(config.rootpath, "rev-parse", "HEAD^{tree}")
        os.environ[VARIABLE] = version[0][:12] if version else os.urandom(6).hex()
    if not os.environ.get(rounding.VARIABLE):
        rounding.ROUNDING.seed = seed_of("rounding") % 2**16
        os.environ[rounding.VARIABLE] = str(rounding.ROUNDING.seed)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import core

        if core.global_force_seed is None:  # --hypothesis-seed
            core.global_force_seed = seed_of("hypothesis")


def pytest_report_header():
    return f"random numbers: {VARIABLE}={os.environ[VARIABLE]}"


def seed_of(name: str) -> int:
    """The seed of a test or a fixture in this run, below 2^31."""
    digest = hashlib.sha256(f"{os.environ[VARIABLE]} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def sow(name: str) -> None:
    """Seed every generator that a test may draw from."""
    seed = seed_of(name)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    ORDER.seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    sow(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share does not depend on which of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    name = f"{fixturedef.baseid} {fixturedef.argname}[{getattr(request, 'param_index', 0)}]"
    sow(name)
    try:
        return (yield)
    finally:
        sow(request._pyfuncitem.nodeid)  # the test that asked first


@pytest.fixture
def seed(request) -> int:
    """A seed for this test in this run, of PyTorch's and Python's random numbers."""
    value = seed_of(request.node.nodeid)
    torch.manual_seed(value)
    random.seed(value)
    print("seed", value)  # shown by pytest when the test fails
    return value


@pytest.fixture(autouse=True)
def any_program_order(request):
    """Interpreted programs run in a drawn order in each test, because a GPU promises none."""
    value = seed_of(f"order of {request.node.nodeid}")
    print("program order", value)  # shown by pytest when the test fails
    with program_order(value):
        yield
