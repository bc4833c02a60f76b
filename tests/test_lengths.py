"""A file is read in a sitting: its length, the length of its functions, how dense and how wide it
is.

The tables list what is longer today. An entry whose file keeps the rule has to go, so that the
tables only shrink.
"""

from pathlib import Path

import pytest

from tests.length_rules import (
    COLUMNS,
    LINES_OF_A_FILE,
    LINES_OF_A_FUNCTION,
    TOKENS_A_LINE,
    dense_files,
    density,
    long_files,
    long_functions,
    wide_files,
)

REPOSITORY = Path(__file__).resolve().parents[1]

LONG_FILES = (
    "lessons/l02_naive_attention/test_equivalence.py",
    "lessons/l04_positions/test_equivalence.py",
    "lessons/l05_gqa/test_equivalence.py",
    "lessons/l07_kernel_fusion/test_equivalence.py",
    "lessons/l08_online_softmax/test_equivalence.py",
    "lessons/l09_flash_attention/optimized.py",
    "lessons/l09_flash_attention/test_equivalence.py",
    "lessons/l10_flash_decoding/optimized.py",
    "lessons/l10_flash_decoding/test_equivalence.py",
    "lessons/toolbox/proof/numerics.py",
)
LONG_FUNCTIONS = (
    "lessons/l04_positions/arguments.py:check_rope_cache",
    "lessons/l04_positions/optimized.py:rope_cache_kernel",
    "lessons/l05_gqa/lab/pictures.py:draw",
    "lessons/l05_gqa/optimized.py:gqa_decode_kernel",
    "lessons/l09_flash_attention/fa1.py:fa1_kernel",
    "lessons/l09_flash_attention/hopper/fp8.py:flash_fp8_kernel",
    "lessons/l09_flash_attention/optimized.py:flash_kernel",
    "lessons/l10_flash_decoding/optimized.py:split_decode_kernel",
    "lessons/l12_paged_kv/kernels/few_heads.py:grouped_mla_kernel",
    "lessons/l12_paged_kv/kernels/latents.py:paged_mla_kernel",
    "lessons/l12_paged_kv/kernels/paged.py:decode_kernel",
    "lessons/l12_paged_kv/kernels/paged.py:prefill_kernel",
    "lessons/l17_tree_speculation/trees/kernel.py:tree_kernel",
    "lessons/l18_weight_quantization/kernels/products.py:quantized_matmul_kernel",
    "lessons/l19_kv_quantization/activations/attention/kernel.py:fp8_prefill_kernel",
    "lessons/l19_kv_quantization/kernels/decode.py:codes_decode_kernel",
    "lessons/l19_kv_quantization/kernels/latents/kernel.py:coded_mla_kernel",
    "lessons/toolbox/proof/numerics.py:assert_close_to_oracle",
    "solutions/l05_gqa.py:group_kernel",
)
DENSE_FILES = (
    "lessons/l02_naive_attention/naive.py",
    "lessons/l04_positions/naive.py",
    "lessons/l06_mla/naive.py",
    "lessons/l07_kernel_fusion/naive.py",
    "lessons/l08_online_softmax/naive.py",
    "lessons/l09_flash_attention/naive.py",
    "lessons/l11_cuda_graphs/optimized.py",
    "lessons/l20_parallelism/naive.py",
    "lessons/l24_structured_outputs/naive.py",
    "lessons/l24_structured_outputs/optimized.py",
)


@pytest.mark.parametrize(
    "found_in, allowed, limit",
    [
        pytest.param(long_files, LONG_FILES, f"{LINES_OF_A_FILE} lines", id="files"),
        pytest.param(
            long_functions, LONG_FUNCTIONS, f"{LINES_OF_A_FUNCTION} lines", id="functions"
        ),
        pytest.param(wide_files, (), f"{COLUMNS} characters in a line", id="width"),
        pytest.param(dense_files, DENSE_FILES, f"{TOKENS_A_LINE} tokens a line", id="density"),
    ],
)
def test_what_is_too_long_is_listed(found_in, allowed, limit):
    found = found_in(REPOSITORY)
    new = {name: found[name] for name in found if name not in allowed}
    assert not new, f"more than {limit}: {new}"
    mended = sorted(set(allowed) - set(found))
    assert not mended, f"at most {limit} now, so take it out of the table: {mended}"


def test_density_counts_code_alone():
    source = '"""A text of five words."""\n\n# a comment\nx = f(1,\n      2)  # four and three\n'
    assert density(source) == 8 / 2


def test_width_counts_characters(tmp_path):
    """Not bytes: a line of 100 letters with an accent has 200. Generated stubs are left out."""
    (tmp_path / "exercises").mkdir()
    (tmp_path / "fits.py").write_text("# " + 98 * "é" + "\n", encoding="utf-8")
    for name in ("wide.py", "exercises/l01.py"):
        (tmp_path / name).write_text("# " + 99 * "e" + "\n", encoding="utf-8")
    assert wide_files(tmp_path) == {"wide.py": 1}
