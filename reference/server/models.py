"""The names that a client may put into `model`: the base model's and the adapters'."""

import time
from dataclasses import dataclass, field

from lessons.toolbox.model.arguments import shown
from reference.features.lora import LoRARequest
from reference.server.errors import ApiError


@dataclass
class Models:
    """names: of the base model, the first is the one it is called by. adapters: {name: adapter}. A
    name is looked up here and nowhere else, so it is never a path.
    """

    names: list[str]
    root: str
    max_model_len: int
    adapters: dict[str, LoRARequest] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def find(self, name: str | None) -> tuple[str, LoRARequest | None]:
        """The name to answer with, and the adapter. Raises ApiError for an unknown name."""
        if not name:
            return self.names[0], None
        if name in self.adapters:
            return name, self.adapters[name]
        if name not in self.names:
            accepted = ", ".join([*self.names, *self.adapters])
            message = f"The model {shown(name)} does not exist; accepted: {accepted}"
            raise ApiError(404, message, "model", "model_not_found")
        return name, None

    def cards(self) -> list[dict]:
        """As /v1/models lists them."""
        base = [self.card(name, self.root, None) for name in self.names]
        return base + [
            self.card(name, adapter.lora_path, self.names[0])
            for name, adapter in self.adapters.items()
        ]

    def card(self, name: str, root: str, parent: str | None) -> dict:
        """One model. parent: whose adapter it is."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "inference-ladder",
            "root": root,
            "parent": parent,
            "max_model_len": self.max_model_len,
        }
