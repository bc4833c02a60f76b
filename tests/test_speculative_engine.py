"""Speculation in the engine: no tokens change, whatever a request asks for."""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.batched.batch_sampling import read_tokens, sample_batch
from lessons.l02_naive_attention.naive import generate as alone
from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from lessons.l16_speculative_sampling.lab.chi_squared import (
    chance_of,
    chi_squared,
    sequences,
    tables_of,
)
from lessons.l17_tree_speculation.heads.heads import EagleDraft, MedusaHeads, MTPDraft
from reference import LLM, SamplingParams
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.request import EngineSequence
from reference.speculation.protocol import Ran
from reference.speculation.verification import Verifier
from reference.trace.recorder import read_trace, traced
from tests.engine_cases import CONFIG, LONGEST, assert_clean, new_model, random_prompts, run

pytestmark = pytest.mark.usefixtures("seed")
WITHOUT_MODEL = ("ngram", "suffix")
METHODS = (*WITHOUT_MODEL, "draft", "medusa", "eagle", "mtp")


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture(scope="module")
def drafters(model):
    """What drafts for the model, by method: now and then it is right."""
    draft = new_model()
    for parameter in draft.parameters():
        parameter.add_(0.15 * torch.randn_like(parameter) * parameter.std())
    heads = MedusaHeads(CONFIG.hidden_size, 3), EagleDraft(CONFIG, 32), MTPDraft(CONFIG, 32)
    for part in heads:
        part.to(model.device).eval().requires_grad_(False)
    return dict(ngram=None, suffix=None, draft=draft) | {part.kind: part for part in heads}


def new_engine(model, method=None, drafter=None, count=3, speculative=None, **arguments):
    """speculative: further keys of speculative_config."""
    config = None
    if method is not None:
        name = None if method in WITHOUT_MODEL else "made here"
        config = dict(method=method, model=name, num_speculative_tokens=count)
        config |= speculative or {}
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=60, max_model_len=LONGEST)
    args = EngineArgs(speculative_config=config, **small | arguments)
    engine = engine_over(model, None, args, drafter)
    pools = [engine.runner.pool, *(engine.speculation.proposer.pools if method else ())]
    for pool in pools:
        for slots in pool.tensors:
            if slots.is_floating_point():
                slots.fill_(torch.nan)  # no row may be read that was not written
    return engine


EVERY_WISH = [
    dict(temperature=0),
    dict(temperature=0, repetition_penalty=1.3, min_tokens=6),
    dict(temperature=0.9, top_k=5, logprobs=2),
    dict(temperature=1.2, top_p=0.8, presence_penalty=0.5, frequency_penalty=0.3),
    dict(temperature=0.7, min_p=0.1, logit_bias={3: 4.0, 60: -2.0}, stop_token_ids=(5, 6)),
    dict(temperature=1.0, n=3, prompt_logprobs=1, max_tokens=5),
]


def wishes(index: int) -> SamplingParams:
    common = dict(max_tokens=10, seed=index, detokenize=False)
    return SamplingParams(**common | EVERY_WISH[index % len(EVERY_WISH)])


HOUSES = (
    dict(),
    dict(num_gpu_blocks_override=15),  # preempts
    dict(num_gpu_blocks_override=15, preemption_mode="swap"),
    dict(max_num_batched_tokens=16, enable_prefix_caching=False),
)


@pytest.mark.parametrize("method", METHODS)
def test_every_wish_is_served_as_without_speculation(model, drafters, method):
    """Of a draft model's sampled requests only the distribution is the same, so those are left to
    the tests below."""
    prompts = random_prompts(len(EVERY_WISH), shared=9)
    prompts = [prompt[:20] * 2 for prompt in prompts]  # so that n-grams are found
    params = [wishes(index) for index in range(len(prompts))]
    if method == "draft":
        params = [replace(p, temperature=0, n=1) for p in params]
    prompts = [prompt[: LONGEST - 16] for prompt in prompts]
    want = run(new_engine(model), prompts, params)
    for house in HOUSES if method == "draft" else HOUSES[1:2]:
        engine = new_engine(model, method, drafters[method], **house)
        assert run(engine, prompts, params, [0, 0, 1, 2, 2, 4]) == want, house
        assert engine.speculation.counts.drafted
        # Untrained heads are hardly ever right.
        assert engine.speculation.counts.accepted or method in ("medusa", "eagle", "mtp")


def test_seeds_give_a_draft_models_requests_the_same_tokens_alone_and_in_any_batch(model, drafters):
    prompts = [prompt[:15] for prompt in random_prompts(6)]
    params = [wishes(index) for index in range(6)]
    want = {}
    for at in range(6):
        engine = new_engine(model, "draft", drafters["draft"], num_gpu_blocks_override=30)
        want[str(at)] = run(engine, [prompts[at]], [params[at]])["0"]
    for house in HOUSES:
        engine = new_engine(model, "draft", drafters["draft"], **house)
        assert run(engine, prompts, params, [0, 0, 0, 1, 3, 3]) == want, house


def test_reported_logprobs_are_those_of_the_tokens(model, drafters):
    prompts, params = random_prompts(2), [SamplingParams(logprobs=2, max_tokens=9, temperature=0)]
    params = [replace(params[0], detokenize=False)] * 2
    found = []
    for engine in (new_engine(model), new_engine(model, "draft", drafters["draft"])):
        for at, prompt in enumerate(prompts):
            engine.add_request(str(at), prompt, params[at])
        ended = {}
        while engine.has_unfinished_requests:
            ended |= {out.request_id: out for out in engine.step() if out.finished}
        found.append(ended)
    for id, plain in found[0].items():
        mine, theirs = found[1][id].outputs[0], plain.outputs[0]
        assert mine.token_ids == theirs.token_ids
        assert abs(mine.cumulative_logprob - theirs.cumulative_logprob) < 1e-3
        assert [set(step) for step in mine.logprobs] == [set(step) for step in theirs.logprobs]


def test_an_aborted_request_takes_nothing_with_it(model, drafters):
    engine = new_engine(model, "draft", drafters["draft"])
    for name in "ab":
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=30, detokenize=False))
    for _ in range(3):
        engine.step()
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"
    assert engine.abort_request("unknown") is None
    while engine.has_unfinished_requests:
        engine.step()
    assert_clean(engine)
    assert not engine.speculation.proposer.held


def test_medusa_keeps_a_state_that_the_next_step_does_not_write_over(model, drafters):
    """A replayed step leaves its hidden states in one buffer, and a sequence that waits on the host
    takes no part in the step that overwrites it.
    """
    proposer = new_engine(model, "medusa", drafters["medusa"]).speculation.proposer
    (sequence,) = [EngineSequence(0, [1, 2, 3], 5, RowParams(), frozenset())]
    features = torch.randn(3, CONFIG.hidden_size, device=model.device)
    proposer.observe([Ran(sequence, 0, 3, range(3))], features, {})
    want = features[2].clone()
    features.zero_()
    assert torch.equal(proposer.states[0], want)


# ---------------------------------------------------------------- the distribution


class DrawsFromTheTarget(Verifier):
    """After a rejection it draws from p, not from what is left of p."""

    def accept(self, logits, rows, drafts):
        found, first = super().accept(logits, rows, drafts), 0
        drawn = read_tokens(sample_batch(logits, self.sure(rows, logits.device)))
        for (tokens, _), draft in zip(found, drafts):
            if len(tokens) <= len(draft.tokens):
                tokens[-1] = drawn[first + len(tokens) - 1]
            first += len(draft.tokens) + 1
        return found


def chance_of_outputs(model, draft, verifier=None, total=3000, chooser=None) -> float:
    """How likely a deviation as large as that of the engine's outputs is."""
    params = dict(temperature=1.0, top_k=4)
    prompt, length = [7, 8, 9, 7, 8], 4
    tables = tables_of(model, draft, prompt, RowParams(**params), length)
    engine = new_engine(model, "draft", draft, max_num_seqs=50, num_gpu_blocks_override=400)
    speculation = engine.speculation
    speculation.verifier = verifier or speculation.verifier
    engine.scheduler.chooser = chooser
    first = random.randrange(2**40)
    outputs = []
    for start in range(0, total, 50):
        wish = SamplingParams(
            **params, n=50, seed=first + start, max_tokens=length, ignore_eos=True, detokenize=False
        )
        outputs += run(engine, [prompt], [wish])["0"]
    assert 0 < speculation.counts.accepted < speculation.counts.drafted
    return chance_of(*chi_squared(sequences(tables, outputs), tables.expected * total))


def test_sampled_outputs_follow_the_targets_distribution(model, drafters):
    """False alarm: 1e-9."""
    assert chance_of_outputs(model, drafters["draft"]) > 1e-9


def test_a_draw_from_p_after_a_rejection_is_found(model, drafters):
    assert chance_of_outputs(model, drafters["draft"], DrawsFromTheTarget()) < 1e-9


# ---------------------------------------------------------------- text, metrics, trace


@pytest.fixture(scope="module")
def llm():
    return LLM(
        "models/tiny",
        dtype="float32",
        device="cpu",
        speculative_model="[ngram]",
        num_speculative_tokens=4,
        num_gpu_blocks_override=64,
        max_model_len=256,
    )


TEXT = "    assert x == 1\n    assert x == 2\n    assert x == 3\n"


def test_a_stop_string_inside_an_accepted_run_ends_the_text(llm):
    plain = LLM(
        "models/tiny", dtype="float32", device="cpu", num_gpu_blocks_override=64, max_model_len=256
    )
    for stop in ("== 5", "assert", "x =", "\n"):
        for include in (False, True):
            params = SamplingParams(
                temperature=0, max_tokens=40, stop=stop, include_stop_str_in_output=include
            )
            want, got = (
                each.generate(TEXT, params, use_tqdm=False)[0].outputs[0] for each in (plain, llm)
            )
            assert got == want, stop


def test_metrics_and_trace_tell_what_speculation_did(llm, tmp_path):
    before = replace(llm.engine.speculation.counts)
    path = tmp_path / "steps.json"
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with traced(llm.engine, path):
        (output,) = llm.generate(TEXT, params, use_tqdm=False)
    counts = output.metrics.speculation
    assert counts.emitted == 40 == counts.passes + counts.accepted
    assert 0 < counts.accepted <= counts.drafted and counts.tokens_per_pass > 1.2
    assert counts.acceptance_rate == counts.accepted / counts.drafted
    assert llm.engine.speculation.counts.emitted == before.emitted + 40
    steps = read_trace(path).steps
    drafts = [pair for step in steps for pair in step.get("drafts", {}).values()]
    assert sum(drafted for drafted, _ in drafts) == counts.drafted
    assert sum(accepted for _, accepted in drafts) == counts.accepted


def test_an_engine_without_speculation_counts_none(model):
    engine = new_engine(model)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2, detokenize=False))
    assert engine.requests["a"].metrics.speculation is None


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(method="draft", num_speculative_tokens=3), "model: got None; accepted: a folder"),
        (dict(method="ngram"), "num_speculative_tokens: got None"),
        (dict(method="ngram", num_speculative_tokens=0), "num_speculative_tokens: got 0"),
        (dict(method="ngram", num_speculative_tokens=True), "num_speculative_tokens: got True"),
        (dict(method="ngram", num_speculative_tokens=64), "at most 63, below max_model_len"),
        (dict(method="ngrams", num_speculative_tokens=2), "did you mean 'ngram'?"),
        (dict(method="NGRAM", num_speculative_tokens=2), "did you mean 'ngram'?"),
        (dict(model="models/tiny-eagle3", num_speculative_tokens=2), "'eagle' for models/tiny-eag"),
        (dict(method="magic", num_speculative_tokens=2), "accepted: draft, ngram, suffix, medusa"),
        (dict(method=3, num_speculative_tokens=2), "method: got 3"),
        (dict(method="ngram", num_speculative_tokens=2, num_tokens=3), "unknown key 'num_tokens'"),
        (dict(method="ngram", num_speculative_tokens=2, prompt_lookup_min=4), "at most prompt_loo"),
        (dict(model="x", num_speculative_tokens=2, prompt_lookup_max=4), "which alone reads it"),
        (dict(method="ngram", num_speculative_tokens=2, suffix_decoding_max_tree_depth=9), "alone"),
        (dict(method="suffix", prompt_lookup_max=4), "method 'ngram', which alone reads it"),
        (dict(method="suffix", model="models/tiny"), "None with method 'suffix'"),
        (dict(method="suffix", draft_sample_method="probabilistic"), "None or greedy with method"),
        (dict(method="suffix", suffix_decoding_max_tree_depth=0), "tree_depth: got 0; accepted: a"),
        (dict(method="suffix", suffix_decoding_max_tree_depth=2.0), "tree_depth: got 2.0; accepte"),
        (dict(method="suffix", suffix_decoding_max_cached_requests=-1), "a whole number, 0 or"),
        (dict(method="suffix", suffix_decoding_max_spec_factor=-0.5), "a number, 0 or more"),
        (dict(method="suffix", suffix_decoding_max_spec_factor=float("nan")), "factor: got nan"),
        (dict(method="suffix", suffix_decoding_min_token_prob=1.5), "a number from 0 to 1"),
        (dict(method="ngram", num_speculative_tokens=2, model="models/tiny"), "None with method"),
        (dict(num_speculative_tokens=2), "method: got None"),
        ("ngram", "None, or a dict"),
        ([], "None, or a dict"),
        (
            dict(model="models/tiny-medusa", method="eagle", num_speculative_tokens=2),
            "'medusa' for",
        ),
        (dict(model="models/tiny-medusa", method="medusa", num_speculative_tokens=9), "at most 4"),
        (dict(method="mtp", num_speculative_tokens=2), "models/tiny has no MTP layer"),
        (dict(method="glm4_moe_mtp", num_speculative_tokens=2), "models/tiny has no MTP layer"),
        (dict(method="mtp", model="models/tiny-eagle", num_speculative_tokens=2), "'eagle' for"),
        (dict(method="mtp"), "num_speculative_tokens: got None"),
        (dict(model="models", num_speculative_tokens=2), "models"),
        (dict(model="models/tiny", method="medusa", num_speculative_tokens=2), "kind in"),
    ],
)
def test_a_config_that_cannot_work_is_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as error:
        LLM("models/tiny", speculative_config=given, max_model_len=64, num_gpu_blocks_override=9)
    assert said in str(error.value) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(speculative_model="[ngram]"), "num_speculative_tokens: got None"),
        (dict(num_speculative_tokens=3), "got no speculative_model"),
        (
            dict(speculative_model="x", speculative_config=dict(method="ngram")),
            "got both; accepted: speculative_config",
        ),
        (
            dict(speculative_model="[ngram]", num_speculative_tokens=3, max_num_batched_tokens=100),
            "256 or more, 4 tokens for each of max_num_seqs",
        ),
        (dict(speculative_modl="x"), "did you mean speculative_config?"),
    ],
)
def test_older_spellings_that_cannot_work_are_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as error:
        EngineArgs.read(**given)
    assert said in str(error.value) and "\n" not in str(error.value), error.value


def test_both_spellings_ask_for_the_same():
    older = EngineArgs.read(
        speculative_model="[ngram]", num_speculative_tokens=5, ngram_prompt_lookup_max=4
    )
    newer = dict(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4)
    assert older == EngineArgs.read(speculative_config=newer)
    older = EngineArgs.read(speculative_model="models/tiny-draft", num_speculative_tokens=5)
    newer = dict(method="draft_model", model="models/tiny-draft", num_speculative_tokens=5)
    assert older == EngineArgs.read(speculative_config=newer)
    assert EngineArgs.read(speculative_model=None, num_speculative_tokens=None) == EngineArgs()


def test_a_draft_of_another_vocabulary_or_tokenizer_is_refused(tmp_path):
    import json
    import shutil

    folder = tmp_path / "other"
    shutil.copytree("models/tiny-draft", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = list(vocab)[700:702]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="tokenizer differs from the target's in 4 entries"):
        LLM("models/tiny", speculative_model=str(folder), num_speculative_tokens=2)


def test_heads_of_another_model_are_refused():
    config = dict(method="medusa", model="models/tiny-medusa", num_speculative_tokens=2)
    with pytest.raises(ValueError, match="was trained for the target"):
        LLM("models/tiny-draft", speculative_config=config)


def test_beam_search_runs_plainly_on_a_speculative_engine(llm):
    from reference import BeamSearchParams

    params = BeamSearchParams(beam_width=2, max_tokens=4)
    plain = LLM(
        "models/tiny", dtype="float32", device="cpu", num_gpu_blocks_override=64, max_model_len=256
    )
    got, want = (each.beam_search([TEXT], params)[0].sequences for each in (llm, plain))
    assert [s.tokens for s in got] == [s.tokens for s in want]


def test_greedy_tokens_are_those_of_naive_generation(model, drafters):
    prompts, limits = random_prompts(3), [9, 12, 5]
    params = [SamplingParams(temperature=0, max_tokens=n, detokenize=False) for n in limits]
    got = run(new_engine(model, "draft", drafters["draft"]), prompts, params)
    assert [got[str(at)][0] for at in range(3)] == alone(model, prompts, limits)


def test_suffixes_have_vllms_keys_and_defaults():
    config = EngineArgs.read(speculative_config=dict(method="suffix")).speculative_config
    assert config.num_speculative_tokens == 24
    assert config.suffix_limits == (24, 10_000, 1.0, 0.1)
    given = dict(method="suffix", num_speculative_tokens=3, suffix_decoding_max_tree_depth=7)
    config = EngineArgs.read(speculative_config=given).speculative_config
    assert (config.num_speculative_tokens, config.suffix_limits.max_tree_depth) == (3, 7)
