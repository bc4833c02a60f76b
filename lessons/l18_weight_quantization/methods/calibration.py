"""What the linear layers of a model receive on a stated text, and the walk through the model, layer
by layer, that GPTQ and AWQ share.

Neither method trains. Both ask one question of each linear layer: by how much does its output
change when its matrix W becomes Ŵ? For inputs x the answer is

    E |(Ŵ − W) x|² = trace((Ŵ − W) · E[x xᵀ] · (Ŵ − W)ᵀ)

so all that is kept of the text is E[x xᵀ], [K, K], and the mean of |x|, [K], however long the text
is.

Source: Frantar et al. 2022, GPTQ, section 3 (the layer-wise problem).
"""

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.toolbox.model.arguments import check_whole, refuse

# The built-in text: modules of Python's library, one file each in every Python from 3.10 on. The
# embedded models were trained on them, as published models were on the web text that is usual here.
MODULES = (
    *("argparse", "ast", "configparser", "dataclasses", "difflib", "inspect", "ipaddress"),
    *("mailbox", "optparse", "pickle", "random", "smtplib", "socketserver", "tarfile"),
    *("threading", "typing"),
)
WINDOWS, WINDOW = 32, 512  # two windows a module


def calibration_text() -> list[str]:
    """The sources of MODULES, as this Python has them."""
    paths = (importlib.util.find_spec(name).origin for name in MODULES)
    return [Path(path).read_text(encoding="utf-8") for path in paths]


def calibration_windows(tokenizer, count: int = WINDOWS, length: int = WINDOW) -> Tensor:
    """`count` windows of `length` tokens, from all modules in turn: [count, length] int64. Nearly
    all of them begin in the middle of a module, so there are no special tokens. tokenizer: as
    load_tokenizer returns it. Raises ValueError for more windows than the text has.
    """
    check_whole(count=count, length=length)
    quiet = dict(add_special_tokens=False, verbose=False)  # whole modules are longer than a context
    rows = [torch.tensor(tokenizer(text, **quiet)["input_ids"]) for text in calibration_text()]
    cut = [row[: len(row) // length * length].view(-1, length) for row in rows]
    most = sum(map(len, cut))
    if count > most:
        refuse("count", count, f"at most {most} windows of {length} tokens")
    turns = [window[turn] for turn in range(count) for window in cut if turn < len(window)]
    return torch.stack(turns[:count])


@dataclass
class InputStatistics:
    """What a linear layer received. gram: [K, K] float64, the mean of x xᵀ; mean_abs, max_abs: [K]
    float32; rows: how many x there were.
    """

    gram: Tensor
    mean_abs: Tensor
    max_abs: Tensor
    rows: int

    @classmethod
    def of(cls, x: Tensor) -> "InputStatistics":
        """x: [..., K]. The statistics of no x are zeros."""
        x = x.detach().flatten(0, -2).float()
        rows, magnitudes = len(x), x.abs()
        if not rows:  # an expert that no token was sent to
            zeros = x.new_zeros(x.shape[1])
            return cls(zeros.new_zeros(2 * x.shape[1:], dtype=torch.float64), zeros, zeros, 0)
        return cls((x.T @ x).double() / rows, magnitudes.mean(0), magnitudes.amax(0), rows)

    def merged(self, other: "InputStatistics") -> "InputStatistics":
        """The statistics of both texts together."""
        rows = self.rows + other.rows
        share = other.rows / max(rows, 1)
        return InputStatistics(
            self.gram + (other.gram - self.gram) * share,
            self.mean_abs + (other.mean_abs - self.mean_abs) * share,
            torch.maximum(self.max_abs, other.max_abs),
            rows,
        )


def output_error(change: Tensor, gram: Tensor) -> Tensor:
    """How much the output changes: the mean of |change · x|², summed over outputs; a scalar.
    change: [N, K], Ŵ − W; gram: [K, K].
    """
    change = change.to(gram.dtype)
    return ((change @ gram) * change).sum()


def collect(module: nn.Module, run: Callable[[], object]) -> dict[str, InputStatistics]:
    """What each nn.Linear inside `module` receives while `run()` runs, by its name in the
    module.
    """
    linears = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    found = {
        name: InputStatistics.of(part.weight.new_empty(0, part.in_features))
        for name, part in linears.items()
    }
    latest = {"x": None, "statistics": None}  # q, k and v receive one tensor: it is summed up once

    def seen(name: str, linear: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0] is not latest["x"]:
            latest.update(x=inputs[0], statistics=InputStatistics.of(inputs[0]))
        found[name] = found[name].merged(latest["statistics"])

    hooks = [part.register_forward_pre_hook(partial(seen, name)) for name, part in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


Replace = Callable[[nn.Module, dict[str, InputStatistics]], nn.Module]


@torch.no_grad()
def layer_by_layer(model: Decoder, windows: Tensor, replace: Replace) -> Decoder:
    """A twin of the model, each decoder layer replaced by replace(layer, statistics of its linear
    layers). windows: [count, length] int64.

    The statistics of a layer come from the replaced layers before it, so a layer can make up for
    some of the error that it receives. Only one layer's statistics are in memory.
    """
    if windows.ndim != 2 or not windows.numel():
        refuse("windows", tuple(windows.shape), "tokens, [count, length]")
    windows = windows.to(model.device)
    attend = whole_sequence(model, windows.shape[1], attention_torch)
    received, layers = [model.embed_tokens(window) for window in windows], []
    for index, layer in enumerate(model.layers):
        run = partial(run_layer, layer, received, partial(attend, index))
        layers.append(replace(layer, collect(layer, run)))
        received = run_layer(layers[-1], received, partial(attend, index))
    twin = copy.copy(model)
    twin._modules = {**model._modules, "layers": nn.ModuleList(layers)}
    return twin


def run_layer(layer: nn.Module, received: list[Tensor], attend: Callable) -> list[Tensor]:
    """received: one [length, hidden_size] a window -> the same of the next layer."""
    return [layer(x, attend) for x in received]
