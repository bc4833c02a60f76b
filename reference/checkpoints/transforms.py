"""Rotations that a checkpoint of compressed-tensors asks for as the model runs (QuaRot, SpinQuant,
QuIP#): its transform_config.

    {"config_groups": {"R4": {"type": "hadamard", "apply": [
        {"targets": ["re:.*down_proj$"], "location": "input"},
        {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": true}]}}}

Where a rotation is applied decides what is left to do:

    weight_input, weight_output   nothing: the file's matrices already hold it
    input, output                 each token is multiplied by M / √n before, or after, the matrix
    q_attn with k_cache           nothing: q and k turn alike, and no score changes. It is for
                                  caches that are rounded, and a file that rounds its cache is
                                  refused.

M has entries ±1. It is Sylvester's matrix ("hadamard") or a random one ("random-hadamard"), which
the file holds beside the layer, `…down_proj.R4_input.weight`, or beside another layer of the same
rotation. With head_dim a token is cut into blocks of that many numbers. "randomize" shuffles rows
and columns (`perm`). Lesson 19 says why to rotate.

Sources: compressed-tensors, transform/transform_args.py, factory/hadamard.py, utils/matrix.py.
"""

import re
from collections import Counter
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l03_kv_cache.arguments import DECODE_DTYPES
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.l19_kv_quantization.activations.hadamard import hadamard, is_known, rotate
from lessons.l19_kv_quantization.activations.rotations import RotatedInput, RotatedOutput
from lessons.l19_kv_quantization.formats import wide
from lessons.toolbox.model.arguments import is_whole, refuse, shown
from lessons.toolbox.model.places import moves_rows, stored_name
from reference.checkpoints.codes import KEPT_DENSE, Codes
from reference.checkpoints.config_keys import Config
from reference.checkpoints.layouts import FLOATS
from reference.checkpoints.per_layer import is_meant

KINDS = ("hadamard", "random-hadamard")
IN_THE_FILE = ("weight_input", "weight_output")
ONLINE = ("input", "output")
OF_ATTENTION = ("q_attn", "k_cache")
SCHEME = ("type", "apply", "randomize", "head_dim", "requires_grad", "precision")
APPLY = ("targets", "location", "inverse", "ignore")


class Turn(NamedTuple):
    """One rotation at one place of some layers, as the model runs."""

    group: str  # its name in the config, and in the names of its tensors
    location: str  # of ONLINE, or of OF_ATTENTION, where nothing is left to do
    is_inverse: bool
    kind: str
    head_dim: int | None
    is_shuffled: bool
    targets: tuple[str, ...]
    ignore: tuple[str, ...]


def read_turns(config: Config) -> list[Turn]:
    """Those of a transform_config that are in no matrix of the file. Raises ValueError."""
    said = config.get("transform_config") or {}
    groups = said.get("config_groups") if isinstance(said, dict) else None
    if not said:
        return []
    if not isinstance(groups, dict) or said.keys() - {"config_groups"}:
        refuse("quantization_config.transform_config", said, "an object of config_groups")
    found = []
    for name, scheme in groups.items():
        within = f"transform_config.{name}"
        check(scheme, SCHEME, within)
        if scheme.get("type") not in KINDS:
            refuse(f"{within}.type", scheme.get("type"), " or ".join(KINDS))
        head_dim = scheme.get("head_dim")
        if head_dim is not None and not is_whole(head_dim, 1, 2**16):
            refuse(f"{within}.head_dim", head_dim, "a positive whole number, or null")
        shared = scheme["type"], head_dim, bool(scheme.get("randomize"))
        applied = scheme.get("apply") or []
        for one in applied if isinstance(applied, list) else [applied]:
            check(one, APPLY, within)
        check_attention(applied, within)
        found += [turn(name, one, shared) for one in applied if one["location"] not in IN_THE_FILE]
    return found


def check(found: Config, known: tuple[str, ...], within: str) -> None:
    """Raise ValueError for what is no object, or has a key that could change the result."""
    if not isinstance(found, dict):
        refuse(within, found, f"an object of {', '.join(known)}")
    if unknown := found.keys() - set(known):
        raise ValueError(f"{within}: got {shown(min(unknown))}; accepted: {', '.join(known)}")
    for key in ("inverse", "randomize"):
        if not isinstance(found.get(key) or False, bool):
            refuse(f"{within}.{key}", found[key], "true or false")
    for key in ("targets", "ignore"):
        names = found.get(key) or []
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            refuse(f"{within}.{key}", found[key], "a list of names")
    if "location" in known:
        places = (*IN_THE_FILE, *ONLINE, *OF_ATTENTION)
        if found.get("location") not in places:
            refuse(f"{within}.location", found.get("location"), ", ".join(places))


def check_attention(applied: list[Config], within: str) -> None:
    """Raise ValueError unless q and k turn alike, so that their product stays."""
    of_q, of_k = (
        [{**one, "location": ""} for one in applied if one["location"] == place]
        for place in OF_ATTENTION
    )
    if of_q != of_k:
        raise ValueError(f"{within}: got q_attn and k_cache that differ; accepted: both alike")


def turn(name: str, one: Config, shared: tuple) -> Turn:
    """A Turn. shared: kind, head_dim and randomize of its scheme."""
    targets, ignore = (
        (found,) if isinstance(found, str) else tuple(found or ())
        for found in (one.get("targets"), one.get("ignore"))
    )
    return Turn(name, one["location"], bool(one.get("inverse")), *shared, targets, ignore)


# ---------------------------------------------------------------- what one does


class Rotation:
    """x: [T, K] -> [T, K] in x's dtype: every n numbers of a token times matrix / √n. matrix: [n,
    n], entries ±1; shuffle: [n], which of its rows and columns comes at each place, or None.
    """

    def __init__(self, matrix: Tensor, is_inverse: bool, shuffle: Tensor | None = None):
        self.n = len(matrix)
        self.shuffle, self.back = shuffle, None if shuffle is None else shuffle.argsort()
        # What is between the two shuffles, from the left: x · signs · H · signs, or x · dense.
        self.signs = signs_of(matrix)
        if self.signs is not None and is_inverse:
            self.signs = self.signs[::-1]
        self.dense = (matrix.T if is_inverse else matrix).contiguous()

    def to(self, device: torch.device) -> "Rotation":
        """The same on another device."""
        twin = copy(self)
        if self.shuffle is not None:
            twin.shuffle, twin.back = self.shuffle.to(device), self.back.to(device)
        if self.signs is not None:
            twin.signs = tuple(x if x is None else x.to(device) for x in self.signs)
        twin.dense = self.dense.to(device)
        return twin

    def __call__(self, x: Tensor) -> Tensor:
        by_kernel = x.is_cuda and self.signs is not None and x.dtype in DECODE_DTYPES
        blocks = x.reshape(-1, self.n)
        if self.back is not None:
            blocks = blocks[:, self.back]
        blocks = self.by_kernel(blocks) if by_kernel else self.by_matrix(blocks)
        if self.shuffle is not None:
            blocks = blocks[:, self.shuffle]
        return blocks.view(x.shape)

    def by_matrix(self, blocks: Tensor) -> Tensor:
        """Naive: [T, n] -> [T, n] in its dtype."""
        numbers = wide(blocks)
        out = numbers @ self.dense.to(numbers.dtype) / self.n**0.5
        return out.to(blocks.dtype)

    def by_kernel(self, blocks: Tensor) -> Tensor:
        """Optimized, where the matrix is lesson 19's with signs: [T, n] -> [T, n] in its dtype."""
        before, after = self.signs
        blocks = rotate(blocks if before is None else blocks * before.to(blocks.dtype))
        return blocks if after is None else blocks * after.to(blocks.dtype)


def signs_of(matrix: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    """a: [n] and b: [n] of ±1 with matrix = diag(a) · H · diag(b) and lesson 19's symmetric H; each
    None if all are 1. None alone: there are no such signs, because the matrix is another one.
    """
    n = len(matrix)
    if n & (n - 1) or not is_known(n):  # H is symmetric for powers of two
        return None
    plain = hadamard(n).to(matrix.device, matrix.dtype)
    after = matrix[0] * plain[0]
    before = (matrix * after)[:, 0] * plain[:, 0]
    is_same = torch.equal(before[:, None] * plain * after, matrix)
    if not is_same:
        return None
    before, after = (None if bool((signs == 1).all()) else signs for signs in (before, after))
    return before, after


# ---------------------------------------------------------------- a model with them


class Matrices:
    """The rotations' tensors in a file, read and noted as taken. A rotation of one size is stored
    once, beside the first layer that has it.
    """

    def __init__(self, codes: Codes, turns: list[Turn], device: torch.device):
        self.device, self.made, self.found = device, {}, {}
        groups = "|".join(re.escape(one.group) for one in turns)
        places = "|".join((*ONLINE, *OF_ATTENTION))
        name = re.compile(rf"\.({groups})_({places})\.(weight|perm)$")
        for key in list(codes.stored) if turns else ():
            if match := name.search(key):
                (tensor,) = codes.parts(key, ("",)).values()
                self.found.setdefault((match[1], match[3], len(tensor)), tensor)

    def of(self, one: Turn, size: int) -> Rotation:
        """The rotation of a layer with so many inputs, or outputs. Raises ValueError."""
        n = size if one.head_dim is None else one.head_dim
        if size % n:
            refuse(f"transform_config.{one.group}.head_dim", n, f"a divisor of {size}")
        if (one, n) in self.made:
            return self.made[one, n]
        matrix = self.found.get((one.group, "weight", n))
        if matrix is None:
            if one.kind != "hadamard" or n & (n - 1):
                raise ValueError(
                    f"transform_config.{one.group}: got no tensor {one.group}_{one.location}.weight"
                    f" of {n} rows; accepted: one in the file, because it is not computed here"
                )
            matrix = hadamard(n)
        if matrix.shape != (n, n) or matrix.dtype not in (*FLOATS, torch.float64):
            refuse(
                f"{one.group}_{one.location}.weight", list(matrix.shape), f"[{n}, {n}], floating"
            )
        matrix = matrix.to(self.device, torch.float32)
        if not torch.equal(matrix @ matrix.T, n * torch.eye(n, device=self.device)):
            refuse(f"{one.group}_{one.location}.weight", "another matrix", "rows of ±1, orthogonal")
        rotation = Rotation(matrix, one.is_inverse, self.shuffle(one, n))
        self.made[one, n] = rotation
        return rotation

    def shuffle(self, one: Turn, n: int) -> Tensor | None:
        """[n] int64, or None for a rotation that is not shuffled. Raises ValueError."""
        if not one.is_shuffled:
            return None
        perm = self.found.get((one.group, "perm", n))
        if perm is None or perm.dtype != torch.int64 or sorted(perm.tolist()) != list(range(n)):
            refuse(f"{one.group}_{one.location}.perm", None, f"a permutation of {n} numbers")
        return perm.to(self.device)


def rotated(model: nn.Module, turns: list[Turn], matrices: Matrices, codes: Codes) -> None:
    """Wrap, in place, the layers that are rotated as the model runs. Raises ValueError."""
    online = [one for one in turns if one.location in ONLINE]
    layers = {
        name: stored_name(f"{name}.weight", model.config).removesuffix(".weight")
        for name, layer in model.named_modules()
        if online and isinstance(layer, (nn.Linear, QuantizedLinear))
    }
    count = Counter(layers.values())  # several layers of the decoder may be one in the file
    for name, key in layers.items():
        layer, in_file = model.get_submodule(name), codes.names.get(key, key)
        for one in online:
            if not is_meant(in_file, one.targets, one.ignore):
                continue
            is_input = one.location == "input"
            if name == "lm_head" or name.endswith(KEPT_DENSE):
                refuse("transform_config targets", name, "layers whose matrix nothing else reads")
            if not is_input and (count[key] > 1 or moves_rows(model.config)):
                family = model.config.model_type
                refuse("transform_config location", "output", f"input, in files of {family}")
            rotation = matrices.of(one, layer.in_features if is_input else layer.out_features)
            # the last one that is named meets the input first, as hooks of compressed-tensors do
            wrapper = RotatedInput if is_input else RotatedOutput
            model.set_submodule(name, wrapper(model.get_submodule(name), rotation))
