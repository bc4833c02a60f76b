"""The argument that says how experts are balanced over the ranks that share them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lessons.toolbox.model.arguments import check_counts, is_whole, refuse

if TYPE_CHECKING:
    from reference.engine.engine_args import EngineArgs

# vLLM's others: /metrics tells the balance in any case, and how experts travel changes no token
WITHOUT_EFFECT = "log_balancedness log_balancedness_interval use_async communicator"


@dataclass(frozen=True)
class EPLBConfig:
    """vLLM's keys that have a meaning here. Raises ValueError, in one line.

    num_redundant_experts: copies of busy experts in each layer. step_interval: steps after which
    experts are placed anew. window_size: the last steps before that, whose loads decide.
    """

    num_redundant_experts: int = 0
    step_interval: int = 3000
    window_size: int = 1000

    def __post_init__(self):
        check_counts(self, "step_interval", "window_size")
        copies = self.num_redundant_experts
        if not is_whole(copies, 0):
            refuse("eplb_config num_redundant_experts", copies, "a whole number, 0 or more")
        if self.window_size > self.step_interval:
            accepted = f"at most step_interval, {self.step_interval}"
            refuse("eplb_config window_size", self.window_size, accepted)

    @classmethod
    def read(cls, config: EPLBConfig | dict | None) -> EPLBConfig:
        """From what an engine is given. Raises ValueError."""
        if config is None or isinstance(config, cls):
            return config or cls()
        known = [each.name for each in fields(cls)]
        if not isinstance(config, dict):
            refuse("eplb_config", config, f"None, or a dict of {', '.join(known)}")
        for name in config:
            if name not in (*known, *WITHOUT_EFFECT.split()):
                refuse("eplb_config", name, ", ".join(known))
        return cls(**{name: value for name, value in config.items() if name in known})


def check_balance(args: EngineArgs) -> None:
    """Whose experts are balanced, and how. Raises ValueError."""
    accepted = "False without enable_expert_parallel and a data_parallel_size above 1"
    args.require("enable_eplb", args.shares_experts or not args.enable_eplb, accepted)
    args.require("eplb_config", args.enable_eplb, "None without enable_eplb")
    args.eplb_config = EPLBConfig.read(args.eplb_config)
