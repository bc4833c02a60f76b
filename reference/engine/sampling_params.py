"""How a request is answered, under vLLM's names. What lesson 2 samples with is a part of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING

from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from lessons.toolbox.model.arguments import check_counts, check_kind, is_number, is_whole, refuse
from reference.engine.engine_args import takes_vllm_names

if TYPE_CHECKING:
    from reference.features.structured import StructuredOutputsParams

# Of lesson 2: how one token is drawn.
DRAWN_BY = tuple(field.name for field in fields(RowParams))
SWITCHES = ("include_stop_str_in_output", "detokenize", "skip_special_tokens", "flat_logprobs")


@takes_vllm_names("SamplingParams")
@dataclass(frozen=True)
class SamplingParams:
    """One request's wishes. Raises ValueError for a value that cannot work, with what can.

    n: answers to the prompt, each with its own random numbers. best_of: draw so many, and keep the
    n likeliest by their mean log-probability. logprobs, prompt_logprobs: how many of the likeliest
    tokens to report at each place, beside the one that is there; -1: all of the vocabulary.
    flat_logprobs: report them as FlatLogprobs. seed: None or -1 for a fresh one.

    allowed_token_ids: no other token is sampled. bad_words: no answer completes one of these, as
    its tokens write it; where no other token is left, it gives way. structured_outputs: which
    texts are answers; guided_decoding is its older name. A dict of the fields will do. extra_args:
    {"kv_transfer_params": what becomes of its K and V between two engines}.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as fit
    min_tokens: int = 0  # before them neither an end-of-sequence token nor a stop counts
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    logit_bias: dict[int, float] | None = None  # added to the logits of these tokens
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_reading_prefix_cache: bool | None = None  # None: only where prompt_logprobs needs it
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | dict | None = None
    guided_decoding: StructuredOutputsParams | dict | None = None
    extra_args: dict | None = None

    def __post_init__(self):
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else () if value is None else value
            check_kind((list, tuple, set, frozenset), "None, or a list", **{name: value})
            object.__setattr__(self, name, tuple(value))
        for name in ("stop", "bad_words"):
            is_text = all(isinstance(text, str) and text for text in getattr(self, name))
            self._require(name, is_text, "strings, none empty")
        if self.seed == -1:  # as clients say None
            object.__setattr__(self, "seed", None)
        check_counts(self, "n")
        check_counts(self, "best_of", "max_tokens", optional=True)
        for name in ("logprobs", "prompt_logprobs"):
            fits = getattr(self, name) is None or is_whole(getattr(self, name), -1)
            self._require(name, fits, "None, or a whole number, 0 or more, or -1 for all tokens")
        check_counts(self, "min_tokens", low=0)
        if self.best_of is not None:
            self._require("best_of", self.best_of >= self.n, f"n ({self.n}) or more")
        if self.max_tokens is not None:
            most = f"at most max_tokens ({self.max_tokens})"
            self._require("min_tokens", self.min_tokens <= self.max_tokens, most)
        if self.drawn > 1 and self.temperature == 0:
            self._require("n", False, "1 with temperature 0, because all answers would be equal")
        for name in SWITCHES:
            check_kind(bool, "True or False", **{name: getattr(self, name)})
        check_kind(
            (bool, type(None)),
            "None, True or False",
            skip_reading_prefix_cache=self.skip_reading_prefix_cache,
        )
        if self.stop and not self.detokenize:
            self._require("stop", False, "none with detokenize=False, because text is searched")
        self._check_bias()
        self._read_allowed()
        self._read_structured()
        self._read_extra()
        # what a row is drawn by was checked by lesson 2
        RowParams(**{name: getattr(self, name) for name in DRAWN_BY})

    def _check_bias(self) -> None:
        bias = self.logit_bias or {}
        accepted = "{token id: a number from -100 to 100}"
        self._require("logit_bias", isinstance(bias, dict), accepted)
        for token, value in bias.items():
            fits = is_whole(token, 0) and is_number(value, -100, 100)
            self._require("logit_bias", fits, accepted)

    def _read_allowed(self) -> None:
        if (allowed := self.allowed_token_ids) is None:
            return
        fits = isinstance(allowed, (list, tuple, set, frozenset)) and len(allowed) > 0
        fits = fits and all(is_whole(token, 0) for token in allowed)
        self._require("allowed_token_ids", fits, "None, or a list of token ids, one at least")
        object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(allowed)))
        # because the two may have no token in common, and then the answer cannot go on
        is_alone = self.structured_outputs is None and self.guided_decoding is None
        self._require("allowed_token_ids", is_alone, "None with structured_outputs")

    def _read_structured(self) -> None:
        if self.structured_outputs is None and self.guided_decoding is None:
            return
        from reference.features.structured import read_structured  # here: few requests need it

        given = 0
        for name in ("structured_outputs", "guided_decoding"):
            wish = read_structured(name, getattr(self, name))
            given += wish is not None
            object.__setattr__(self, name, wish)
        self._require(
            "guided_decoding", given < 2, "None beside structured_outputs, its newer name"
        )
        accepted = "False with structured_outputs, because a complete text has to end"
        self._require("ignore_eos", not (given and self.ignore_eos), accepted)

    def _read_extra(self) -> None:
        if self.extra_args is None:
            return
        is_known = isinstance(self.extra_args, dict) and self.extra_args.keys() <= {
            "kv_transfer_params"
        }
        self._require("extra_args", is_known, 'None, or {"kv_transfer_params": …}')
        from reference.features.kv_transfer.config import read_params  # here: few requests have any

        params = read_params(self.extra_args.get("kv_transfer_params"))
        found = None if params is None else {"kv_transfer_params": params}
        object.__setattr__(self, "extra_args", found)

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """Which texts are answers, under either name; None: all are."""
        return self.structured_outputs or self.guided_decoding

    def _require(self, name: str, fits: bool, accepted: str) -> None:
        if not fits:
            refuse(name, getattr(self, name), accepted)

    @property
    def drawn(self) -> int:
        """How many answers are computed."""
        return self.best_of or self.n

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether blocks of the prompt that are known need not run again."""
        if self.skip_reading_prefix_cache is None:
            return self.prompt_logprobs is None
        return not self.skip_reading_prefix_cache

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.drawn > self.n

    def rows(self, fresh: Random) -> list[RowParams]:
        """Lesson 2's parameters of each answer. The first takes the seed, the others the numbers
        after it. fresh: where a request without a seed gets one.
        """
        row = RowParams(**{name: getattr(self, name) for name in DRAWN_BY})
        seed = fresh.randrange(2**63) if self.seed is None else self.seed
        return [replace(row, seed=(seed + index) % 2**63) for index in range(self.drawn)]
