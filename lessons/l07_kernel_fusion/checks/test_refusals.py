"""What a launch may not do: overwrite rows that share memory, hold copies of a short row, read a
device without data.
"""

import pytest
import torch

from lessons.l07_kernel_fusion import optimized
from lessons.l07_kernel_fusion.rows import MAX_ROW
from lessons.toolbox.proof.refusals import assert_message

ONE_ROW = torch.zeros(1, 8)


def test_rows_that_share_memory_are_no_residual():
    """x may be expanded, because it is only read."""
    given = dict(x=torch.zeros(3, 8), weight=torch.ones(8), eps=1e-5)
    message = (
        "residual: got shape .3, 8. with strides .0, 1.; accepted: elements that do not overlap"
    )
    assert_message(optimized.add_rms_norm, given | dict(residual=ONE_ROW.expand(3, 8)), message)
    windows = torch.zeros(99).as_strided((3, 8), (4, 1))
    assert_message(optimized.add_rms_norm, given | dict(residual=windows), "residual: .* overlap")


META = torch.zeros(3, 8, device="meta")
WITHOUT_DATA = {
    "rms_norm": dict(x=META, weight=META[0], eps=1e-5),
    "add_rms_norm": dict(x=META, residual=META, weight=META[0], eps=1e-5),
    "silu_mul": dict(gate=META, up=META),
    "qk_norm": dict(q=META[None], k=META[None], q_weight=META[0], k_weight=META[0], eps=1e-5),
    "softmax": dict(x=META),
}


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_a_device_without_data_is_refused(name):
    assert_message(getattr(optimized, name), WITHOUT_DATA[name], "not meta")


class Recorder:
    """Stands for a kernel and keeps the options of its launches."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append(options)


@pytest.mark.parametrize("name", ["add_rms_norm", "silu_mul"])
@pytest.mark.parametrize("size", [1, 8, 32, 33, 64, 100, 128, 2048, 4096, MAX_ROW])
def test_no_warp_holds_copies_of_a_row(name, size, monkeypatch):
    """A warp has 32 threads. With more warps than the row has values for, one would load a residual
    that another already stored.
    """
    recorder = Recorder()
    monkeypatch.setattr(optimized, f"{name}_kernel", recorder)
    x = torch.zeros(2, size)
    if name == "add_rms_norm":
        optimized.add_rms_norm(x, x.clone(), torch.ones(size), 1e-5)
    else:
        optimized.silu_mul(x, x)
    (launch,) = recorder.launches
    warps = launch["num_warps"]
    assert warps in (1, 2, 4, 8, 16, 32)
    assert warps == 1 or 32 * warps <= launch["BLOCK"]
    assert warps >= 4 or launch["BLOCK"] < 128
