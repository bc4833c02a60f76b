"""What a launch asks of CUDA's driver, through cuda-bindings, which PyTorch's CUDA builds bring.

Written for cuda-bindings 12 and 13. Every call returns (status, value), and `done` unpacks it.
"""

from functools import cache

import numpy as np

WITHOUT_ASKING = 48 * 1024  # bytes of shared memory that a block gets without an attribute


def done(answer: tuple):
    """The value of a driver's answer, or None. Raises RuntimeError, one line, for an error."""
    from cuda.bindings import driver

    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"the CUDA driver says {status.name}: {(text or b'').decode()}")
    return values[0] if values else None


@cache
def context(device_index: int):
    """The context of a device in which PyTorch works, too: its primary one."""
    from cuda.bindings import driver

    done(driver.cuInit(0))
    return done(driver.cuDevicePrimaryCtxRetain(done(driver.cuDeviceGet(device_index))))


def function_of(cubin: bytes, name: str, device_index: int):
    """Kernel `name` of machine code, on a device. It stays loaded while the process runs."""
    from cuda.bindings import driver

    done(driver.cuCtxSetCurrent(context(device_index)))
    module = done(driver.cuModuleLoadData(cubin))
    return done(driver.cuModuleGetFunction(module, name.encode()))


def launch(function, device_index, grid, block, shared_bytes: int, stream: int, values) -> None:
    """Put a kernel on a stream. grid, block: three numbers; stream: its address, as PyTorch gives
    it; values: a NumPy scalar for each parameter, a pointer as uint64. Raises RuntimeError.
    """
    from cuda.bindings import driver

    # at each launch, because a thread that has not launched anything yet has no context
    done(driver.cuCtxSetCurrent(context(device_index)))
    if shared_bytes > WITHOUT_ASKING:
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        done(driver.cuFuncSetAttribute(function, most, shared_bytes))
    kept = [np.array(value) for value in values]  # the driver copies them before it returns
    addresses = np.array([value.ctypes.data for value in kept], dtype=np.uint64)
    where = addresses.ctypes.data
    done(driver.cuLaunchKernel(function, *grid, *block, shared_bytes, stream, where, 0))
