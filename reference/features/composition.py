"""Which features of the engine work together, and for those that do not, why.

    python -m reference.features.composition

prints the table of reference/README.md. A cell without a reason is a promise: tests/
test_composition.py runs it, and holds its tokens to those of the same model without the features
that may change none.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from lessons.toolbox.model.arguments import refuse

if TYPE_CHECKING:
    from reference.engine.engine_args import EngineArgs

# group -> its features
GROUPS = {
    "weights": ("int8", "int4", "FP8", "MXFP4", "W8A8", "W4A8", "AWQ", "GPTQ", "GGUF"),
    "K and V": ("fp8 KV", "int8 KV", "int4 KV", "fp8_ds_mla KV"),
    "drafts": ("draft", "parallel draft", "ngram", "suffix"),
    "heads": ("medusa", "eagle", "mtp"),
    "adapters": ("LoRA",),
    "processes": ("tensor parallel", "pipeline parallel", "data parallel", "decode context"),
    "prefix cache": ("prefix cache",),
    "offloading": ("offloading",),
    "transfer": ("transfer",),
    "preemption": ("recompute", "swap"),
    "chunks": ("chunked prefill",),
    "one step ahead": ("async",),
    "structures": ("structured",),
    "answers": ("n > 1", "beams"),
    "pictures": ("pictures",),
    "families": ("MoE", "MLA"),
    "states": ("states",),
    "same bits": ("batch invariant",),
}
GROUP_OF = {feature: group for group, features in GROUPS.items() for feature in features}
# of which an engine, or a request, has one
ONE_OF = ("weights", "K and V", "drafts", "heads", "preemption", "answers", "families")


class Apart(NamedTuple):
    """Two groups, or features, that do not work together."""

    one: str
    other: str
    reason: str


SHARE = "each process holds its own share of a block"
ORDER = "each adds in an order of its own"
LATENTS = "fp8_ds_mla KV"  # a format of latents, so all that keeps MLA apart keeps it apart, too
APART = (
    Apart("drafts", "heads", "one of both"),
    Apart("one step ahead", "drafts", "a draft follows the last token, which is not known yet"),
    Apart("one step ahead", "heads", "a draft follows the last token, which is not known yet"),
    Apart("processes", "heads", "heads read hidden states, which stay in the workers"),
    Apart("medusa", "MLA", "their attention knows no trees here"),
    Apart("eagle", "MLA", "their attention knows no trees here"),
    Apart("medusa", LATENTS, "their attention knows no trees here"),
    Apart("eagle", LATENTS, "their attention knows no trees here"),
    Apart("MoE", LATENTS, "such models store no latents"),
    Apart("states", LATENTS, "such models store no latents"),
    Apart("processes", "offloading", SHARE),
    Apart("offloading", "swap", "what is full is saved already"),
    Apart("processes", "transfer", f"{SHARE}; a producer alone may be tensor parallel"),
    Apart("transfer", "swap", "the scheduler has one place for what leaves the pool"),
    Apart("transfer", "offloading", "the scheduler has one place for what leaves the pool"),
    Apart("processes", "pictures", "the workers have no eyes"),
    Apart("GGUF", "families", "of GGUF files those of dense models are read"),
    Apart(LATENTS, "GGUF", "of GGUF files those of dense models are read"),
    Apart("states", "GGUF", "of GGUF files those of dense models are read"),
    Apart("states", "heads", "heads are layers of models here in which every layer attends"),
    Apart("states", "adapters", "adapters have the rows and names of a checkpoint's layers"),
    Apart("states", "processes", "the workers have no slots for states"),
    Apart("states", "offloading", "blocks travel, and states do not"),
    Apart("states", "transfer", "blocks travel, and states do not"),
    Apart("states", "MLA", "one of both"),
    Apart("states", "same bits", ORDER),
    Apart("same bits", "weights", ORDER),
    Apart("same bits", "K and V", ORDER),
    Apart("same bits", "drafts", "which random numbers a token gets depends on the drafts"),
    Apart("same bits", "heads", "which random numbers a token gets depends on the drafts"),
    Apart("same bits", "adapters", ORDER),
    Apart("same bits", "processes", ORDER),
    Apart("same bits", "families", ORDER),
    Apart("same bits", "pictures", ORDER),
)


def names(feature: str) -> tuple[str, str]:
    """A feature and its group; a group is a feature, too."""
    return feature, GROUP_OF.get(feature, feature)


def why_apart(one: str, other: str) -> str | None:
    """The reason why two features do not work together; None: they do."""
    if one != other and GROUP_OF.get(one) == GROUP_OF.get(other) and GROUP_OF[one] in ONE_OF:
        return f"one of {GROUP_OF[one]}"
    for rule in APART:
        for a, b in ((one, other), (other, one)):
            if rule.one in names(a) and rule.other in names(b):
                return rule.reason
    return None


def refuse_together(name: str, value, one: str, other: str, accepted: str) -> None:
    """Raise ValueError if two features are apart, of which this argument asks for the one."""
    if (why := why_apart(one, other)) is not None:
        refuse(name, value, f"{accepted}, because {why}")


def check_apart(args: EngineArgs, method: str | None) -> None:
    """What an engine's arguments alone show to be apart. method: who drafts. Raises ValueError."""

    def together(name: str, one: str, other: str | None, accepted: str) -> None:
        if getattr(args, name) and other:
            refuse_together(name, getattr(args, name), one, other, accepted)

    workers = "processes" if args.has_workers else None
    where = "where the model is in other processes (…_parallel_size)"
    together("batch_invariant", "batch invariant", workers, f"False {where}")
    together("batch_invariant", "batch invariant", method, "False with speculative_config")
    together("async_scheduling", "async", method, "False with speculative_config")
    if method:
        together("speculative_config", method, workers, f"None {where}")


def are_apart(features) -> bool:
    """Whether two of some features do not work together."""
    return any(why_apart(*pair) for pair in combinations(features, 2))


# ---------------------------------------------------------------- the table


def cell(row: str, column: str, reasons: list[str]) -> str:
    """What stands in the table where two groups meet. reasons: grows by those that are new."""
    if row == column:
        return "one" if row in ONE_OF else "yes" if len(GROUPS[row]) > 1 else ""
    found = [why_apart(a, b) for a in GROUPS[row] for b in GROUPS[column]]
    if not any(found):
        return "yes"
    (reason,) = {why for why in found if why}
    if reason not in reasons:
        reasons.append(reason)
    return f"{'no' if all(found) else 'most'} ({1 + reasons.index(reason)})"


def table() -> str:
    """All groups against all, in Markdown, with the reasons below."""
    groups, reasons = list(GROUPS), []
    lines = ["| |" + "|".join(f" {group} " for group in groups) + "|"]
    lines.append("|---" * (1 + len(groups)) + "|")
    for at, row in enumerate(groups):
        cells = [cell(row, column, reasons) for column in groups[: at + 1]]
        cells += [""] * (len(groups) - at - 1)
        lines.append(f"| **{row}** |" + "|".join(f" {text} " for text in cells) + "|")
    lines += ["", *(f"{number}. {text}" for number, text in enumerate(reasons, 1))]
    return "\n".join(lines)


def main() -> None:
    """Print it."""
    print(table())


if __name__ == "__main__":
    main()
