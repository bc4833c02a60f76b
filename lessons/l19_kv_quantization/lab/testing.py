"""What the tests of this lesson share: caches of codes whose pages are in random order, and
generation over codes in its plainest form.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, whole_sequence
from lessons.l12_paged_kv.lab.testing import DEVICE, PagedInputs
from lessons.l19_kv_quantization.formats import RowFormat
from lessons.toolbox.proof.inputs import apart

NAN_CODE = 0x7F  # in E4M3


def skip_where(name: str, has_format) -> None:
    """Skip a test of a chip's own E4M3 where it has none. has_format: has_e4m3 or writes_e4m3."""
    if name == "fp8" and not has_format(DEVICE):
        oldest = {"has_e4m3": "8.9", "writes_e4m3": "9.0"}[has_format.__name__]
        pytest.skip(f"NOT RUN: needs a GPU of compute capability {oldest} or newer, or none")


class CodedInputs(NamedTuple):
    """The arguments of quantized_prefill up to the format, in their order."""

    q: Tensor
    k_codes: Tensor
    v_codes: Tensor
    k_scales: Tensor
    v_scales: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor

    @property
    def decode(self) -> tuple[Tensor, ...]:
        """The arguments of quantized_decode up to the format."""
        return self[:6] + self[7:]


def coded(format: RowFormat, inputs: PagedInputs) -> CodedInputs:
    """`paged` inputs with K and V as codes, all `apart`. Slots that were never written hold NaN
    scales.
    """
    q, k_cache, v_cache, table, *rest = inputs
    (k_codes, k_scales), (v_codes, v_scales) = (coded_cache(format, x) for x in (k_cache, v_cache))
    q, k_codes, table, v_codes = apart(q, k_codes, table, v_codes)  # codes by 16 bytes
    return CodedInputs(q, k_codes, v_codes, k_scales, v_scales, table, *rest)


def coded_cache(format: RowFormat, cache: Tensor) -> tuple[Tensor, Tensor]:
    """cache: [num_blocks, block_size, Hkv, D], NaN where nothing was written -> codes and scales,
    the slots of a head side by side.
    """
    written = cache.isfinite().all(-1, keepdim=True)
    codes, scales = format.quantize(torch.where(written, cache, 0.0))
    codes[~written[..., 0]] = NAN_CODE
    scales[~written[..., 0]] = torch.nan
    by_head = scales.permute(2, 0, 1, 3).contiguous()
    return codes, by_head.permute(1, 2, 0, 3)


def attention_over(format: RowFormat, q, k, v, *arguments, **options) -> Tensor:
    """Lesson 2's attention to what is left of k and v after their codes: q: [T, Hq, D]; k, v: [T,
    Hkv, D] -> [T, Hq, D].
    """
    k, v = (format.dequantize(*format.quantize(x)) for x in (k, v))
    return attention(q, k, v, *arguments, **options)


@torch.inference_mode()
def naive_answers(
    model: Decoder, prompts: list[list[int]], limits: list[int], format: RowFormat
) -> list[list[int]]:
    """The definition of generation over a quantized cache: one request at a time, everything
    computed again for each token, and every K and V as its codes mean it. Greedy.
    """
    answers = []
    over_codes = partial(attention_over, format)
    for prompt, limit in zip(prompts, limits):
        tokens = list(prompt)
        for _ in range(limit):
            attend = whole_sequence(model, len(tokens), over_codes)
            hidden = model(torch.tensor(tokens, device=model.device), attend)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
            if tokens[-1] in model.config.eos_token_ids:
                break
        answers.append(tokens[len(prompt) :])
    return answers
