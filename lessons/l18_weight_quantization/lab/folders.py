"""What a folder of someone else may have that would make a line of behaviour.py false: another
vocabulary, a token at the end of every text, weights of 32 bits, a chat template.
"""

import math

import torch
from torch import Tensor

from lessons.l18_weight_quantization.lab.behaviour_tasks import Item
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.checkpoint import SMALL_FILES, find_folder
from lessons.toolbox.model.stored import catalog

BITS = dict(F64=64, F32=32, F16=16, BF16=16)  # safetensors' names; `catalog` refuses others


def prompt_tokens(tokenizer, text: str) -> list[int]:
    """The tokens of a text that goes on: what a tokenizer puts in front stays, what it puts at the
    end is left out, because a model that reads it begins another text.
    """
    tokens = tokenizer(text)["input_ids"]
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    for first in range(len(tokens) - len(bare) + 1):
        if tokens[first : first + len(bare)] == bare:
            return tokens[: first + len(bare)]
    return tokens


def can_be_asked(tokenizer, found: list[Item]) -> list[Item]:
    """Those whose prompt the tokenizer gives back: one that drops line ends, or writes all in lower
    case, asks another question.
    """

    def comes_back(prompt: str) -> bool:
        text = tokenizer.decode(prompt_tokens(tokenizer, prompt), skip_special_tokens=True)
        return text.lstrip(" ") == prompt.lstrip(" ")  # some take a first blank for their own

    return [item for item in found if comes_back(item.prompt)]


def check_vocabulary(name: str, windows: Tensor, rows: int) -> None:
    """Raise ValueError unless a model's embedding, of so many rows, has all tokens of its own
    tokenizer. windows: [count, length] int64, of a text.
    """
    if (largest := int(windows.max())) >= rows:
        accepted = f"token ids below {rows}, the rows of the embedding in {name}"
        refuse("tokenizer", f"token {largest}", accepted)


def check_draft(name: str, windows: Tensor, own: Tensor) -> None:
    """Raise ValueError unless a draft's tokenizer cuts a text into the tokens of the model's.
    windows, own: [count, length] int64, by the model's and by the draft's.
    """
    if not torch.equal(windows, own):
        accepted = "a folder whose tokenizer cuts the same text into the same tokens as the model's"
        refuse("--draft", name, accepted)


def bits_of(name: str) -> float:
    """Stored bits a weight of a checkpoint that is not quantized, over its matrices, embeddings
    left out.
    """
    bits = numbers = 0
    for each in catalog(find_folder(name, SMALL_FILES)).values():
        if len(each.shape) > 1 and "embed" not in each.name and "lm_head" not in each.name:
            bits += BITS[each.dtype] * math.prod(each.shape)
            numbers += math.prod(each.shape)
    return bits / numbers
