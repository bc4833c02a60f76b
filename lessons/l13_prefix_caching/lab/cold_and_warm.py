"""One long common prompt, four questions, cold and warm: five ways to run them, of which two
mislead.

    python -m lessons.l13_prefix_caching.lab.cold_and_warm [--model models/tiny]

A naive benchmark sends the four prompts to a fresh server and calls that cold. It is half warm: the
first prompt leaves what the other three begin with. Then it sends the same four again and calls
that warm. It is too warm: now the questions are known as well, which no server can hope for.
"""

import argparse
import random
from time import process_time
from typing import NamedTuple

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import read_requests
from lessons.l13_prefix_caching.cache import Hits, NoCache
from lessons.l13_prefix_caching.generate import WaveRunner
from lessons.l13_prefix_caching.lab.traffic import tokens
from lessons.l13_prefix_caching.optimized import RadixTree

COMMON, QUESTION, ANSWER, QUESTIONS = 640, 40, 16, 4  # tokens of each, and how many questions
NUM_BLOCKS = 512


class Way(NamedTuple):
    """One way to run four questions. computed: prompt tokens that ran. ttft_s: mean over the four.
    total_s: all four, one after the other, with their answers. Seconds of one processor, so that
    other work on the machine does not count.
    """

    computed: int
    hit_tokens: int
    ttft_s: float
    total_s: float
    answers: list[list[int]]


def ask(runners: list[WaveRunner], prompts: list[list[int]]) -> Way:
    """Send prompt n to runner n, one after the other."""
    hits, firsts, answers, start = Hits(), [], [], process_time()
    for runner, prompt in zip(runners, prompts):
        runner.hits, sent, seen = hits, process_time(), []
        (request,) = read_requests(runner.model.config, [prompt], ANSWER)
        runner.serve([request], lambda row, token, seen=seen: seen.append(process_time()))
        firsts.append(seen[0] - sent)
        answers.append(request.output)
    total_s = process_time() - start
    computed = hits.tokens - hits.hit_tokens
    return Way(computed, hits.hit_tokens, sum(firsts) / len(firsts), total_s, answers)


def five_ways(model: Decoder, seed: int = 13) -> dict[str, Way]:
    """The same four questions in five ways."""
    draw = random.Random(seed)
    common = tokens(draw, COMMON)
    prompts = [common + tokens(draw, QUESTION) for _ in range(QUESTIONS)]
    earlier = common + tokens(draw, QUESTION)

    def fresh(new_cache=RadixTree) -> WaveRunner:
        return WaveRunner(model, NUM_BLOCKS, new_cache=new_cache)

    naive, warm = fresh(), fresh()
    ask([warm], [earlier])
    return {
        "no cache": ask([fresh(NoCache)] * QUESTIONS, prompts),
        "cold: a fresh cache for each": ask([fresh() for _ in prompts], prompts),
        "a naive cold run": ask([naive] * QUESTIONS, prompts),
        "warm: new questions": ask([warm] * QUESTIONS, prompts),
        "a naive warm run": ask([naive] * QUESTIONS, prompts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/tiny")
    torch.set_num_threads(1)
    model = Decoder.from_pretrained(parser.parse_args().model)
    five_ways(model)  # warms the caches of the processor up, too
    print(f"{QUESTIONS} questions of {QUESTION} tokens after {COMMON} common ones")
    for name, way in five_ways(model).items():
        print(
            f"{name:30} {way.computed:5} tokens computed, TTFT {1e3 * way.ttft_s:6.1f} ms, total "
            f"{1e3 * way.total_s:6.0f} ms"
        )


if __name__ == "__main__":
    main()
