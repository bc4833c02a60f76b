"""What the tests of CUDA C++ share."""

import pytest

from lessons.toolbox.kernels.cuda_cpp import CudaKernel


@pytest.fixture
def run(tmp_path):
    """run(code, *arguments, grid=1, block=32, shared=0): the kernel `k` of a .cu file."""

    def launch(code, *arguments, grid=1, block=32, shared=0):
        file = tmp_path / "small.cu"
        file.write_text(code)
        CudaKernel(file, "k")[grid, block, shared](*arguments)

    return launch
