"""The Triton kernel whose loop the compiler splits equals the oracle, interpreted and compiled; it
is split where we say so; planted bugs are caught.
"""

import importlib
import json
import re
from pathlib import Path

import pytest

from lessons.l09_flash_attention.checks import gluon_cases, specialized_cases
from lessons.l09_flash_attention.checks.gluon_cases import DEVICE, inputs, with_bug
from lessons.l09_flash_attention.hopper.specialized import triton_flash
from lessons.l09_flash_attention.hopper.specialized.triton_flash import flash_descriptor_kernel
from lessons.l09_flash_attention.lab import specialized_times, specs
from lessons.l09_flash_attention.tiles import Tiles, chip_of
from lessons.toolbox.gpu.another_process import call, why_not_here
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.kernels.compile_report import KernelSpec, Report
from lessons.toolbox.kernels.kernel_hash import kernel_hash
from lessons.toolbox.proof.numerics import ATTENTION_INPUTS, NotEquivalent

KERNEL = triton_flash.flash_attention_specialized
CASES = specialized_cases.__name__
SOURCE = Path(triton_flash.__file__).read_text(encoding="utf-8")
LENGTHS = [1, 31, 32, 33, 64, 129]
LONG = [1000, 4097] if DEVICE.type == "cuda" else []


@pytest.fixture(autouse=True)
def written_for_this_chip():
    if chip_of(DEVICE) not in (None, *triton_flash.TILES):
        pytest.skip("NOT RUN: needs a GPU of compute capability 9.0 or 10.0, or none")


@pytest.fixture
def another_process():
    if why_not_here():
        pytest.skip(f"NOT RUN: {why_not_here()}")


def proved(*given, name="normal", kernel=KERNEL):
    return gluon_cases.proved(*given, kernel, name)


# ---------------------------------------------------------------- equal to the oracle


@pytest.mark.parametrize("length", LENGTHS + LONG)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.sample(2, of="the specialised kernel")
def test_specialized_kernel(length, head_dim, seed, proof):
    for causal in (True, False):
        given = inputs(length, length + 5, 2, 1, head_dim, seed=seed)
        proof.record(flash_descriptor_kernel, proved(*given, causal))


@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (1, 300), (5, 129), (90, 40), (150, 1)])
@pytest.mark.sample(2, of="the specialised kernel")
def test_specialized_kernel_is_aligned_bottom_right(num_queries, num_keys, seed, proof):
    """With more queries than keys the first ones see no key: 0 and -inf, whole programs of them."""
    for causal in (True, False):
        given = inputs(num_queries, num_keys, seed=seed)
        proof.record(flash_descriptor_kernel, proved(*given, causal))


@pytest.mark.parametrize("name", [name for name in ATTENTION_INPUTS if name != "non_contiguous"])
@pytest.mark.sample(2, of="the specialised kernel")
def test_specialized_kernel_on_hard_inputs(name, seed, proof):
    given = inputs(70, 140, 2, 1, 64, seed=seed, name=name)
    proof.record(flash_descriptor_kernel, proved(*given, True, name=name))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.sample(2, of="the specialised kernel")
def test_specialized_kernel_with_grouped_heads(kv_heads, seed, proof):
    given = inputs(20, 70, 8, kv_heads, 64, seed=seed)
    proof.record(flash_descriptor_kernel, proved(*given, True))


@pytest.mark.parametrize("chip", [90, 100])
@pytest.mark.parametrize("shape", specialized_cases.SHAPES)
@pytest.mark.sample(1, of="the specialised kernel, compiled")
def test_the_compiled_code_of_the_specialized_kernel(shape, chip, seed, another_process):
    """Warps, copies and mbarriers that the compiler made, instruction by instruction."""
    assert call(f"{CASES}:wrong_with", [shape], seed, chip=chip) == ""


def test_specialized_refuses_what_it_does_not_do():
    with pytest.raises(ValueError, match="64, 128, 256 for all"):
        KERNEL(*inputs(4, 4, head_dim=32, on="cpu"))
    q, k, v = inputs(4, 4, on="cpu")
    with pytest.raises(ValueError, match="dense"):
        KERNEL(q, k.expand(4, 1, 64)[:, :, :], v.repeat(2, 1, 1)[::2])
    with pytest.raises(ValueError, match="float32"):
        KERNEL(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="block_n"):
        KERNEL(q, k, v, tiles=Tiles(64, 8))


# ---------------------------------------------------------------- planted bugs

BUGS = {  # name: (the text, what it becomes)
    "keys beyond the last are seen": ("+ (num_keys - 1)", "+ num_keys"),
    "no mask": ("causal or len(k) % tiles.block_n > 0", "False"),
    "a mask for causal launches alone": ("causal or len(k) % tiles.block_n > 0", "causal"),
    "the diagonal is not seen": ("<= (last_key", "< (last_key"),
    "all queries see what the first one sees": ("first + row)", "first)"),
    "aligned top left": (
        "first = start_m + num_keys - num_queries\n    row,", "first = start_m\n    row,",
    ),
    "the last tile is not visited": ("tl.maximum(0, first + BLOCK_M)", "tl.maximum(0, first)"),
    "every query head has its own K and V": ("head // GROUP * HEAD_DIM", "head * HEAD_DIM"),
    "v of the next tile": ("v_desc.load([start_n,", "v_desc.load([start_n + BLOCK_N,"),
    "q of the first tile": ("q_desc.load([start_m,", "q_desc.load([0,"),
    "out of the next head": (
        "out_desc.store([start_m, head * HEAD_DIM]",
        "out_desc.store([start_m, (head + 1) % num_heads * HEAD_DIM]",
    ),
    "a descriptor with a row too few": ("shape=[num_rows,", "shape=[num_rows - 1,"),
    "the mask is not added to": ("tl.trans(k), scores)", "tl.trans(k))"),
    "acc is not rescaled": ("acc * alpha[:, None])", "acc)"),
    "l is not rescaled": ("l_i * alpha + tl", "l_i + tl"),
    "queries that see no key get NaN": (
        'tl.where(m_new == float("-inf"), 0.0, m_new) if EDGE else m_new', "m_new",
    ),
    "division by zero where no key is seen": ("tl.where(l_i == 0.0, 1.0, l_i)", "l_i"),
    "the log-sum-exp in base 2": ("tl.log2(l_i)) / LOG2_E", "tl.log2(l_i))"),
    "the log-sum-exp of the first tile": ("lse_ptr += start_m.to(tl.int64) * num_heads + head",
                                          "lse_ptr += head"),
    "the scale without log2 e": ("softmax_scale * LOG2_E", "softmax_scale * 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sample(3)
def test_a_bug_planted_in_the_specialized_kernel_is_caught(bug, tmp_path, seed):
    kernel = with_bug(triton_flash, (), *BUGS[bug], tmp_path).flash_attention_specialized
    scale = 1 if chip_of(DEVICE) is None else 4  # tiles have 32 rows in the interpreter, else 128
    with pytest.raises(NotEquivalent):
        for num_queries, num_keys, causal in [(70, 100, True), (60, 33, True), (40, 75, False)]:
            given = inputs(scale * num_queries, scale * num_keys, 2, 1, seed=seed)
            proved(*given, causal, kernel=kernel)


def test_the_rows_that_the_compiler_counts_twice(seed, another_process):
    """The log-sum-exp at `start_m + row`, which is right in the interpreter: of the second
    warpgroup's rows the compiler begins 64 too late. If this fails, the comment in the kernel and
    the paragraph in README.md can go.
    """
    rows = [
        "    lse_ptr += start_m.to(tl.int64) * num_heads + head\n",
        "lse_ptr + row * num_heads, lse, mask=row < num_queries - start_m)",
    ]
    old = SOURCE[SOURCE.index(rows[0]) : SOURCE.index(rows[1]) + len(rows[1])]
    new = old.replace(rows[0], "    lse_ptr += head\n").replace(
        rows[1], "lse_ptr + (start_m + row) * num_heads, lse, mask=start_m + row < num_queries)"
    )
    shapes = [(200, 200, 2, 1, 64, True)]
    assert call(f"{CASES}:wrong_with", shapes, seed, old, new, chip=100) == ""
    said = call(f"{CASES}:wrong_with", shapes, seed, old, new, chip=90)
    assert re.search("race in global memory|log-sum-exp|outside|bytes at", said), said


# ---------------------------------------------------------------- the compiler


def compiled(*asked: KernelSpec) -> list[Report]:
    reports = check_all(asked)
    for report in reports:
        if not report.was_run:
            pytest.skip(report.error)
    return reports


@pytest.mark.compiler
def test_every_launch_is_specialised():
    """No spills on Hopper, few on Blackwell; the loads, products and stores are those of TMA and
    tensor cores.
    """
    found = [spec for spec in specs.KERNELS if spec.name.startswith("descriptors")]
    assert len(found) == 12
    for report in compiled(*found):
        assert report.error is None and report.warp_specialized, report
        assert report.spill_bytes <= (68 if report.chip == 100 else 0), report
        assert report.shared_bytes <= report.shared_limit_bytes, report
        assert not report.serialized_wgmma and report.registers <= 168, report
        matrix = "HGMMA" if report.chip == 90 else "UTCHMMA"
        assert report.matrix_instruction == matrix and report.tma_instructions >= 6, report
        assert report.census["USETMAXREG"] >= 8, report


def test_four_warps_become_twelve(another_process):
    """Two warpgroups of products and one of loads; with 8 warps nothing becomes of the request."""
    split = call(f"{CASES}:code_with", triton_flash.TILES[90][128], chip=90)
    assert split["threads"] == 384 and {40, 232} <= split["registers"]  # as README.md says
    assert split["loads"] == 4 and split["stores"] == 2  # k, v, two halves of q; two of out
    whole = call(f"{CASES}:code_with", Tiles(128, 128, 8, 2), chip=90)
    assert whole["threads"] == 256 and not whole["registers"]
    assert whole["stores"] == 1
    assert split["products"] == 2 * whole["products"]  # of 64 rows, for each of two warpgroups


def test_the_predictions_are_of_these_kernels():
    record = json.loads(specialized_times.RECORD.read_text(encoding="utf-8"))
    for part in ("full", "causal"):
        for name, found in record[part].items():
            current = kernel_hash(specialized_times.SOURCES[name])
            assert found["hash"] == current, f"{part} {name}: predict it anew"


LOOP = SOURCE[SOURCE.index("    for start_n in") : SOURCE.index("    # late division")]
HEADER = LOOP.splitlines(keepends=True)[0]
BODY = LOOP.removeprefix(HEADER)
CUT = "first // BLOCK_N * BLOCK_N"
TWO_LOOPS = "".join(HEADER.replace("0, end", part) + BODY for part in (f"0, {CUT}", f"{CUT}, end"))
# name: (texts and what they become, arguments of other types, what the compiler says)
REFUSED = {
    "two loops": ({LOOP: TWO_LOOPS}, {}, "pass pipeline"),
    "descriptors of q from the host": (
        {
            "    q_ptr,\n    k_desc": "    q_desc,\n    k_desc",
            "    q_desc = rows_of(q_ptr, num_queries, num_heads * HEAD_DIM, BLOCK_M, ": "    (",
        },
        {"q_desc": "tensordesc<bf16[128, 128]>"},
        "descriptor block and tensor must have the same number of elements",
    ),
}
IGNORED = {
    "an if in the loop": (
        {"if EDGE:\n            # The": "if start_n + BLOCK_N > first:\n            # The"},
        4,
    ),
    "eight warps": ({}, 8),
}


def changed_spec(folder: Path, changes: dict[str, str], types: dict, num_warps=4) -> KernelSpec:
    """descriptor_spec of a copy of the module with some texts changed."""
    text = SOURCE
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    name = "changed_" + "".join(c if c.isalnum() else "_" for c in folder.name)
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    spec = specs.descriptor_spec(128, 90, tiles=Tiles(128, 128, num_warps, 2))
    signature = dict(spec.signature)
    for argument, type_ in types.items():
        signature.pop(argument.replace("_desc", "_ptr"))
        signature[argument] = type_
    return KernelSpec(
        f"{name}:flash_descriptor_kernel",
        name=name,
        signature=signature,
        constexprs=spec.constexprs,
        num_warps=num_warps,
        num_stages=2,
        chips=(90,),
    )


@pytest.mark.compiler
@pytest.mark.parametrize("what", REFUSED)
def test_what_the_compiler_refuses(what, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    changes, types, said = REFUSED[what]
    (report,) = compiled(changed_spec(tmp_path, changes, types))
    if types and "3.6" in report.compiler:  # it copies 128 rows to where there is room for 64
        assert report.warp_specialized and report.error is None, report
    else:
        assert report.error and said in report.error, report


@pytest.mark.compiler
@pytest.mark.parametrize("what", IGNORED)
def test_what_the_compiler_ignores(what, tmp_path, monkeypatch):
    """It says nothing, and the loop is as it would be without the request."""
    monkeypatch.syspath_prepend(str(tmp_path))
    changes, num_warps = IGNORED[what]
    asked, not_asked = compiled(
        *(
            changed_spec(tmp_path, changes | more, {}, num_warps)
            for more in ({}, {", warp_specialize=True": ""})
        )
    )
    assert asked.error is None and not asked.warp_specialized, asked
    assert "USETMAXREG" not in asked.census and asked.census == not_asked.census
    assert (asked.spill_bytes > 0) == (what == "an if in the loop")
