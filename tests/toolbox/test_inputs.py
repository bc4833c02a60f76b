"""Named inputs are what their names say."""

import random

import pytest
import torch

from lessons.toolbox.proof.inputs import (
    ATTENTION_INPUTS,
    DISTRIBUTIONS,
    apart,
    attention_inputs,
    draw,
    edge_lengths,
)

SEED = random.randrange(2**31)


def scores(q, k):
    return torch.einsum("mhd,nhd->hmn", q, k)


@pytest.mark.parametrize("name", ATTENTION_INPUTS)
def test_attention_inputs_have_their_shapes_and_repeat(name):
    q, k, v = attention_inputs(name, 5, 9, 4, 2, 16, dtype=torch.bfloat16, seed=SEED)
    assert q.shape == (1 if name == "one_row" else 5, 4, 16) and k.shape == v.shape == (9, 2, 16)
    assert all(
        x.dtype == torch.bfloat16 and x.isfinite().all() and x.stride(-1) == 1 for x in (q, k, v)
    )
    assert all(x.is_contiguous() == (name != "non_contiguous") for x in (q, k, v))
    again = attention_inputs(name, 5, 9, 4, 2, 16, dtype=torch.bfloat16, seed=SEED)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), again))


def test_attention_inputs_do_what_they_are_for():
    draws = {
        name: attention_inputs(name, 16, 128, 1, 1, 64, seed=SEED) for name in ATTENTION_INPUTS
    }
    scaled = {name: scores(q, k) / 8 for name, (q, k, _) in draws.items()}
    assert scaled["large_logits"].exp().isinf().any()
    assert (scaled["ascending"].argmax(-1) >= 64).all()
    assert (scaled["all_negative"] < 0).all()
    assert (scaled["tied"].amax(-1) - scaled["tied"].amin(-1)).max() < 1e-4


def test_tensors_apart_have_strides_of_their_own():
    given = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.arange(15).view(3, 5)
    found = apart(*given)
    assert all(torch.equal(x, y) and x.stride(-1) == 1 for x, y in zip(found, given))
    assert found[0].stride() == (48, 16, 1) and found[1].stride() == (96, 24, 1)
    around = found[0].as_strided((3 * 48,), (1,))
    assert int(around.isnan().sum()) == 3 * 48 - 3 * 2 * 8
    assert int(found[2].as_strided((3, 29), (29, 1))[0, 5]) == 2**30


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draw_repeats_and_differs_between_seeds(name):
    x = draw(name, (33, 40), seed=SEED)
    assert torch.equal(x, draw(name, (33, 40), seed=SEED)) and not torch.equal(
        x, draw(name, (33, 40), seed=SEED + 1)
    )
    assert x.is_contiguous() == (name != "non_contiguous")


def test_draw_does_what_it_is_for():
    assert (draw("all_negative", (9, 9)) < 0).all()
    assert (draw("ascending", (9, 9)).diff(dim=-1) >= 0).all()
    assert draw("large", (99, 99)).exp().isinf().any()
    assert len(draw("tied", (1000,)).unique()) < 20
    assert draw("tiny", (99, 99)).abs().max() < 1e-3


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="'gauss', known are normal, large"):
        draw("gauss", (3,))
    with pytest.raises(ValueError, match="'gauss', known are normal, large_logits"):
        attention_inputs("gauss", 1, 1, 1, 1, 8)


def test_edge_lengths():
    assert edge_lengths(64) == [1, 2, 63, 64, 65, 127, 128, 129, 193]
    assert edge_lengths(16, at_most=40) == [1, 2, 15, 16, 17, 31, 32, 33]
    assert edge_lengths(1) == [1, 2, 3, 5]
