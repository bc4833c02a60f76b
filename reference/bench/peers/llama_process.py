"""llama.cpp, asked from another process. It runs in the peers' Python and imports nothing of this
course.

    .venv-peers/bin/python reference/bench/peers/llama_process.py \\
        '{"model": "tiny.gguf", "places": 8, "context": 512}'

Lines of stdin and stdout as vllm_process.py's. Of params it knows max_tokens and temperature 0, and
of an answer it gives token_ids, text and finish_reason.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial


def main() -> None:
    """Answer lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # it prints, which must not stand between the answers
    import xllamacpp

    told = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel = told["model"], told["places"]
    params.n_ctx = told["places"] * told["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    # Its defaults round K, V and attention to float16, and tokens are compared with float32's.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    with ThreadPoolExecutor(told["places"]) as pool:
        for line in sys.stdin:
            question, begin = json.loads(line), time.process_time()
            requests = [] if question == "forget" else question  # it is told to keep nothing
            given = list(pool.map(partial(answered, server), requests))
            answer = {"answers": given, "cpu_s": time.process_time() - begin}
            print(json.dumps(answer), file=answers, flush=True)


def answered(server, request: dict) -> dict:
    """What llama.cpp gives for a request. The ids of its tokens are told with their
    log-probabilities, so these are asked for.
    """
    wishes = {"prompt": request["prompt"], "n_predict": request["params"]["max_tokens"]}
    given = server.handle_completions(
        wishes | {"temperature": 0, "logprobs": 1, "cache_prompt": False}
    )
    if "choices" not in given:
        return {"error": " ".join(str(given).split())}
    (one,) = given["choices"]
    ids = [token["id"] for token in one["logprobs"]["content"]]
    return {
        "outputs": [{"token_ids": ids, "text": one["text"], "finish_reason": one["finish_reason"]}]
    }


if __name__ == "__main__":
    main()
