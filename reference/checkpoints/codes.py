"""The stored tensors of a checkpoint's quantized layers."""

from functools import cache

from lessons.toolbox.model.stored import Stored, open_file
from reference.checkpoints.layouts import Parts

# Latent attention multiplies by the rows of this matrix, so it is read as numbers.
KEPT_DENSE = "kv_b_proj"


class Codes:
    """The stored tensors of quantized matrices; `taken` notes which have been read."""

    def __init__(self, stored: dict[str, Stored]):
        self.stored, self.taken = stored, set()
        # {layer: its name in the file}, which may have something before it, as "model."
        self.names = {}
        for key, entry in stored.items():
            layer = key.rpartition(".")[0]
            self.names[layer] = entry.name.removesuffix(key.removeprefix(layer))
        self.open = cache(open_file)  # each file once

    def __contains__(self, key: str) -> bool:
        return key in self.stored

    def parts(self, key: str, ends: tuple[str, ...]) -> Parts:
        """Those that are stored as key + end, by their ends."""
        found = {end: self.stored[key + end] for end in ends if key + end in self.stored}
        self.taken.update(key + end for end in found)
        # clone, because a tensor of the file would change or crash with it
        return {end: self.open(x.file).get_tensor(x.name).clone() for end, x in found.items()}

    def skip_empty_bias(self, key: str) -> None:
        """AutoGPTQ stores a bias of zeros for layers that have none."""
        if key + "bias" in self and not self.parts(key, ("bias",))["bias"].any():
            return
        self.taken.discard(key + "bias")  # loading what is left will refuse it by name

    def where(self, key: str) -> str:
        """A layer as an error names it."""
        entry = next(x for name, x in self.stored.items() if name.startswith(key))
        return f"layer {key.rstrip('._')} in {entry.file}"
