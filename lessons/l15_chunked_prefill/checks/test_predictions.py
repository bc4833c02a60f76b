"""Proves that the numbers and excerpts of the README are those of the code, and that the cost model
counts what a step reads and computes.
"""

from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.calculators import attention_flops
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l15_chunked_prefill.lab import pictures
from lessons.l15_chunked_prefill.lab.benchmark import (
    behind_the_whole_prompt,
    beside_the_last_chunk,
)
from lessons.l15_chunked_prefill.lab.costs import LLAMA_3_8B, StepCost
from lessons.l15_chunked_prefill.lab.experiments import (
    BUDGETS,
    LONG_PROMPT,
    gaps_s,
    long_prompt,
    long_prompt_steps,
    long_ttft_s,
    mixed_trace,
    simulate,
    trade_off,
    two_pools,
)
from lessons.l15_chunked_prefill.lab.films import block_film
from lessons.l15_chunked_prefill.lab.virtual import new_request
from lessons.l15_chunked_prefill.lab.workload import BUDGET, DECODES, arriving_prompt
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
README = pages(ROOM)


@pytest.mark.parametrize("budget", [None, *BUDGETS])
def test_the_predictions_of_the_readme(budget):
    log = long_prompt(budget)
    label = "prompts first" if budget is None else str(budget)
    steps, worst_ms = long_prompt_steps(log), 1e3 * max(gaps_s(log, range(8)))
    assert f"| {label} | {steps} | {long_ttft_s(log):.2f} | {worst_ms:.0f} |" in README


@pytest.mark.sample(4, of="pictures")
def test_the_pools_and_the_swap_of_the_readme():
    for name, way in two_pools().items():
        label = name.replace("together", "both do both").replace("apart, ", "apart, over ")
        row = " | ".join(f"{1e3 * seconds:.0f}" for seconds in way)
        assert f"| {label} | {row} |" in README
    cost = StepCost()
    assert f"{1e3 * cost.recompute_s(4096):.0f} ms to compute" in README
    assert f"{1e3 * cost.swap_s(4096):.0f} ms to copy" in README
    # by pencil: attention, and the prompt of step 6 whole
    prompts = {4096: "{:.1f} for attention", 32768: "Attention costs {:.0f} TFLOP more"}
    for tokens, words in prompts.items():
        flops = attention_flops(cost.model, tokens * (tokens + 1) / 2)
        assert words.format(flops / 1e12) in README
    whole_s = cost.recompute_s(LONG_PROMPT)
    assert f"both take {whole_s:.3f} s" in README


@pytest.mark.sample(4, of="pictures")
def test_a_larger_budget_trades_next_tokens_for_first_ones():
    points = trade_off((512, 2048, 8192))
    firsts, gaps = [first for _, first, _ in points], [gap for *_, gap in points]
    assert firsts == sorted(firsts, reverse=True) and gaps == sorted(gaps)


@pytest.mark.sample(4, of="pictures")
def test_few_steps_have_more_than_4096_tokens_to_run():
    """So the budget of 8192 changes little in the trade-off."""
    tokens = [
        step.computed_tokens for step in simulate(mixed_trace(), ChunkedScheduler, 8192).passes
    ]
    assert 0 < sum(count > 4096 for count in tokens) < len(tokens) / 100


def test_the_example_of_a_preemption():
    """Step 8: who owns blocks in each step, and that no answer is lost."""
    steps = block_film(ChunkedScheduler, [(3, 4), (3, 4)], 4, 2, 8).splitlines()
    assert [step.split()[2] for step in steps[:3]] == ["AABB", "AABB", "AA·A"]
    assert steps[4].endswith("B 5")


def test_the_counts_of_the_quiz():
    """Chunks of a prompt beside eight decodes and alone, and the time of a link."""
    assert (2048 - 100, -(-32768 // (2048 - 8)), 32768 // 2048) == (1948, 17, 16)
    assert 16 * (2048 - 8) == 32640 and "16 of them make 32,640" in README
    assert f"{4096 * 131072 / 1e9:.2f} GB, so about {4096 * 131072 / 50e9 * 1e3:.0f} ms" in README


def test_the_excerpts_of_the_readme_are_the_code():
    code = "".join((ROOM / name).read_text() for name in ("naive.py", "optimized.py"))
    code += (ROOM / "preemption.py").read_text()
    for excerpt in README.split("```python\n")[1:]:
        assert excerpt.split("```")[0] in code


def test_a_step_reads_weights_once_and_sees_causal_pairs():
    """Chunks of a prompt have the pairs and products of the whole, and read weights more often."""
    cost = StepCost()

    def floors(budget):
        scheduler = ChunkedScheduler(BlockManager(100, 16), 1, budget)
        scheduler.add(new_request(0, [1] * 100, 1))
        found = []
        while not scheduler.is_idle:
            step = scheduler.schedule()
            found.append(cost.step_floor(step))
            for sequence in scheduler.finish(step):
                sequence.append(0)
            scheduler.leave()
        return found

    (whole,), chunks = floors(100), floors(30)
    assert sum(floor.flops for floor in chunks) == pytest.approx(whole.flops, rel=1e-12)
    kv = 131072  # 128 KiB a token
    weights = 2 * LLAMA_3_8B.params_read(1)
    assert whole.bytes_moved == weights + 100 * kv
    assert sum(floor.bytes_moved for floor in chunks) == 4 * weights + (30 + 60 + 90 + 100) * kv


def test_the_last_chunk_of_a_prompt_ends_as_the_whole_prompt_does(seed):
    """What the benchmark of the worst wait compares."""
    runner, decodes, whole, last = arriving_prompt(BUDGET + 30)
    expected = behind_the_whole_prompt(runner, decodes, whole, last)()
    got = beside_the_last_chunk(runner, decodes, whole, last)()
    assert [chunk.count for chunk in last.chunks] == [BUDGET - DECODES]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(got) == DECODES + 1


@pytest.mark.parametrize("name", ["spike", "trade_off"])
@pytest.mark.sample(4, of="pictures")
def test_pictures_fit_their_frame(name):
    from lessons.toolbox.draw.figure import overlapping_texts, texts_outside

    figure = getattr(pictures, f"draw_{name}")()
    assert not texts_outside(figure) and not overlapping_texts(figure)
