"""prompt_logprobs: how likely the tokens of a prompt are, as its chunks run."""

from torch import Tensor

from lessons.l14_continuous_batching.sequence import Step
from reference.engine.model_runner import ModelRunner
from reference.engine.request import ends
from reference.features.token_texts import named

MOST_ROWS = 256  # scored at a time: a long prompt's logits would take more memory than is left


def score_prompts(runner: ModelRunner, tokenizer, step: Step, hidden: Tensor) -> None:
    """Give each request of a step the log-probabilities that it asks for. hidden: [T,
    hidden_size]. tokenizer: names their tokens; None: they have no names.
    """
    for last, chunk in ends(step):
        request, first = chunk.sequence.request, chunk.sequence.computed
        wanted = request.params.prompt_logprobs
        if wanted is None:
            continue
        # Not the chunk's first: before a preemption another chunk may have scored some of it.
        scored = len(request.prompt_logprobs)
        targets = request.prompt_token_ids[scored : first + chunk.count + 1]
        # The token before a target gives its score.
        start = last + 1 - chunk.count + (scored - 1 - first)
        for at in range(0, len(targets), MOST_ROWS):
            some = targets[at : at + MOST_ROWS]
            rows = list(range(start + at, start + at + len(some)))
            for here in runner.scores(hidden, rows, some, wanted):
                if tokenizer is not None and request.params.detokenize:
                    before = request.prompt_token_ids[1 : len(request.prompt_logprobs)]
                    here = named(tokenizer, here, before)
                request.prompt_logprobs.append(here)
