"""The embedded model's tokenizer and its vocabulary, which several tests share."""

import pytest

from lessons.l24_structured_outputs.lab.testing import embedded_vocabulary
from lessons.toolbox.model.checkpoint import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """Of the embedded model."""
    return load_tokenizer("models/tiny")


@pytest.fixture
def vocabulary():
    """The bytes of its tokens."""
    return embedded_vocabulary()
