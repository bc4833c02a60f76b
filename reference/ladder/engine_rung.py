"""The ladder's last rung: the engine, asked for the same requests as every rung below it.

On a GPU an engine stays for the next call that asks for one alike, because its graphs take longer
to capture than a call takes. Its prefix cache is emptied, so no answer is fast because another run
asked before.
"""

from copy import copy
from weakref import WeakKeyDictionary

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, Request, check_call, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from lessons.l11_cuda_graphs.naive import unfinished
from lessons.l11_cuda_graphs.optimized import captured_for
from lessons.l14_continuous_batching.loop import BLOCK_SIZE, blocks_of
from lessons.l15_chunked_prefill.generate import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from reference.engine.assembly import engine_over
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs
from reference.engine.sampling_params import DRAWN_BY, SamplingParams


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: RowParams | list[RowParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Arguments, result and errors as in lesson 2's `generate`."""
    check_call(model, on_token, may_have_states=True)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    if waiting := unfinished(requests):
        args = args_for(waiting)
        engine = kept_engine(model, args)
        for request in waiting:
            engine.add_request(str(request.row), request.prompt, params_of(request))
        serve(engine, requests, on_token)
        if engine.runner.captured is not None:
            # Not after a call that raised, whose requests may still be in it.
            KEPT[model] = (args, captured_for(model)), engine
    return [request.output for request in requests]


def args_for(waiting: list[Request]) -> EngineArgs:
    """As many places, tokens a step and blocks as lesson 15's rung has."""
    return EngineArgs(
        # + 1, because most_cached leaves out an answer's last token
        max_model_len=max(request.most_cached for request in waiting) + 1,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=blocks_of(waiting, MAX_NUM_SEQS, BLOCK_SIZE),
    )


KEPT = WeakKeyDictionary()  # {model: (what its engine was made of, the engine)}


def kept_engine(model: Decoder, args: EngineArgs) -> Engine:
    """The engine of an earlier call, if it was made of the same arguments, else a new one."""
    made_of, engine = KEPT.pop(model, (None, None))
    if made_of != (args, captured_for(model)):
        # A shallow copy, because a value that holds its key would keep a deleted model alive.
        return engine_over(copy(model), None, args)
    for block in range(engine.scheduler.blocks.num_blocks):
        engine.scheduler.blocks.cache.forget(block)
    return engine


def params_of(request: Request) -> SamplingParams:
    """A request's wishes under the engine's names. detokenize: False, because the ladder compares
    tokens.
    """
    drawn_by = {name: getattr(request.sampling, name) for name in DRAWN_BY}
    return SamplingParams(**drawn_by, max_tokens=request.max_new_tokens, detokenize=False)


def serve(engine: Engine, requests: list[Request], on_token: OnToken | None) -> None:
    """Step until all have ended, and append to each request what the engine reports of it."""
    while engine.has_unfinished_requests:
        for output in engine.step():
            request = requests[int(output.request_id)]
            (answer,) = output.outputs
            for token in answer.token_ids[len(request.output) :]:
                request.output.append(token)
                if on_token is not None:
                    on_token(request.row, token)
