"""How a request is answered, under vLLM's names. What lesson 2 samples with is a part of it."""

from dataclasses import dataclass, fields, replace

from lessons.l02_naive_attention.sampling import SamplingParams as RowParams

# Of lesson 2: how one token is drawn.
DRAWN_BY = tuple(field.name for field in fields(RowParams))


@dataclass(frozen=True)
class SamplingParams:
    """One request's wishes. Raises ValueError for a value that cannot work, with what can.

    n: answers to the prompt, each with its own random numbers. best_of: draw so many, and keep the
    n likeliest by their mean log-probability. logprobs, prompt_logprobs: how many of the likeliest
    tokens to report at each place, beside the one that stands there.
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
    logit_bias: dict[int, float] | None = None  # added to the logits of these tokens
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self):
        stop = self.stop or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._require("stop", all(isinstance(s, str) and s for s in stop), "strings, none empty")
        self._require_count("n", 1)
        for name in ("best_of", "max_tokens"):
            self._require_count(name, 1, optional=True)
        for name in ("logprobs", "prompt_logprobs"):
            self._require_count(name, 0, optional=True)
        self._require_count("min_tokens", 0)
        if self.best_of is not None:
            self._require("best_of", self.best_of >= self.n, f"n ({self.n}) or more")
        if self.max_tokens is not None:
            most = f"at most max_tokens ({self.max_tokens})"
            self._require("min_tokens", self.min_tokens <= self.max_tokens, most)
        if self.drawn > 1 and self.temperature == 0:
            self._require("n", False, "1 with temperature 0, because all answers would be equal")
        for name in ("include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        if self.stop and not self.detokenize:
            self._require("stop", False, "none with detokenize=False, because text is searched")
        self._check_bias()
        # what a row is drawn by was checked by lesson 2
        RowParams(**{name: getattr(self, name) for name in DRAWN_BY})

    def _check_bias(self) -> None:
        bias = self.logit_bias or {}
        accepted = "{token id: a number from -100 to 100}"
        self._require("logit_bias", isinstance(bias, dict), accepted)
        for token, value in bias.items():
            is_token = isinstance(token, int) and token >= 0 and not isinstance(token, bool)
            is_value = isinstance(value, (int, float)) and -100 <= value <= 100
            self._require("logit_bias", is_token and is_value, accepted)

    def _require_count(self, name: str, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        accepted = f"{'None, or ' if optional else ''}an integer of {least} or more"
        self._require(name, fits or (optional and value is None), accepted)

    def _require(self, name: str, fits: bool, accepted: str) -> None:
        if not fits:
            value = repr(getattr(self, name))[:80]
            raise ValueError(f"{name}: got {value}; accepted: {accepted}")

    @property
    def drawn(self) -> int:
        """How many answers are computed."""
        return self.best_of or self.n

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.drawn > self.n

    def rows(self) -> list[RowParams]:
        """Lesson 2's parameters of each answer. With a seed the answers take the numbers after it."""
        row = RowParams(**{name: getattr(self, name) for name in DRAWN_BY}).seeded()
        return [replace(row, seed=(row.seed + index) % 2**63) for index in range(self.drawn)]
