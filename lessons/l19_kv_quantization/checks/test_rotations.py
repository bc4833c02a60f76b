"""Proves Hadamard matrices, the kernel that multiplies by one, and that rotations change no
function; and that wrong versions of all of them show.
"""

from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l12_paged_kv.lab.testing import DEVICE
from lessons.l18_weight_quantization.lab.cases import CONFIG, small_decoder
from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
from lessons.l19_kv_quantization.activations import hadamard as module
from lessons.l19_kv_quantization.activations import rotations
from lessons.l19_kv_quantization.activations.hadamard import (
    hadamard,
    operations,
    rotate,
    rotate_by_matrix,
    rotate_kernel,
    sides_of,
)
from lessons.l19_kv_quantization.activations.outliers import channel_ratio, with_loud_activations
from lessons.l19_kv_quantization.activations.rotations import (
    random_rotation,
    with_rotated_stream,
)
from lessons.l19_kv_quantization.activations.w4a4 import int4_tokens, nvfp4_tokens, w4a4
from lessons.l19_kv_quantization.lab import rotations as lab
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.proof.numerics import NotEquivalent, draw, prove
from lessons.toolbox.proof.pages import pages
from lessons.toolbox.proof.planted import with_bug

# powers of two, the Paley sizes, and both; tiles that are square, flat, and not whole blocks
SIZES = (1, 2, 16, 64, 1024, 12, 20, 44, 384, 80)


# ---------------------------------------------------------------- matrices


@pytest.mark.parametrize("n", (*SIZES, 4, 24, 8))
def test_rows_are_orthogonal(n):
    matrix = hadamard(n)
    assert torch.equal(matrix.abs(), torch.ones(n, n, dtype=torch.float64))
    assert torch.equal(matrix @ matrix.T, n * torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("n", (16, 1024, 24, 384, 80, 11264))
def test_a_large_matrix_is_the_product_of_two_small_ones(n):
    a, b = sides_of(n)
    assert a * b == n and a + b < n and b & (b - 1) == 0
    if n < 2000:
        assert torch.equal(torch.kron(hadamard(a), hadamard(b)), hadamard(n))
    assert operations(n) == (n * n, n * (a + b))


@pytest.mark.parametrize("n", (0, -4, 3, 6, 28, 100, 2.0))
def test_other_sizes_are_refused(n):
    with pytest.raises(ValueError, match=r"n: got .*; accepted: 1, 12, 20, 24, 44, or one of them"):
        hadamard(n)


# ---------------------------------------------------------------- the kernel


def tokens(n: int, dtype: torch.dtype, seed: int, kind: str = "normal") -> torch.Tensor:
    return draw(kind, (5, n), dtype=dtype, seed=seed, device=DEVICE)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_is_a_product_with_the_matrix(n, dtype, seed, proof):
    with in_bounds():
        proof.record(rotate_kernel, prove(rotate, rotate_by_matrix, (tokens(n, dtype, seed),)))


@pytest.mark.parametrize("kind", ["large", "all_negative", "tiny", "non_contiguous"])
def test_hard_inputs(kind, seed):
    prove(rotate, rotate_by_matrix, (tokens(384, torch.float32, seed, kind),))


def error_of(function, seed: int) -> float:
    """How far `function` is off in float16, over how far the naive version is, which rounds
    once.
    """
    x = tokens(1024, torch.float16, seed)
    right = rotate_by_matrix(x.double())
    return float((function(x) - right).norm() / (rotate_by_matrix(x) - right).norm())


@pytest.mark.skipif(not interpreting(), reason="a wrong kernel may end the process")
def test_float16_is_rounded_once_more_and_never_cut(seed, tmp_path):
    """Two roundings are √2 times as far off as one. Bits that are dropped are twice as far off as
    rounded ones, so that without the rounding it is √5.
    """
    assert error_of(rotate, seed) < 1.6
    assert error_of(with_bug(module, tmp_path, "+ 0x1000", "+ 0").rotate, seed) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_no_number_reaches_every_output_of_its_token(dtype, seed):
    x = tokens(64, dtype, seed)
    x[1, 7] = torch.nan
    x[2, 9] = torch.inf
    out = rotate(x)
    assert out[1].isnan().all() and not out[2].isfinite().any()
    assert out[[0, 3, 4]].isfinite().all()


def test_twice_is_once_around(seed):
    """A Sylvester matrix is symmetric, so that the second rotation undoes the first."""
    x = tokens(256, torch.float32, seed)
    torch.testing.assert_close(rotate(rotate(x)), x, atol=2e-6, rtol=1e-5)
    assert rotate(x[:0]).shape == (0, 256)


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(2, 8, dtype=torch.int8)])
def test_what_the_kernel_refuses(x):
    with pytest.raises(ValueError, match=r"x: got .*; accepted: \[T, n\] in float32"):
        rotate(x)


KERNEL_BUGS = {
    "the left matrix transposed": ("a[:, None] * A + a[None, :]", "a[None, :] * A + a[:, None]"),
    "the right matrix transposed": ("b[None, :] * B + b[:, None]", "b[:, None] * B + b[None, :]"),
    "another token's tile": ("x_ptr + token * stride_x", "x_ptr + 0 * token * stride_x"),
    "rows only": ("tl.dot(left.to(tl.float32), rows, input_precision=PRECISION)", "rows"),
    "not divided": ("(tile * factor)", "(tile)"),
}


@pytest.mark.skipif(not interpreting(), reason="a wrong kernel may end the process")
@pytest.mark.parametrize("bug", KERNEL_BUGS)
def test_a_wrong_kernel_is_found(bug, seed, tmp_path):
    """Of 80 = 20 · 4 numbers. The matrix of 4 is its own transpose, so the right side is held with
    the sides swapped.
    """
    wrong = with_bug(module, tmp_path, *KERNEL_BUGS[bug])
    if bug == "the right matrix transposed":
        wrong.small_matrices = lambda n, dtype, device: (
            hadamard(4).to(dtype),
            hadamard(20).to(dtype),
        )
        wrong.sides_of = lambda n: (4, 20)

        def plain(x):
            matrix = torch.kron(hadamard(4), hadamard(20)).to(x.dtype)
            return x @ matrix.T / 80**0.5
    else:
        plain = rotate_by_matrix
    with pytest.raises(NotEquivalent):
        prove(wrong.rotate, plain, (tokens(80, torch.float32, seed),))


# ---------------------------------------------------------------- models


def logits_of(model, length=13):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(CONFIG.vocab_size, (length,), generator=generator)
    with torch.inference_mode():
        return model.logits(model(ids, whole_sequence(model, length)))


def rotated_model(module=rotations):
    """A model in float64 with norms that are not 1 and with biases, and its twin."""
    model = small_decoder()
    return model, module.with_rotated_inputs(module.with_rotated_stream(model))


def test_rotations_change_no_function(seed):
    model, twin = rotated_model()
    assert all(
        bool((layer.input_layernorm.weight == 1).all()) for layer in twin.layers
    ) and not torch.equal(twin.embed_tokens.weight, model.embed_tokens.weight)
    torch.testing.assert_close(logits_of(twin), logits_of(model), atol=1e-9, rtol=1e-9)


STREAM_BUGS = {
    "a norm's weight lost": ("w * g.double() @ rotation", "w @ rotation"),
    "a writer rotated backwards": (
        "multiply(writer, lambda w: rotation.T @ w)",
        "multiply(writer, lambda w: rotation @ w)",
    ),
    "values rotated, and nothing after them": (
        "(w.unflatten(1, (-1, len(heads))) @ heads.T).flatten(1)",
        "w",
    ),
    "a head without the last norm": ("* model.norm.weight.double() @ rotation", "@ rotation"),
    "an embedding left as it was": ("(numbers.double() @ rotation)", "(numbers.double())"),
    "down_proj left as it was": ("multiply(linear, lambda w: w @ matrix.T)", "pass"),
}


@pytest.mark.parametrize("bug", STREAM_BUGS)
def test_a_wrong_rotation_is_found(bug, seed, tmp_path):
    model, twin = rotated_model(with_bug(rotations, tmp_path, *STREAM_BUGS[bug]))
    assert (logits_of(twin) - logits_of(model)).abs().max() > 1e-3


def test_rotations_flatten_outlier_channels(seed):
    """An input with one channel 100 times as large: after a rotation no channel stands out."""
    x = torch.randn(64, 384, dtype=torch.float64)
    x[:, 17] *= 100
    before, after = (channel_ratio(y.abs().amax(0)) for y in (x, x @ random_rotation(384)))
    assert before > 50 and after < 2
    weight = torch.randn(48, 384, dtype=torch.float64)

    def error(x, weight):
        exact = x @ weight.T
        return float((int4_tokens(x) @ weight.T - exact).norm() / exact.norm())

    rotation = random_rotation(384)
    assert error(x @ rotation, weight @ rotation) < 0.6 * error(x, weight)


def test_another_family_is_refused():
    model = small_decoder()
    model.config = replace(model.config, model_type="gemma2")
    with pytest.raises(ValueError, match="model: got 'gemma2'; accepted: llama or qwen2"):
        with_rotated_stream(model)


# ---------------------------------------------------------------- 4 bits on both sides


def test_tokens_of_4_bits(seed):
    x = torch.randn(6, 64)
    x[2] = 0
    found = int4_tokens(x)
    scales = x.abs().amax(1, keepdim=True) / 7
    codes = torch.where(scales > 0, found / scales, 0.0)
    assert torch.allclose(codes, codes.round(), atol=1e-5) and codes.abs().max() <= 7.001
    assert bool(((found - x).abs() <= scales / 2 * 1.0001).all()) and not found[2].any()
    rows = torch.cat([to_nvfp4(row[None]).dequantize() for row in x])
    torch.testing.assert_close(nvfp4_tokens(x), rows, atol=1e-6, rtol=1e-5)


def test_a_model_of_4_bits_rounds_both_sides(seed):
    model = small_decoder()
    loud = with_loud_activations(model, [3], 50.0)
    exact = logits_of(model)
    errors = {
        name: [float((logits_of(w4a4(twin, name)) - exact).norm()) for twin in (model, loud)]
        for name in ("int4", "nvfp4")
    }
    assert errors["int4"][1] > 1.2 * errors["int4"][0] > 0
    assert all(error > 0 for row in errors.values() for error in row)


# ---------------------------------------------------------------- what was counted


def test_what_the_text_concludes_from_what_was_counted():
    if not lab.FILE.exists():
        pytest.skip(f"NOT RUN: {lab.FILE.name} is not recorded")
    models = lab.recorded()["models"]
    nothing, smooth, folded, online = lab.WAYS
    kl = {
        (kind, way, name): models[kind][way][name]["kl"]["mean"]
        for kind in lab.KINDS
        for way in lab.WAYS
        for name in ("int4", "nvfp4")
    }
    calm, loud = lab.KINDS
    for name in ("int4", "nvfp4"):
        for way in (folded, online):  # a rotated stream does not know that there were outliers
            assert kl[loud, way, name] == pytest.approx(kl[calm, way, name], rel=0.02)
    for kind in lab.KINDS:
        int4 = [kl[kind, way, "int4"] for way in (nothing, smooth, folded, online)]
        assert int4 == sorted(int4, reverse=True)
        assert min(kl[kind, way, "nvfp4"] for way in lab.WAYS) == kl[kind, smooth, "nvfp4"]
        before, after = (models[kind][way]["channels"]["down_proj"] for way in (nothing, online))
        assert after < before / 3
    # "worth as much as all that is free", and worse than nothing for NVFP4
    free, paid = (
        kl[calm, one, "int4"] - kl[calm, two, "int4"]
        for one, two in ((nothing, folded), (folded, online))
    )
    assert paid > 0.9 * free
    assert kl[calm, nothing, "nvfp4"] < min(kl[calm, way, "nvfp4"] for way in (folded, online))


def test_the_picture_fits():
    figure = lab.draw_rotations()
    assert not overlapping_texts(figure) and not texts_outside(figure)


def test_the_text_quotes_the_transform():
    text = pages(lab.ROOT / "lessons/l19_kv_quantization")
    whole, small = operations(1024)
    assert f"these are {small:,} in place of {whole:,}" in text
    x = torch.tensor([[100.0, 1, 1, 1]], dtype=torch.float64)
    assert rotate_by_matrix(x).tolist() == [[51.5, 49.5, 49.5, 49.5]]
    assert "x Q = (51.5, 49.5, 49.5, 49.5)" in text
