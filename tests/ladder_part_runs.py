"""Runs for parts of lessons 2 to 14: each is its lesson's rung of the ladder."""

from dataclasses import replace
from unittest.mock import patch

from lessons.l02_naive_attention.naive import generate as recompute
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.generate import generate as one_by_one
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l05_gqa.naive import REPEATED
from lessons.l05_gqa.optimized import IN_GROUPS
from lessons.l07_kernel_fusion.fused_decoder import FUSED_LAYERS
from lessons.l09_flash_attention.optimized import FLASH_PROMPTS
from lessons.l10_flash_decoding.optimized import IN_SPLITS
from lessons.l11_cuda_graphs import optimized as graphs
from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.l12_paged_kv.generate import generate as paged
from lessons.l14_continuous_batching.loop import generate as continuous
from tests.engine_cases import CONFIG, new_model
from tests.part_runs import ONE_LAYER, RUNS, part, prompts, served

__all__ = ["RUNS"]  # those of part_runs, too


def on(rung: Rung):
    """What a rung of lesson 3's loop answers."""
    return one_by_one(new_model(), prompts(), 3, rung=rung)


@part("2.1")
@part("4.1")
def without_a_cache():
    return recompute(new_model(), prompts(), 3)


@part("3.2")
def preallocated():
    return on(PREALLOCATED)


@part("5.1")
def repeated():
    return on(REPEATED)


@part("5.2")
def in_groups_as_on_a_gpu():
    """The rung's kernel, interpreted."""
    rung = replace(IN_GROUPS, stand_ins=IN_GROUPS.kernels)
    return one_by_one(new_model(ONE_LAYER), prompts()[1:], 2, rung=rung)


@part("7.2")
def fused_layers():
    return on(FUSED_LAYERS)


@part("9.1")
@part("9.4")
def flash_prompts():
    """Hidden states of a prompt of several tiles, in two passes."""
    model = FLASH_PROMPTS.prepare(new_model(replace(CONFIG, max_position_embeddings=256)))
    cache = FLASH_PROMPTS.new_cache(model, 1, 200)
    tokens, sums = [n % 59 for n in range(200)], []
    for held, end in ((0, 120), (120, 200)):
        batch = new_batch([(tokens[held:end], held)], 200, model.device)
        sums += model(batch.tokens, cache.attending(batch)).sum(dim=-1).tolist()
    return [round(value, 3) for value in sums]


@part("8.1")
@part("10.1")
def in_splits():
    return on(IN_SPLITS)


@part("11.4")
def captured_as_on_a_gpu():
    """The rung with steps that are captured by a simulated GPU."""

    def step(model, pool):
        return graphs.GraphRunner(model, pool, SimulatedGraphs(0))

    with patch.object(graphs, "graph_step", step):
        return graphs.generate(new_model(), prompts(), 3)


@part("12.2")
def waves():
    return paged(new_model(), prompts(), 3)


@part("13.2")
def known_blocks():
    """An engine whose prefix cache knows blocks of new prompts: all of one, and of another one that
    has the same tokens at a later place.
    """
    first = prompts()[0]
    return served(new_model(), again=[[*first, 1], [*first[4:8], *first[4:8], 1]])


@part("14.3")
def continuous_batching():
    return continuous(new_model(), prompts(), [3, 1, 4], max_num_seqs=2)
