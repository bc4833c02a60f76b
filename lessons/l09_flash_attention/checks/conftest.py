"""Fixtures of the tests of Hopper's Gluon kernels."""

import pytest

from lessons.l09_flash_attention.checks.gluon_cases import need_chip, need_no_gpu


@pytest.fixture
def hopper_or_cpu():
    need_chip(90)


@pytest.fixture
def compiled_on_cpu(hopper_or_cpu):
    need_no_gpu()
