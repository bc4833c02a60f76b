"""The emulator counts what a GPU's memory would see: sectors of 32 bytes and bank conflicts."""

import pytest
import torch

from lessons.toolbox.cuda_cpu import compiling
from lessons.toolbox.cuda_cpu.emulator import counting

pytestmark = pytest.mark.skipif(
    bool(compiling.why_not_here()), reason=f"NOT RUN: {compiling.why_not_here()}"
)


def sites_of(run, body, *arguments, block=32, **options):
    code = 'extern "C" __global__ void k(const float* x, float* y) {\n    int i = threadIdx.x;\n'
    with counting() as sites:
        run(f"{code}    {body}\n}}\n", *arguments, block=block, **options)
    return sites


@pytest.mark.parametrize("stride, sectors", [(0, 1), (1, 4), (2, 8), (4, 16), (8, 32), (9, 32)])
def test_sectors_of_coalesced_and_strided_loads(stride, sectors, run):
    """A warp of 4-byte loads: 128 bytes in a row are 4 sectors, a stride of 8 a sector each."""
    x, y = torch.zeros(64 * 9 + 1), torch.zeros(64)
    load, store = sites_of(run, f"y[i] = x[{stride} * i];", x, y, block=64)
    assert (load.access, load.memory, load.line, load.size_bytes) == ("load", "global", 3, 4)
    want = {0: 2, 9: 64}.get(stride, 2 * sectors)
    assert load.requests == 2 and load.sectors == want and store.sectors == 8


def test_sectors_of_wide_loads(run):
    x, y = torch.zeros(128), torch.zeros(32)
    load, _ = sites_of(run, "y[i] = reinterpret_cast<const float4*>(x)[i].y;", x, y)
    assert load.requests == 1 and load.size_bytes in (4, 16) and load.sectors == 16


@pytest.mark.parametrize("padding, conflicts", [(0, 31), (1, 0), (2, 1), (16, 15)])
def test_bank_conflicts_of_a_column_of_a_tile(padding, conflicts, run):
    """32 lanes read a column: all of one bank without padding, each of its own with one word."""
    x, y = torch.zeros(1024), torch.zeros(32)
    _, store, load, _ = sites_of(
        run,
        f"__shared__ float tile[32][32 + {padding}];\n"
        "    for (int j = 0; j < 32; j++) tile[j][i] = x[32 * j + i];\n"
        "    __syncwarp();\n    y[i] = tile[i][5];",
        x,
        y,
    )
    assert (load.name, load.memory, load.line) == ("tile", "shared", 6)
    assert load.conflicts == conflicts and load.turns == 1 + conflicts
    assert store.conflicts == 0 and store.requests == 32


def test_a_word_for_all_lanes_and_wide_words_conflict_with_nobody(run):
    x, y = torch.zeros(128), torch.zeros(32)
    body = (
        "__shared__ float4 a[32];\n    a[i] = reinterpret_cast<const float4*>(x)[i];\n"
        "    __syncwarp();\n    y[i] = a[3].x;"
    )
    loaded, stored, one, _ = sites_of(run, body, x, y)
    assert (stored.size_bytes, stored.turns, stored.conflicts) == (16, 4, 0)
    assert one.turns == 1 and one.conflicts == 0 and loaded.sectors == 16
