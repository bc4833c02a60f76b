"""Proves what the planner says of memory, against real parts of real decoders, against numbers
known from elsewhere, and against deployments that others have published.
"""

import math
from dataclasses import replace

import pytest

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import MODELS, ModelShape
from lessons.l01_roofline.planner.plan import make_plan
from lessons.l06_mla.lab.testing import CONFIG as DEEPSEEK
from lessons.l11_cuda_graphs.lab.testing import CONFIG as LLAMA
from lessons.l20_parallelism.lab.planner_command import main
from lessons.l20_parallelism.optimized import new_part
from lessons.l20_parallelism.planner.links import machine_of
from lessons.l20_parallelism.planner.planner import layouts, plan, search
from lessons.l20_parallelism.planner.shares import Layout, experts_held, shares, stages_of
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links, Mesh
from lessons.toolbox.measure.hardware import CHIPS

H100, H200 = CHIPS["h100"], CHIPS["h200"]
LLAMA_70B, LLAMA_405B = MODELS["llama-3-70b"], MODELS["llama-3-405b"]
MIXTRAL, DEEPSEEK_V3 = MODELS["mixtral-8x7b"], MODELS["deepseek-v3"]


# ---------------------------------------------------------------- against real parts


def shape_of(config) -> ModelShape:
    """A decoder's config as lesson 1 describes models."""
    moe, mla = config.moe, config.mla
    experts = {} if moe is None else dict(
        num_experts=moe.n_routed_experts,
        num_experts_per_tok=moe.num_experts_per_tok,
        moe_intermediate_size=moe.moe_intermediate_size,
        num_shared_experts=moe.n_shared_experts,
        num_dense_layers=sum(not moe.has_experts(n) for n in range(config.num_hidden_layers)),
    )  # fmt: skip
    latents = {} if mla is None else dict(
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
    )  # fmt: skip
    return ModelShape(
        "small", "", "", config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, config.intermediate_size, config.vocab_size,
        tie_word_embeddings=config.tie_word_embeddings, **experts, **latents,
    )  # fmt: skip


def weights_of(config, mesh: Mesh, stage: int, expert_parallel: bool) -> int:
    """Elements of the matrices that the first shard of a stage really has."""
    tensor, pipe = Group(list(range(mesh.tp)), 0), Group(list(range(mesh.pp)), stage)
    part = new_part(config, Links(mesh, mesh.rank(0, stage, 0), tensor, pipe), expert_parallel)
    return sum(weight.numel() for weight in part.parameters() if weight.dim() > 1)


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("name", ["llama", "deepseek", "deepseek, experts whole"])
def test_a_share_is_what_a_real_part_has(name, tp, pp):
    """Llama: 2 KV heads, so 4 shards have copies. DeepSeek: latents on all, a shared expert."""
    config, is_whole = LLAMA if name == "llama" else DEEPSEEK, "whole" in name
    config = replace(config, num_hidden_layers=5, sliding_windows=())
    model = shape_of(config)
    layout = Layout(tp, pp, ep=tp if is_whole else 1)
    counted = list(shares(model, layout, batch=1))
    assert [share.stage for share in counted] == stages_of(model, layout)
    for stage, share in enumerate(counted):
        real = weights_of(config, Mesh(tp, pp), stage, is_whole)
        assert share.weight_bytes == 2 * real, (stage, share)


def test_one_gpu_is_lesson_1s_plan():
    """Without a cut nothing is new: weights, cache, buffers, sequences and times are the same."""
    for name in ("llama-3-8b", "qwen3-1.7b", "qwen3-30b-a3b"):
        old, new = make_plan(MODELS[name], H200, 8, 4096, 1), plan(MODELS[name], H200, Layout(), 8)
        (share,) = new.shares
        assert share.weight_bytes == pytest.approx(old.weight_bytes)
        assert share.kv_bytes_per_token == old.kv_bytes_per_token
        assert share.buffer_bytes == old.activation_bytes
        assert new.sequences_that_fit() == old.sequences
        assert new.decode.floor_s == pytest.approx(old.decode.seconds)
        assert new.decode.communication_s == new.decode.idle_s == 0


# ---------------------------------------------------------------- numbers of the text


def test_seventy_billion_on_two_gpus():
    """Guides print 35 GB a GPU. It is 70.6, and 1.4 GB are left: two sequences, on paper."""
    two = plan(LLAMA_70B, H100, Layout(tp=2))
    assert two.fullest.weight_bytes / 1e9 == pytest.approx(70.6, abs=0.05)
    assert two.left_bytes / 1e9 == pytest.approx(1.4, abs=0.05)
    assert two.sequences_that_fit(with_buffers=False) == 2
    assert two.sequences_that_fit() == 1


def test_four_hundred_and_five_billion_on_eight_gpus():
    bf16 = plan(LLAMA_405B, H100, Layout(tp=8))
    assert bf16.left_bytes < 0 and bf16.sequences_that_fit() == 0
    fp8 = plan(LLAMA_405B, H100, Layout(tp=8), context=16384, bits_per_weight=8)
    assert fp8.fullest.weight_bytes / 1e9 == pytest.approx(50.7, abs=0.05)
    assert fp8.sequences_that_fit(with_buffers=False) == 20
    assert fp8.sequences_that_fit() == 19


def test_beyond_the_kv_heads_there_are_copies():
    """Llama-3-70B has 8 KV heads: 16 GPUs hold as much of a token each as 8 do."""
    plans = [plan(LLAMA_70B, H100, Layout(tp=tp)) for tp in (1, 2, 4, 8, 16)]
    kv = [it.fullest.kv_bytes_per_token / 1024 for it in plans]
    assert kv == [320, 160, 80, 40, 40]
    latents = [plan(DEEPSEEK_V3, H100, Layout(tp=tp)).fullest.kv_bytes_per_token for tp in (1, 8)]
    assert latents[0] == latents[1] == calc.kv_bytes_per_token(DEEPSEEK_V3)


def test_one_cut_or_two():
    """TP8 has the faster step; TP4 × PP2 sends less, and prefills more tokens a second."""
    rest = dict(batch=16, context=16384, bits_per_weight=8)
    tp8, both = (plan(LLAMA_405B, H100, layout, **rest) for layout in (Layout(8), Layout(4, 2)))
    assert tp8.decode.seconds < 0.75 * both.decode.seconds
    assert both.decode.communication_s < tp8.decode.communication_s
    assert both.prefill_tokens_per_s_per_gpu > tp8.prefill_tokens_per_s_per_gpu
    assert tp8.prefill.seconds == pytest.approx(both.prefill.seconds, rel=0.1)
    assert both.fullest.weight_bytes == pytest.approx(tp8.fullest.weight_bytes, rel=0.02)
    assert round(tp8.fullest.kv_bytes_per_token / 1024) == 63


# ---------------------------------------------------------------- published deployments


def fits(model, chip, layout, bits) -> bool:
    return plan(model, chip, layout, batch=1, bits_per_weight=bits).sequences_that_fit() > 0


def test_llama_405b_as_its_authors_serve_it():
    """The Llama 3 Herd of Models, section 6.1: BF16 does not fit 8 H100, so two machines, TP
    inside, PP between; 6.2: with FP8 one machine is enough.
    """
    assert not fits(LLAMA_405B, H100, Layout(tp=8), 16)
    assert fits(LLAMA_405B, H100, Layout(tp=8, pp=2), 16)
    assert fits(LLAMA_405B, H100, Layout(tp=8), 8)


@pytest.mark.parametrize(
    "chip, gpus, bits, does_fit",
    [
        ("h200", 8, 8, True),
        ("h100", 8, 8, False),
        ("h100", 16, 8, True),
        ("h200", 8, 16, False),
        ("h200", 16, 16, True),
        ("h100", 16, 16, False),
        ("h100", 32, 16, True),
    ],
)
def test_deepseek_v3_where_sglang_recommends_it(chip, gpus, bits, does_fit):
    """docs.sglang.ai, "DeepSeek V3 usage", table of weight types: FP8 on 8 H200 or 16 H100, BF16 on
    16 H200 or 32 H100.
    """
    boxes = gpus // 8
    assert fits(DEEPSEEK_V3, CHIPS[chip], Layout(tp=8, pp=boxes), bits) == does_fit


def test_deepseek_v3_as_its_authors_serve_it():
    """DeepSeek-V3 technical report, 3.4: prefill on 32 GPUs (TP4, DP8, EP32), decode on 320 (TP4,
    DP80, EP320) with one expert a GPU. H800 and H100 have the same memory.
    """
    prefill, decode = Layout(tp=4, dp=8, ep=32), Layout(tp=4, dp=80, ep=320)
    assert experts_held(DEEPSEEK_V3, prefill) == 8 and experts_held(DEEPSEEK_V3, decode) == 1
    assert fits(DEEPSEEK_V3, H100, prefill, 8) and fits(DEEPSEEK_V3, H100, decode, 8)
    # what it buys: most of a GPU is left for sequences
    assert plan(DEEPSEEK_V3, H100, decode, bits_per_weight=8).left_bytes > 0.7 * 80e9


def test_stages_or_shards_as_nvidia_measured_it():
    """NVIDIA's blog of October 2024, Llama-3.1-405B in FP8 on 8 H200: tensor parallelism answers
    5.6 times faster, pipeline parallelism processes 1.5 times as much.
    """
    tp, pp = Layout(tp=8), Layout(pp=8)
    rest = dict(context=2048, bits_per_weight=8)
    alone = [plan(LLAMA_405B, H200, layout, batch=1, **rest).decode.seconds for layout in (tp, pp)]
    assert 4 < alone[1] / alone[0] < 8
    most = [plan(LLAMA_405B, H200, x, **rest).prefill_tokens_per_s_per_gpu for x in (tp, pp)]
    assert 1.2 < most[1] / most[0] < 1.8


# ---------------------------------------------------------------- the search


@pytest.mark.parametrize("gpus", [4, 8, 16, 64])
def test_a_search_knows_every_layout(gpus):
    """Against all triples that give so many GPUs."""
    for model in (LLAMA_405B, MIXTRAL):
        found = list(layouts(model, gpus))
        assert len(set(found)) == len(found) and all(layout.size == gpus for layout in found)
        heads = math.gcd(gpus, model.num_attention_heads)
        want = {
            (tp, pp, gpus // tp // pp)
            for tp in range(1, heads + 1)
            for pp in range(1, min(gpus, model.num_hidden_layers) + 1)
            if gpus % (tp * pp) == 0 and heads % tp == 0
        }
        assert {(x.tp, x.pp, x.dp) for x in found if x.ep == 1} == want


def test_a_search_finds_the_best_and_keeps_its_limits():
    machine = machine_of(H100)
    found = search(LLAMA_70B, machine, 8, context=8192)
    rates = [it.tokens_per_s_per_gpu for it in found]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0
    for it in found:
        assert 1 <= it.running == it.batch <= it.sequences_that_fit() and it.layout.size == 8
        assert it.running * it.layout.dp <= 256
    limit = found[0].decode.seconds * 0.9
    quick = search(LLAMA_70B, machine, 8, limit, context=8192)
    assert quick and all(it.decode.seconds <= limit for it in quick)
    more = plan(LLAMA_70B, machine, quick[0].layout, quick[0].batch + 1, context=8192)
    assert more.decode.seconds > limit or more.running < more.batch
    assert search(LLAMA_405B, machine, 4) == []


@pytest.mark.parametrize("layout", [Layout(tp=4, pp=2), Layout(pp=3), Layout(tp=16, pp=4)])
def test_the_sequences_that_fit_really_do(layout):
    """Weights, buffers and their caches on every GPU; one more would be too many on some GPU."""
    it = plan(LLAMA_70B, H200, layout, batch=8)
    fit = it.sequences_that_fit()
    held = [
        share.weight_bytes + share.buffer_bytes + fit * it.context * share.kv_bytes_per_token
        for share in it.shares
    ]
    one = [it.context * share.kv_bytes_per_token for share in it.shares]
    assert max(held) <= it.usable_bytes < max(a + b for a, b in zip(held, one))


# ---------------------------------------------------------------- wrong arguments, and the command


@pytest.mark.parametrize(
    "layout, words",
    [
        (Layout(tp=3), "tp: got 3; accepted: a divisor of 32, the heads of mixtral-8x7b"),
        (Layout(pp=33), "pp: got 33; accepted: 1 to 32"),
        (Layout(tp=2, ep=8), "ep: got 8; accepted: 1, tp = 2 or tp · dp = 2"),
        (Layout(tp=0), "tp: got 0"),
        (Layout(dp=2, pp=2, ep=2), "ep: got 2; accepted: 1 or tp = 1 where there are stages"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout, words):
    with pytest.raises(ValueError, match=words):
        plan(MIXTRAL, H100, layout)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(batch=0), "batch: got 0"),
        (dict(memory_share=1.5), "memory_share: got 1.5; accepted: above 0 and at most 1"),
        (dict(bits_per_weight=0), "bits_per_weight is 0"),
        (dict(layout=Layout(ep=2)), "ep: got 2; accepted: 1, because llama-3-70b has no experts"),
    ],
)
def test_plans_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plan(LLAMA_70B, H100, **{"layout": Layout(), **arguments})


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--tp 2", ["70.6 GB", "1.15 GB", "160 KiB", "replica: 1 (2 beside"]),
        ("--model llama-3-405b --tp 8", ["101 GB", "does not fit"]),
        ("--model mixtral-8x7b --gpus 4", ["TP4 × EP4", "DP4 × EP4", "Predictions"]),
    ],
)
def test_the_command_tells_what_the_plan_says(arguments, words, capsys):
    assert main(arguments.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(word in out for word in words), out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--tp 3", "tp: got 3; accepted: a divisor of 64"),
        ("--model x", "model is 'x'; known are"),
        ("--gpus 0", "'0' is not accepted"),
        ("--gpus 4 --tp 2", "--gpus: got 4; accepted: 2, as TP2 needs"),
        ("--inside rope", "inside: got 'rope'; accepted: one of nvlink3"),
        ("--model llama-3-405b --gpus 4", "fit in no layout on H100 SXM"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1
