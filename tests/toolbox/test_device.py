"""The switch of `import lessons`, the convention for kernel files, and the doctor. Each import
order gets its own process.
"""

import json
import os
import platform
import re
import subprocess
import sys
import types

import pytest
import torch

from lessons.toolbox.gpu import nvrtc
from lessons.toolbox.measure import device


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a fresh process without TRITON_INTERPRET, unless it is given."""
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        env=variables | {"OMP_NUM_THREADS": "1"} | environment,
    )


KERNEL = """
import inspect, linecache, sys
from lessons.toolbox.kernels.triton_ import tl, triton
LINES = '''
@triton.autotune([triton.Config({"N": 8}, num_warps=4)], key=[])
@triton.jit
def kernel(out_ptr, N: tl.constexpr = 8):
    tl.store(out_ptr + tl.arange(0, N), tl.full([N], 1.5, tl.bfloat16))
'''
linecache.cache["kernel.py"] = (len(LINES), None, LINES.splitlines(True), "kernel.py")
exec(compile(LINES, "kernel.py", "exec"))
"""


@pytest.mark.skipif(device.has_gpu(), reason="NOT RUN: this machine has a CUDA device")
def test_without_a_gpu_kernels_are_interpreted():
    assert device.interpreting()
    done = python(
        "import lessons, os, sys; print(os.environ.get('TRITON_INTERPRET'), 'triton' in "
        "sys.modules)"
    )
    assert done.stdout.split() == ["1", "False"] and not done.stderr


@pytest.mark.gpu
def test_with_a_gpu_kernels_are_compiled():
    assert (
        python("import lessons, os; print(os.environ.get('TRITON_INTERPRET'))").stdout.strip()
        == "None"
    )


@pytest.mark.parametrize("value", ["0", "1"])
def test_your_own_choice_stays(value):
    done = python(
        "import lessons, os; print(os.environ['TRITON_INTERPRET'])", TRITON_INTERPRET=value
    )
    assert done.stdout.strip() == value


@pytest.mark.skipif(
    device.has_gpu() or not device.has_triton(), reason="NOT RUN: needs Triton and no CUDA device"
)
@pytest.mark.sample(3, of="processes")
def test_importing_triton_first_is_explained():
    done = python("import triton, lessons; import lessons.toolbox.kernels.triton_")
    assert "RuntimeWarning: triton was imported before lessons" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: triton was imported before its interpreter was switched on: put `import "
        "lessons` first"
    )


@pytest.mark.sample(3, of="processes")
def test_kernel_file_imports_without_triton_and_says_so_at_the_launch():
    use = "print(triton.cdiv(7, 2), triton.next_power_of_2(33))\nkernel[(1,)](None)"
    done = python("import sys; sys.modules['triton'] = None" + KERNEL + use, TRITON_INTERPRET="1")
    assert done.stdout.split() == ["4", "64"]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "lessons.toolbox.kernels.triton_.TritonMissing: Triton is not installed, so kernel "
        "'kernel' cannot run: on Linux `pip install triton`"
    )


@pytest.mark.skipif(not device.has_triton(), reason="NOT RUN: needs Triton")
@pytest.mark.sample(3, of="processes")
def test_kernel_file_runs_mended_in_the_interpreter():
    code = (
        KERNEL + "import torch; out = torch.zeros(8, dtype=torch.bfloat16)\n"
        "kernel[(1,)](out); print(out.sum().item())"
    )
    done = python(code, TRITON_INTERPRET="1")
    assert done.stdout.strip() == "12.0", done.stderr  # a bfloat16 constant needs a patch


def test_device_and_dtype_agree():
    assert device.default_device().type == ("cuda" if device.has_gpu() else "cpu")
    x = torch.ones(4, device=device.default_device(), dtype=device.default_dtype())
    device.synchronize(x.device)
    assert (x + x).sum().item() == 8


@pytest.mark.parametrize(
    "capability, dtype",
    [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_dtype_follows_the_gpu(capability, dtype, monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert device.default_dtype() == dtype


def test_fingerprint_is_json_and_keeps_the_machine_private():
    facts = device.fingerprint()
    text = json.dumps(facts)
    assert (
        facts["torch"] == torch.__version__
        and facts["cores"] >= 1
        and re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
    )
    assert platform.node() not in text and "/" not in text.replace(facts["cpu"], "")


def test_versions_compare_by_number():
    assert device._release("2.13.0+cpu") == (2, 13) > device._release("2.9.1")
    assert device._release("3.0rc1") == device._release("3.0") == (3, 0)


def test_doctor_says_ready(capsys):
    assert device.doctor() is True
    printed = capsys.readouterr().out
    assert "ready" in printed and torch.__version__ in printed
    for what, _ in device.what_cannot_run_here():
        assert what.split()[0] in printed


def test_doctor_names_each_missing_package_and_its_remedy(capsys, monkeypatch):
    found = device.version_of
    monkeypatch.setattr(
        device,
        "version_of",
        lambda package: {"numpy": None, "torch": "2.3.1"}.get(package, found(package)),
    )
    assert device.doctor() is False
    printed = capsys.readouterr().out
    assert (
        "numpy is not installed; run `make setup`" in printed
        and "pip install -U 'torch>=2.11'" in printed
    )


def test_what_cannot_run_is_told_for_an_older_gpu(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    monkeypatch.setattr(device, "device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    missing = dict(device.what_cannot_run_here())
    assert (
        "8.0, this needs 8.9" in missing["float8 (E4M3)"]
        and "bfloat16 on tensor cores" not in missing
    )


def test_what_cannot_run_is_told_without_triton_or_with_an_unknown_one(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    monkeypatch.setattr(device, "interpreting", lambda: True)
    monkeypatch.setattr(device, "has_triton", lambda: False)
    monkeypatch.setattr(nvrtc, "why_not_here", lambda: "needs NVRTC")
    missing = dict(device.what_cannot_run_here())
    assert "pip install triton" in missing["Triton kernels, in any form"]
    assert "they are not compiled either" in missing["Gluon kernels"]
    assert "needs NVRTC" in missing["CUDA C++ kernels"] and len(missing) == 4
    monkeypatch.setattr(device, "has_triton", lambda: True)
    monkeypatch.setattr(device, "version_of", lambda package: "9.9.0")
    missing = dict(device.what_cannot_run_here())
    assert "triton 9.9.0 is not among 3.6, 3.7" in missing["a faithful interpreter, perhaps"]
    assert "still compiles them" in missing["Gluon kernels"]


def test_doctor_survives_without_torch():
    code = (
        "import sys, types; sys.modules['torch'] = None\n"
        "from lessons.toolbox.measure import device\n"
        "found = device.version_of; device.version_of = lambda p: None if p == 'torch' else "
        "found(p)\nprint(device.doctor())"
    )
    done = python(code)
    assert "torch is not installed" in done.stdout and done.stdout.strip().endswith("False"), (
        done.stderr
    )


def test_synchronize_waits_for_the_named_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch, "cuda", types.SimpleNamespace(synchronize=waited.append))
    device.synchronize("cpu")
    device.synchronize("cuda:1")
    assert waited == ["cuda:1"]
