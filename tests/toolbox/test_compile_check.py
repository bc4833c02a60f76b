"""The compiler's report on kernels made to show one thing each, without a GPU."""

import dataclasses
import importlib.util

import pytest
import torch

from lessons.toolbox.gpu import nvrtc
from lessons.toolbox.kernels import compile_check
from lessons.toolbox.kernels.compile_check import (
    CHIPS,
    KernelSpec,
    Report,
    check,
    check_all,
    check_cuda,
    check_jobs,
    from_json,
    kernel_hash,
    triton_job,
)
from lessons.toolbox.measure.device import has_triton, interpreting
from tests.toolbox import kernels_to_compile as kernels

needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, int], Report]:
    """(label, chip) -> report, of all kernels in one process; after the first run from build/."""
    if not has_triton():
        pytest.skip("NOT RUN: needs Triton")
    from tests.toolbox import gluon_to_compile

    return {
        (report.name, report.chip): report
        for report in check_all(kernels.KERNELS + gluon_to_compile.KERNELS)
    }


@pytest.mark.parametrize("chip", CHIPS)
def test_streaming_kernel(reports, chip):
    report = reports["copy_kernel", chip]
    assert report.error is None and report.fits and 5 <= report.registers <= 64
    assert report.loads_128bit == 1 and report.census["EXIT"] >= 1
    assert report.matrix_instruction is None and report.tma_instructions == 0


def test_unaligned_length_costs_the_wide_loads(reports):
    assert reports["copy, odd n", 90].loads_128bit == 0


@pytest.mark.parametrize(
    "chip, instruction", [(80, "HMMA"), (89, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA")]
)
def test_each_generation_uses_its_matrix_instruction(reports, chip, instruction):
    report = reports["matmul_kernel", chip]
    assert report.matrix_instruction == instruction and report.fits
    assert 64 * 64 * 2 <= report.shared_bytes <= CHIPS[chip].shared_limit_bytes


def test_t4_gets_no_tensor_cores(reports):
    report = reports["matmul_kernel", 75]
    assert (
        report.error is None and report.matrix_instruction is None and report.census["FFMA"] > 100
    )


def test_spills_are_counted(reports):
    report = reports["few registers", 80]
    assert (
        report.registers <= 32
        and report.spill_bytes > 0
        and report.local_memory_instructions > 0
        and not report.fits
    )


def test_shared_memory_is_held_against_the_chip(reports):
    report = reports["large tile", 89]
    assert (
        report.error is None
        and report.spill_bytes == 0
        and 99 * 1024 < report.shared_bytes < 163 * 1024
    )
    assert not report.fits and dataclasses.replace(report, chip=80).fits


def test_descriptors_become_tma_from_hopper_on(reports):
    assert [reports["descriptor_kernel", chip].tma_instructions for chip in (80, 90, 100)] == [
        0,
        2,
        2,
    ]


def test_serialised_wgmma_is_seen(reports):
    assert reports["serial_kernel", 90].serialized_wgmma and not reports["serial_kernel", 90].fits
    assert not reports["matmul_kernel", 90].serialized_wgmma


def test_float8_needs_ada(reports):
    assert "fp8e4nv not supported in this architecture" in reports["float8_kernel", 75].error
    assert reports["float8_kernel", 89].error is None


def test_compiler_refuses_what_the_interpreter_forgives(reports):
    assert "last is not defined" in reports["forgiven_kernel", 90].error
    if interpreting():
        x, out = torch.randn(256).bfloat16(), torch.empty(128).bfloat16()
        kernels.forgiven_kernel[(1,)](x, out, 256, 128)
        assert torch.equal(out, x[128:])


def test_gluon_compiles_and_a_crash_costs_only_its_own_report(reports):
    assert (
        reports["tile_kernel", 90].matrix_instruction == "HGMMA"
        and reports["tile_kernel", 90].tma_instructions == 3
    )
    assert reports["tile_kernel", 80].error.startswith("the compiler crashed: LLVM ERROR")


def test_errors_are_one_line_without_paths(reports):
    for report in reports.values():
        assert report.error is None or ("\n" not in report.error and "/" not in report.error)


def test_report_survives_json(reports):
    for report in reports.values():
        assert from_json(report.to_json()) == report


def test_second_check_compiles_nothing(reports, monkeypatch):
    monkeypatch.setattr(compile_check, "compile_some", lambda jobs: pytest.fail("compiled again"))
    assert check(kernels.COPY) == [reports["copy_kernel", chip] for chip in CHIPS]
    renamed = dataclasses.replace(kernels.COPY, name="another name", chips=(90,))
    assert [report.name for report in check(renamed)] == ["another name"]
    changed = KernelSpec(kernels.COPY.kernel, kernels.COPY.signature, {"BLOCK": 512})
    with pytest.raises(pytest.fail.Exception):
        check(changed, [90])
    with pytest.raises(pytest.fail.Exception):
        check_jobs([triton_job(kernels.COPY, 90)], afresh=True)


@needs_triton
def test_a_recorded_report_counts_for_its_own_compiler_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_check, "CACHE", tmp_path)
    monkeypatch.setattr(compile_check, "compile_some", lambda jobs: [{"registers": 7}] * len(jobs))
    job = triton_job(kernels.COPY, 90)
    of_another = job.report(registers=5)
    for compiler, registers in ((job.compiler, 5), ("triton 1.0", 7)):
        recorded = dataclasses.replace(of_another, compiler=compiler)
        monkeypatch.setattr(
            compile_check, "recorded", lambda folder, found=recorded: {job.key: found}
        )
        assert check(kernels.COPY, [90])[0].registers == registers


def test_recorded_reports_are_read_from_every_file(tmp_path):
    reports = [Report("a", 75, key="k1", registers=8), Report("b", 90, key="k2", error="boom")]
    for report in reports:
        (tmp_path / f"{report.name}.jsonl").write_text(report.to_json() + "\n")
    assert compile_check.recorded(tmp_path) == {report.key: report for report in reports}


# ---------------------------------------------------------------- hash

MODULE = '''
from lessons.toolbox.kernels.triton_ import tl, triton

SCALE = tl.constexpr(2.0)


@triton.jit
def helper(x):
    return x * SCALE


@triton.jit
def kernel(x_ptr, out_ptr, N: tl.constexpr):
    """What it does."""
    i = tl.arange(0, N)  # a comment
    tl.store(out_ptr + i, helper(tl.load(x_ptr + i)))
'''


def hash_of(source: str, folder) -> str:
    """The hash of `kernel` in a module with this source."""
    path = folder / f"module_{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return kernel_hash(module.kernel)


@pytest.mark.parametrize(
    "old, new",
    [
        ("# a comment", "# another"),
        ("What it does.", "What it also does."),
        ("SCALE = ", "\n\nSCALE = "),
        ("  i = tl", "  # above\n    i = tl"),
        ("i = tl.arange(0, N)", "i = tl.arange(0,  N)"),
    ],
)
def test_hash_ignores_comments_and_layout(old, new, tmp_path):
    assert MODULE.replace(old, new) != MODULE
    assert hash_of(MODULE.replace(old, new), tmp_path) == hash_of(MODULE, tmp_path)


@pytest.mark.parametrize(
    "old, new",
    [("out_ptr + i,", "out_ptr + i + 1,"), ("x * SCALE", "x + SCALE"), ("(2.0)", "(3.0)")],
)
def test_hash_sees_the_kernel_what_it_calls_and_its_constants(old, new, tmp_path):
    assert hash_of(MODULE.replace(old, new), tmp_path) != hash_of(MODULE, tmp_path)


@needs_triton
def test_a_function_among_the_constexprs_counts_and_compiles():
    """As a default of the kernel, and as a spec names it."""
    plain = KernelSpec(
        "tests.toolbox.kernels_to_compile:hook_kernel",
        {"x_ptr": "*fp32", "out_ptr": "*fp32"},
        {"BLOCK": 128},
    )
    given = dataclasses.replace(plain, constexprs={"BLOCK": 128, "HOOK": kernels.halve_and_add})
    same = dataclasses.replace(plain, constexprs={"BLOCK": 128, "HOOK": kernels.halve})
    assert kernel_hash(kernels.hook_kernel) == kernel_hash(plain) == kernel_hash(same)
    assert kernel_hash(given) != kernel_hash(plain)
    one, two = check_all([plain, given], chips=(90,))
    assert one.error is None and two.error is None
    assert "FFMA" in two.census and "FFMA" not in one.census


def test_hash_is_the_same_everywhere():
    # Recorded once: Python versions, Triton versions and machines must agree, or every proof would
    # look stale.
    assert (
        kernel_hash(kernels.COPY)
        == kernel_hash(kernels.copy_kernel)
        == kernel_hash(kernels.COPY.kernel)
        == "855e8e4044bd2420"
    )


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "spec, message",
    [
        (KernelSpec(kernels.HERE + "nothing", {}), "expected 'package.module:function'"),
        (KernelSpec("tests.toolbox.kernels_to_compile", {}), "expected 'package.module:function'"),
        (
            KernelSpec(kernels.COPY.kernel, {"x_ptr": "*bf16"}, {"BLOCK": 64}),
            r"\['out_ptr', 'n'\] have neither a type",
        ),
        (
            KernelSpec(kernels.COPY.kernel, kernels.COPY.signature, {"BLOCK": 64, "BLOK": 1}),
            r"\['BLOK'\] are no arguments",
        ),
        (
            KernelSpec(
                kernels.COPY.kernel, kernels.COPY.signature, {"BLOCK": 64}, divisible_by_16=("m",)
            ),
            r"\['m'\] are no arguments",
        ),
        (
            KernelSpec(kernels.COPY.kernel, kernels.COPY.signature, {"BLOCK": [1]}),
            r"must be a number, a string.* not \[1\]",
        ),
    ],
)
def test_bad_spec_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        check(spec, [90])


def test_unknown_chip_is_named():
    with pytest.raises(ValueError, match=r"chip 70 is unknown; known: \[75, 80, 89, 90, 100\]"):
        check(kernels.COPY, [70])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "usage"),
        (["lessons.nowhere"], "no module 'lessons.nowhere'"),
        ([kernels.HERE + "nothing"], "lists no kernel 'nothing'"),
    ],
)
def test_command_explains_itself(arguments, message, capsys):
    assert compile_check.main(arguments) == 2
    assert message in capsys.readouterr().err


@needs_triton
def test_command_prints_a_table_and_fails_with_the_compiler(reports, capsys):
    assert compile_check.main([kernels.HERE + "matmul_kernel"]) == 0
    assert "HGMMA" in capsys.readouterr().out
    assert compile_check.main([kernels.HERE + "float8_kernel"]) == 1
    assert "float8_kernel sm_75: " in capsys.readouterr().out


# ---------------------------------------------------------------- CUDA C++

CUDA = (
    'extern "C" __global__ void twice(float* x) { __shared__ float s[64]; '
    "s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); "
    "x[threadIdx.x] = 2.f * s[63 - threadIdx.x]; }"
)


def test_cuda_without_a_compiler_is_not_run(monkeypatch):
    monkeypatch.setattr(nvrtc, "why_not_here", lambda: "needs NVRTC")
    assert [report.error for report in check_cuda(CUDA, [80, 90])] == ["not run: needs NVRTC"] * 2


@needs_triton
@pytest.mark.sample(1, of="compiler")
def test_cuda_compiles_for_every_chip():
    good, bad = check_cuda(CUDA, CHIPS), check_cuda(CUDA.replace("2.f", "two"), [90])
    if (good[0].error or "").startswith("not run"):
        pytest.skip(good[0].error.replace("not run", "NOT RUN"))
    for report in good:
        assert (
            report.fits
            and report.registers >= 4
            and report.shared_bytes == 256
            and report.census["STS"] == 1
        )
    assert 'identifier "two" is undefined' in bad[0].error
