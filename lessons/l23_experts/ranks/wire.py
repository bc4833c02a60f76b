"""What a token's row is on the wire: 16 bits as it is, or FP8 with a scale for each 128 values.

    message = write_message(Float8(), rows, experts, weights)      # bytes: [R, n]
    rows, experts, weights = read_message(Float8(), message, like=x, weights_like=weights)

A row travels together with the experts that it is sent to and the router's weights for them, in one
message of bytes, so that one exchange carries all three. DeepEP sends rows in FP8 to the experts
and results back in 16 bits: a result is added to others, and its rounding would stay.

Source: DeepSeek-V3 technical report 2024, section 3.2.2; DeepEP's README (use_fp8).
"""

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import TILE
from lessons.l23_experts.more import fp8, naive_fp8

ID = torch.int32  # an expert's number on the wire


class Plain:
    """Rows as they are."""

    def row_bytes(self, size: int, dtype: torch.dtype) -> int:
        """Bytes of a row of `size` values."""
        return size * dtype.itemsize

    def pack(self, x: Tensor) -> Tensor:
        """x: [R, H] -> bytes: [R, row_bytes]."""
        return as_bytes(x)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """packed: bytes of R rows -> [R, H] in the size and dtype of the rows of `like`: [T, H]."""
        return from_bytes(packed, like.dtype)


class Float8:
    """E4M3, and a float32 scale for each 128 values of a row: half the bytes of 16 bits, and three
    percent more.
    """

    def row_bytes(self, size: int, dtype: torch.dtype) -> int:
        """As Plain.row_bytes, for any dtype of the row."""
        return size + -(-size // TILE) * torch.float32.itemsize

    def pack(self, x: Tensor) -> Tensor:
        """As Plain.pack: a row's codes, then its scales."""
        values, scales = quantize_groups(x)
        return torch.cat([as_bytes(values), as_bytes(scales)], 1)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """As Plain.unpack."""
        values, scales = packed.tensor_split([like.shape[1]], dim=1)
        values = from_bytes(values, torch.float8_e4m3fn)
        return naive_fp8.dequantized(values, from_bytes(scales, torch.float32)).to(like.dtype)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [R, H] -> codes [R, H] float8_e4m3fn and scales [R, ⌈H / 128⌉] float32; by lesson 23's
    kernel on a GPU that has FP8.
    """
    has_fp8 = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)
    return (fp8 if has_fp8 else naive_fp8).quantize_groups(x)


def write_message(form: Plain | Float8, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Rows with their experts and weights, in bytes: [R, row_bytes + 4 k + bytes of k weights]. x:
    [R, H]; experts: [R, k] int64; weights: [R, k].
    """
    return torch.cat([form.pack(x), as_bytes(experts.to(ID)), as_bytes(weights)], 1)


def read_message(
    form: Plain | Float8, message: Tensor, like: Tensor, weights_like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What write_message wrote: x: [R, H], experts: [R, k] int64, weights: [R, k]. like: [T, H]
    and weights_like: [T, k] have the sizes and dtypes.
    """
    row = form.row_bytes(like.shape[1], like.dtype)
    ends = [row, row + weights_like.shape[1] * ID.itemsize]
    rows, experts, weights = message.tensor_split(ends, dim=1)
    experts = from_bytes(experts, ID).long()
    return form.unpack(rows, like), experts, from_bytes(weights, weights_like.dtype)


def as_bytes(x: Tensor) -> Tensor:
    """x: [R, n] -> uint8: [R, bytes of n values]."""
    return x.flatten().view(torch.uint8).view(len(x), x.shape[1] * x.element_size())


def from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8: [R, n] -> the values that as_bytes was given."""
    # a copy, because a column of a wider tensor may begin where no number of this dtype can
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)
