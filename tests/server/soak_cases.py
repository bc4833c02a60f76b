"""The requests of the soak, and what the engine answers to each of them without a server."""

import random
from dataclasses import dataclass, field

from reference.engine.llm import LLM
from reference.engine.sampling_params import SamplingParams
from reference.features.lora import LoRARequest
from tests.server.paths import ADAPTERS, MODEL

ENGINE = dict(kv_cache_memory_bytes=4_000_000, max_model_len=512, enable_lora=True, max_loras=2)
FLAGS = ["--kv-cache-memory-bytes", "4000000", "--max-model-len", "512", "--max-num-seqs", "12",
         "--enable-lora", "--max-loras", "2", "--request-timeout", "5", "--port", "0",
         "--disable-uvicorn-access-log", "--lora-modules",
         *(f"{name}={folder}" for name, folder in ADAPTERS.items())]  # fmt: skip
PROMPTS = [
    "def f(",
    "import os\n",
    "class Tree:\n    ",
    "for i in range(",
    "# sorts a list\n",
    "x = ",
]
WISHES = [
    dict(max_tokens=40),
    dict(max_tokens=60, stop=["\n\n"]),
    dict(max_tokens=30, n=3, temperature=0.9, top_p=0.9, seed=11),
    dict(max_tokens=30, temperature=1.0, seed=4, logprobs=2),
    dict(max_tokens=40, structured_outputs=dict(regex="[a-z]{2,9}(, [a-z]{2,9}){3} = [0-9]{1,4}")),
    dict(max_tokens=60, structured_outputs=dict(json=dict(
        type="object",
        properties=dict(name=dict(type="string", maxLength=12), n=dict(type="integer")),
        required=["name", "n"], additionalProperties=False))),
]  # fmt: skip
MISTAKES = [
    (400, dict(prompt=[], max_tokens=3)),
    (400, dict(prompt="x", max_tokens=-1)),
    (400, dict(prompt="x", temperature="hot")),
    (404, dict(prompt="x", model="another")),
    (400, dict(prompt="x" * 200_000)),
    (400, dict(prompt="x", structured_outputs=dict(regex="(("))),
]
LONG = dict(max_tokens=450, ignore_eos=True, temperature=0, n=1)


@dataclass(frozen=True)
class Case:
    """A request, and the token ids of its answers."""

    body: dict
    expected: list[list[int]] = field(hash=False)


def new_cases(count: int) -> list[Case]:
    """Requests and what the engine answers without a server, one after the other."""
    llm, rng, cases = LLM(MODEL, **ENGINE), random.Random(0), []
    numbers = {name: at for at, name in enumerate(ADAPTERS, 1)}
    for at in range(count):
        wishes = {"temperature": 0} | WISHES[at % len(WISHES)]
        prompt, adapter = rng.choice(PROMPTS), rng.choice([None, None, *ADAPTERS])
        lora = adapter and LoRARequest(adapter, numbers[adapter], ADAPTERS[adapter])
        params = SamplingParams(**wishes)
        (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=lora)
        body = wishes | dict(prompt=prompt, model=adapter or MODEL, return_token_ids=True)
        cases.append(Case(body, [one.token_ids for one in output.outputs]))
    return cases
