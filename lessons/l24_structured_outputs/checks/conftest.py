"""The embedded model's tokenizer and its vocabulary, which several tests share."""

import pytest

from lessons.l24_structured_outputs.vocabulary import Vocabulary, bytes_of_tokens
from lessons.toolbox.model.checkpoint import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """Of the embedded model."""
    return load_tokenizer("models/tiny")


@pytest.fixture(scope="session")
def vocabulary(tokenizer):
    """The bytes of its tokens."""
    return Vocabulary(bytes_of_tokens(tokenizer, len(tokenizer)))
