"""Lesson 2's decoder: its parts one by one, and the examples that the texts work out by hand."""

from pathlib import Path

import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.decoder import Decoder, RMSNorm
from lessons.l02_naive_attention.lab import inside
from lessons.l02_naive_attention.rope import apply_rope
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.pages import pages

README = pages(Path(naive.__file__).parent)


def test_the_examples_of_a_norm_a_rotation_and_sampling():
    """Of step 9, and of MORE.md's decoder around attention."""
    a, b = RMSNorm(2, 0.0)(torch.tensor([3.0, 4.0])).tolist()
    assert f"/ 2) = ({a:.2f}, {b:.2f})" in README
    cos, sin = torch.tensor(1.0).cos().view(1, 1, 1), torch.tensor(1.0).sin().view(1, 1, 1)
    turned = apply_rope(torch.tensor([[[1.0, 0.0]]]), cos.expand(1, 1, 2), sin.expand(1, 1, 2))
    assert "(cos 1, sin 1) = ({:.2f}, {:.2f})".format(*turned.flatten().tolist()) in README
    logits = torch.tensor([2.0, 1, 0, -1, -2])
    for said, params in (
        ("probabilities {:.3f}, {:.3f}, {:.3f}, {:.3f}, {:.3f}", SamplingParams()),
        ("top_k = 2:   {:.3f}, {:.3f}, {:.0f}, {:.0f}, {:.0f}", SamplingParams(top_k=2)),
        ("top_p = 0.9:   {:.3f}, {:.3f}, {:.3f}, {:.0f}, {:.0f}", SamplingParams(top_p=0.9)),
    ):
        assert said.format(*probabilities(logits, params, [], []).tolist()) in README


def test_the_first_layer_tensor_by_tensor_is_the_decoders():
    config = ModelConfig("llama", 11, 8, 2, 4, 2, 2, 16, 64)
    model, prompt = Decoder(config).eval(), [1, 2, 3, 4, 5, 6]
    parts = dict(inside.first_layer(model, prompt))
    with torch.inference_mode():
        attend = naive.whole_sequence(model, len(prompt))
        expected = model.run_layers(model.embed_tokens(torch.tensor(prompt)), attend, [0])
    torch.testing.assert_close(parts["x + attention + MLP"], expected)
    torch.testing.assert_close(parts["weights"], inside.weights_of(model, prompt)[0])
    assert parts["scores"].shape == (4, 6, 6) and parts["k"].shape == (6, 2, 2)
