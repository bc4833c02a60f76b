"""What NVRTC is given to write into."""

import pytest

from lessons.toolbox.gpu import nvrtc

SOURCE = 'extern "C" __global__ void nothing() {}'


@pytest.mark.skipif(bool(nvrtc.why_not_here()), reason="NOT RUN: NVRTC is missing")
def test_an_empty_log_is_written_into_no_byte_of_the_process():
    """Python has each byte once: an object of one byte, written into, is that byte everywhere."""
    code, said = nvrtc.cubin_of(SOURCE, "nothing.cu", 90)
    assert nvrtc.ptx_of(SOURCE, "nothing.cu", 90)
    assert code.startswith(b"\x7fELF") and "error" not in said
    assert [bytes([number])[0] for number in range(256)] == list(range(256))


@pytest.mark.parametrize("size", [1, 2, 100])
def test_room_is_an_object_of_its_own(size):
    assert len(nvrtc.room_for(size)) >= size and nvrtc.room_for(size) is not nvrtc.room_for(size)
