"""`speculative_config` under vLLM's names, and the spellings that it had before."""

import ast
import difflib
from dataclasses import dataclass, fields

from lessons.l16_speculative_sampling.more.suffixes import LIMITS, Limits
from lessons.l17_tree_speculation.trees.tree import MOST_NODES, Tree, tree_of_ranks
from lessons.toolbox.model.arguments import is_number, is_whole, refuse, shown
from reference.speculation.batch_schedule import Schedule, with_schedule

METHODS = ("draft", "ngram", "suffix", "medusa", "eagle", "mtp")
DRAFT, NGRAM, SUFFIX, MEDUSA, EAGLE, MTP = METHODS
# vLLM's other names for the same
ALIASES = {"draft_model": DRAFT, "[ngram]": NGRAM, "eagle3": EAGLE}
ALIASES |= dict.fromkeys(("deepseek_mtp", "qwen3_next_mtp", "glm4_moe_mtp"), MTP)
HEADS = (MEDUSA, EAGLE, MTP)  # whose drafts may be trees
WITHOUT_MODEL = (NGRAM, SUFFIX)  # which look at the text alone
AUTO = "auto"  # a tree chosen from what was measured of the heads
GREEDY, PROBABILISTIC = "greedy", "probabilistic"
# method -> the ways to draw its drafts that it has, None for the usual one
WAYS = {DRAFT: (None, PROBABILISTIC)} | dict.fromkeys(WITHOUT_MODEL, (None, GREEDY))
WAYS |= dict.fromkeys(HEADS, (None, GREEDY, PROBABILISTIC))
LONGEST_NGRAM, SHORTEST_NGRAM = 3, 1  # as lesson 16 looks them up
# key -> the method that alone has it
ONLY_OF = dict.fromkeys(("prompt_lookup_max", "prompt_lookup_min"), NGRAM)
ONLY_OF |= {f"suffix_decoding_{name}": SUFFIX for name in Limits._fields}
# before vLLM 0.8: argument of the engine -> key of speculative_config
OLDER = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts, and how much. Make it by `read`.

    method: one of METHODS. model: folder or hub name of what drafts; None for n-grams, and for
    "mtp" where the target's own checkpoint has the layer.
    num_speculative_tokens: drafted in a step for each sequence. prompt_lookup_max,
    prompt_lookup_min: the longest and the shortest n-gram that is looked up. suffix_decoding_…: the
    `Limits` of lesson 16's suffix decoding; its drafts have as many tokens as the depth of its tree
    if no number is given.
    speculative_token_tree: their shape, where heads draft: "[(0,), (1,), (0, 0)]", a way of ranks
    for each node; "auto": the tree of as many nodes that the heads' measured acceptance makes the
    best; None: a chain. draft_sample_method: which tokens heads draft for a request that samples:
    "greedy" (None), its likeliest ones, which changes no token of an answer; "probabilistic": drawn
    ones, of which more are accepted, and which keep the distribution. A draft model's are always
    drawn. parallel_drafting: a draft model guesses all tokens in one pass; it must have been
    trained for that, and its config.json names the mask (pard_token).
    num_speculative_tokens_per_batch_size: another number for each size of the batch, entries
    of (first size, last size, number). enable_adaptive_verification: a number is chosen for each
    step by what was measured. num_speculative_tokens is then the most.
    """

    method: str
    model: str | None
    num_speculative_tokens: int
    prompt_lookup_max: int = LONGEST_NGRAM
    prompt_lookup_min: int = SHORTEST_NGRAM
    suffix_decoding_max_tree_depth: int = LIMITS.max_tree_depth
    suffix_decoding_max_cached_requests: int = LIMITS.max_cached_requests
    suffix_decoding_max_spec_factor: float = LIMITS.max_spec_factor
    suffix_decoding_min_token_prob: float = LIMITS.min_token_prob
    speculative_token_tree: str | None = None
    draft_sample_method: str | None = None
    num_speculative_tokens_per_batch_size: Schedule | None = None
    enable_adaptive_verification: bool = False
    parallel_drafting: bool = False

    @property
    def has_pool(self) -> bool:
        """Whether what drafts has K and V of its own, in blocks numbered as the target's."""
        return self.method in (DRAFT, EAGLE, MTP)

    @classmethod
    def read(cls, given, target: str | None = None) -> "SpeculativeConfig | None":
        """From a dict of vLLM's keys; None stays None. target: a name or path, whose own checkpoint
        has the MTP layer if no other model is named. Raises ValueError, in one line.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            refuse("speculative_config", given, "None, or a dict of method, model and so on")
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(
                    f"speculative_config: unknown key {shown(key)}; {nearest(key, known)}"
                )
        found = {key: value for key, value in given.items() if value is not None}
        method, model = read_method(found.get("method"), found.get("model"))
        model = target if method == MTP and model is None else model
        if (tree := read_tree(found.get("speculative_token_tree"))) is not None:
            found = {"num_speculative_tokens": len(tree) - 1} | found
            found["speculative_token_tree"] = str(found["speculative_token_tree"])
        if method == SUFFIX:  # as in vLLM, where the number is a limit
            depth = found.get("suffix_decoding_max_tree_depth", LIMITS.max_tree_depth)
            found = {"num_speculative_tokens": depth} | found
        config = cls(**found | dict(method=method, model=model, **the_count(found)))
        config.check()
        return with_schedule(config)

    def check(self) -> None:
        """Raise ValueError for a value that cannot work with any model."""
        if self.method not in (*WITHOUT_MODEL, MTP) and self.model is None:
            accepted = f"a folder or hub name with method {self.method!r}"
            refuse("speculative_config model", None, accepted)
        if self.method in WITHOUT_MODEL and self.model is not None:
            refuse("speculative_config model", self.model, f"None with method {self.method!r}")
        for field in fields(self):
            owner, value = ONLY_OF.get(field.name, self.method), getattr(self, field.name)
            if owner != self.method and value != field.default:
                accepted = f"method {owner!r}, which alone reads it, not {self.method!r}"
                refuse(f"speculative_config {field.name}", value, accepted)
        self.check_suffixes()  # first, because the depth may be the number of tokens, too
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            if not is_whole(getattr(self, name)):
                accepted = "a whole number, 1 or more and below 2**31"
                refuse(f"speculative_config {name}", getattr(self, name), accepted)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            accepted = f"at most prompt_lookup_max ({self.prompt_lookup_max})"
            refuse("speculative_config prompt_lookup_min", self.prompt_lookup_min, accepted)
        if not isinstance(self.parallel_drafting, bool):
            refuse("speculative_config parallel_drafting", self.parallel_drafting, "True or False")
        if self.parallel_drafting and self.method != DRAFT:
            accepted = f"False with method {self.method!r}; only a draft model has masks here"
            refuse("speculative_config parallel_drafting", True, accepted)
        self.check_heads()

    def check_suffixes(self) -> None:
        """Raise ValueError for limits that are none."""
        depth, cached, factor, least = self.suffix_limits
        for fits, name, accepted in (
            (is_whole(depth), "max_tree_depth", "a whole number, 1 or more and below 2**31"),
            (is_whole(cached, 0), "max_cached_requests", "a whole number, 0 or more, below 2**31"),
            (is_number(factor, 0), "max_spec_factor", "a number, 0 or more"),
            (is_number(least, 0, 1), "min_token_prob", "a number from 0 to 1"),
        ):
            if not fits:
                value = getattr(self.suffix_limits, name)
                refuse(f"speculative_config suffix_decoding_{name}", value, accepted)

    def check_heads(self) -> None:
        """Raise ValueError for a shape or a way to draw that does not fit."""
        given, count, name = self.speculative_token_tree, self.num_speculative_tokens, self.method
        if given is not None and name not in HEADS:
            refuse("speculative_config speculative_token_tree", given, f"None with {name!r}")
        tree = self.tree
        if tree is not None and len(tree) - 1 != count:
            accepted = f"{len(tree) - 1}, the nodes of speculative_token_tree"
            refuse("speculative_config num_speculative_tokens", count, accepted)
        if name in HEADS and count >= MOST_NODES:
            accepted = f"at most {MOST_NODES - 1} with method {name!r}"
            refuse("speculative_config num_speculative_tokens", count, accepted)
        ways = WAYS[name]
        if self.draft_sample_method not in ways:
            accepted = f"{' or '.join(map(str, ways))} with method {name!r}"
            refuse("speculative_config draft_sample_method", self.draft_sample_method, accepted)

    @property
    def suffix_limits(self) -> Limits:
        """How far suffix decoding goes."""
        return Limits(*(getattr(self, f"suffix_decoding_{name}") for name in Limits._fields))

    @property
    def tree(self) -> Tree | None:
        """The shape that was asked for; None: a chain, or one that the heads have to choose."""
        return read_tree(self.speculative_token_tree)

    def check_context(self, max_model_len: int) -> None:
        """Raise ValueError for more drafted tokens than a sequence can hold."""
        if self.num_speculative_tokens >= max_model_len:
            refuse(
                "speculative_config num_speculative_tokens",
                self.num_speculative_tokens,
                f"at most {max_model_len - 1}, below max_model_len",
            )


def read_tree(given) -> Tree | None:
    """A tree from vLLM's notation, a list or its text; None for None and "auto". Raises
    ValueError.
    """
    if given is None or given == AUTO:
        return None
    name = "speculative_config speculative_token_tree"
    accepted = (
        f"'auto', or a list of ranks such as '[(0,), (1,), (0, 0)]', 1 to {MOST_NODES - 1} nodes"
    )
    try:
        ways = ast.literal_eval(given) if isinstance(given, str) else given
        ways = [tuple(way) for way in ways]
        fits = all(is_whole(rank, 0) for way in ways for rank in way)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        fits = False
    if not fits or not 1 <= len(ways) < MOST_NODES:
        refuse(name, given, accepted)
    try:
        return tree_of_ranks(ways)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def the_count(found: dict) -> dict:
    """num_speculative_tokens, which has no default. Raises ValueError without one."""
    if "num_speculative_tokens" not in found:
        accepted = "how many tokens to draft in a step, 1 or more"
        refuse("speculative_config num_speculative_tokens", None, accepted)
    return {"num_speculative_tokens": found["num_speculative_tokens"]}


def read_method(method, model) -> tuple[str, str | None]:
    """(method, model) of what was given; as in vLLM, a model alone is a draft, and "[ngram]" in its
    place is none. Raises ValueError for an unknown method.
    """
    for name, value in (("method", method), ("model", model)):
        if value is not None and not isinstance(value, str):
            refuse(f"speculative_config {name}", value, "a string")
    if model in (NGRAM, "[ngram]") and method in (None, NGRAM, "[ngram]"):
        return NGRAM, None
    if method is None:
        if model is None:
            refuse("speculative_config method", None, " or ".join(METHODS))
        return DRAFT, model
    method = ALIASES.get(method, method)
    if method not in METHODS:
        raise ValueError(
            f"speculative_config method: got {shown(method)}; {nearest(method, METHODS)}"
        )
    return method, model


def nearest(name, known) -> str:
    """What was meant, perhaps, or everything that is known."""
    near = difflib.get_close_matches(str(name).lower(), known, 1)
    return f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(known)}"


def from_older(arguments: dict) -> dict:
    """The engine's arguments with vLLM's older spellings gathered in speculative_config. Raises
    ValueError if both are given.
    """
    older = {name: arguments[name] for name in OLDER if arguments.get(name) is not None}
    rest = {name: value for name, value in arguments.items() if name not in OLDER}
    if not older:
        return rest
    if rest.get("speculative_config") is not None:
        names = ", ".join(older)
        raise ValueError(f"speculative_config, {names}: got both; accepted: speculative_config")
    if "speculative_model" not in older:
        names = ", ".join(older)
        raise ValueError(f"{names}: got no speculative_model; accepted: one, or '[ngram]'")
    return rest | {"speculative_config": {OLDER[name]: value for name, value in older.items()}}


def with_speculative(arguments: dict, short: dict[str, str]) -> dict:
    """The arguments with vLLM's short forms of its keys in speculative_config. short: {form: key}.
    Raises ValueError for a key that is there, too.
    """
    given = {key: arguments.get(name) for name, key in short.items()}
    given = {key: value for key, value in given.items() if value is not None}
    rest = {name: value for name, value in arguments.items() if name not in short}
    config = rest.get("speculative_config") or {}
    if not given:
        return rest
    if not isinstance(config, dict) or config.keys() & given.keys():
        refuse("speculative_config", config, f"None with {', '.join(short)}")
    return rest | {"speculative_config": config | given}
