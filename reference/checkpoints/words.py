"""Codes of a few bits in the 32-bit words of a file, and back: one stream of bits, which begins at
the lowest bit of the first word.

Where 32 is a multiple of the bits, a word holds whole codes. Three is not such a number: 32 codes
fill three words, and two of the codes are split over two words.
"""

import torch
from torch import Tensor

WORD = 32  # bits of a word, and the codes after which every width begins a new word


def to_words(codes: Tensor, bits: int) -> Tensor:
    """codes: [rows, n] below 2^bits -> [rows, n · bits / 32] int32, the first code in the lowest
    bits. n must be a multiple of 32 / bits, and bits a divisor of 32.
    """
    each = WORD // bits
    shifts = torch.arange(0, WORD, bits, device=codes.device)
    words = (codes.long().unflatten(-1, (-1, each)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def from_words(words: Tensor, bits: int) -> Tensor:
    """The inverse of to_words: [rows, words] int32 -> [rows, words · 32 / bits] uint8. Bits that do
    not divide 32 need a multiple of `bits` words.
    """
    if WORD % bits:
        return from_stream(words, bits)
    shifts = torch.arange(0, WORD, bits, device=words.device, dtype=torch.int32)
    codes = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2).to(torch.uint8)


def from_stream(words: Tensor, bits: int) -> Tensor:
    """[rows, m · bits] int32 -> [rows, m · 32] uint8, for codes that two words may share."""
    runs = words.long().unflatten(-1, (-1, bits)) & 2**WORD - 1
    codes = []
    for first_bit in range(0, WORD * bits, bits):
        word, shift = divmod(first_bit, WORD)
        code = runs[..., word] >> shift
        if shift + bits > WORD:  # its upper bits are the lowest of the next word
            code = code | runs[..., word + 1] << WORD - shift
        codes.append(code & 2**bits - 1)
    return torch.stack(codes, dim=-1).flatten(-2).to(torch.uint8)
