"""Sampling in the workers: the tokens of one process, whatever is asked for, and few bytes."""

import pickle
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.shards.greedy import likeliest as likeliest_of_shards
from reference import LLM, SamplingParams
from reference.engine.engine import Engine
from reference.engine.sampler import likeliest
from reference.features.structured import StructuredOutputsParams
from reference.parallel import remote_sampler
from reference.parallel.remote_sampler import RemoteSampler
from reference.parallel.sampling import PartSampler, sample_part
from reference.speculation.speculation import Speculation
from tests import engine_histories, parallel_cases
from tests.engine_histories import History, VirtualRunner
from tests.parallel_cases import (
    FAMILIES,
    answers,
    parallel_engine,
    serve,
    small_args,
    whole_engine,
    write_checkpoint,
)
from tests.speculative_histories import DraftedHistory, TreeRunner

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given

from tests.test_engine_histories import FAULTS, HOUSE, REQUESTS, histories
from tests.test_speculative_histories import DRAFTING

# ---------------------------------------------------------------- histories, without processes

WISHES = [
    dict(temperature=0),
    dict(temperature=0, min_tokens=2),
    dict(temperature=0, logit_bias={3: 4.0, 5: -6.0}),
    dict(temperature=0, logprobs=1),
    dict(temperature=0.8, top_k=5),
    dict(temperature=1.2, repetition_penalty=1.7, presence_penalty=0.5),
    dict(temperature=0, frequency_penalty=1.0, repetition_penalty=1.4),
    dict(temperature=1.0, top_p=0.8, min_p=0.05, logprobs=3),
]


class Across:
    """What a runner of workers has, over virtual logits: all that is said is pickled."""

    part: PartSampler | None = None
    kind, speculates = PartSampler, False

    def ask_of(self, hidden, method, *arguments) -> Future:
        arguments, reply = pickle.loads(pickle.dumps(arguments)), Future()
        self.part = self.part or self.kind(self.speculates, torch.device("cpu"))
        if method == "logits":
            reply.set_result([None, self.logits(hidden, *arguments)])
            return reply
        ways = (lambda rows: likeliest(self.logits(hidden, rows))), partial_logits(self, hidden)
        found = sample_part(self.part, *arguments, *ways, is_first=True)
        reply.set_result([None, pickle.loads(pickle.dumps(found))])
        return reply

    def read_logits(self, reply):
        return reply.result()[1]


def partial_logits(runner, hidden):
    return lambda rows: runner.logits(hidden, rows)


class VirtualWorkers(Across, VirtualRunner):
    """Of an engine that does not speculate."""


class VirtualDrafted(Across, TreeRunner):
    """Of one that does."""

    speculates = True


class SampledHistory(History):
    """Tokens come from a sampler that hears only what it is told."""

    def __init__(self, house, requests, faults, kind=PartSampler, remote=RemoteSampler):
        engine = engine_histories.new_engine(house, faults, Engine)
        engine.runner.__class__ = VirtualWorkers
        engine.runner.kind = kind
        engine.emit = remote(engine.runner)
        super().__init__(house, requests, faults, engine=engine)

    def params(self, index):
        params = super().params(index)
        wish = WISHES[index % len(WISHES)] if params.n == 1 else {}
        wish = wish | dict(min_tokens=min(wish.get("min_tokens", 0), params.max_tokens))
        return replace(params, **wish)

    def logits_after(self, table, sequence, output, read=None):
        logits = super().logits_after(table, sequence, output, read)
        for token, bias in (sequence.params.logit_bias or {}).items():
            logits[:, token] += bias
        return logits

    def check_end(self):
        super().check_end()
        runner, known = self.engine.runner, self.engine.emit.known
        if runner.part is not None:
            held = runner.part.sequences
            assert held.keys() == known.keys(), "a worker keeps what the engine forgot"
            for id, one in held.items():
                pairs = zip(one.output, known[id][0].output)
                assert all(there == here for there, here in pairs), "tokens of another request"


def check_histories(count: int, *slips, **more):
    @histories(count, **more)
    @given(HOUSE, REQUESTS, FAULTS)
    def check(house, requests, faults):
        SampledHistory(house, requests, faults, *slips).run()

    check()


def test_random_histories_sampled_elsewhere(request):
    """Arrivals, aborts, forks, preemption, failing passes; greedy, drawn, penalties, biases."""
    check_histories(2_000 if request.config.getoption("--all") else 60)


class ForgetsItsOwn(PartSampler):
    """What it has sampled is not counted."""

    def __call__(self, logits, told):
        kept = {each.id: list(self.sequences[each.id].output) for each in told}
        found = super().__call__(logits, told)
        for id, output in kept.items():
            self.sequences[id].output = output
        return found


class KeepsAll(PartSampler):
    """Sequences that have ended stay."""

    def hear(self, wanted):
        super().hear(wanted._replace(gone=[]))


class TellsTwice(RemoteSampler):
    """Tokens that were sampled there are told, too."""

    def have(self, sequence, count):
        pass


class AllAlike(RemoteSampler):
    """A biased row wants its likeliest token, too."""

    def begin(self, *what):
        way_of = remote_sampler.way_of
        remote_sampler.way_of = lambda sequence, draft: (
            remote_sampler.LIKELIEST if sequence.is_greedy else way_of(sequence, draft)
        )
        try:
            return super().begin(*what)
        finally:
            remote_sampler.way_of = way_of


class WithoutPrompt(RemoteSampler):
    """Penalties do not see the prompt."""

    def tell(self, *what):
        told = super().tell(*what)
        if told.who is not None:
            told.who.prompt = []
        return told


@pytest.mark.parametrize(
    "slips",
    [
        (ForgetsItsOwn,),
        (KeepsAll,),
        (PartSampler, TellsTwice),
        (PartSampler, AllAlike),
        (PartSampler, WithoutPrompt),
    ],
    ids=lambda slips: slips[-1].__name__,
)
def test_a_slip_is_found_by_histories(slips):
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        check_histories(300, *slips, database=None, derandomize=True, phases=[Phase.generate])


def test_random_histories_with_drafts_verified_elsewhere(request):
    """Sure drafts are verified there, drawn ones here."""
    ways = Counter()

    class Noted(RemoteSampler):
        def begin(self, *what):
            sampling = super().begin(*what)
            ways.update((way, bool(draft)) for way, draft in sampling.ways)
            return sampling

    @histories(1_000 if request.config.getoption("--all") else 60)
    @given(HOUSE, REQUESTS, FAULTS, DRAFTING)
    def check(house, requests, faults, drafting):
        if "tree" in drafting.kind:  # of models whose heads draft, which workers refuse
            drafting = drafting._replace(kind="sure")
        history = DraftedHistory(house, requests, faults, drafting, Speculation)
        engine = history.engine
        engine.runner.__class__ = VirtualDrafted
        engine.emit = Noted(engine.runner, engine.speculation)
        history.run()
        if (part := engine.runner.part) is not None:
            assert part.sequences.keys() == engine.emit.known.keys()

    check()
    print(ways)
    assert {way for way, drafted in ways if drafted} == {"likeliest", "sampled", "fetched"}


def test_the_likeliest_of_shards_is_exact_and_finds_bad_rows():
    """In float64, too. One rank, whose group says nothing."""
    logits = torch.zeros(6, 5, dtype=torch.float64)
    logits[0, 3], logits[0, 4] = 1.0, 1.0 + 1e-12
    logits[1, 2] = torch.nan
    logits[2] = -torch.inf
    logits[3, 1] = torch.inf
    logits[4, :4] = -torch.inf
    tokens, logprobs = likeliest_of_shards(logits, 5, Group.alone())
    assert tokens[[0, 4, 5]].tolist() == [4, 4, 0], "the first of equal ones"
    assert logprobs.isfinite().tolist() == [True, False, False, False, True, True]
    torch.testing.assert_close(logprobs[[0, 4, 5]], logits[[0, 4, 5]].log_softmax(-1).amax(-1))
    tokens, _ = likeliest_of_shards(logits, 4, Group.alone())
    assert tokens[0] == 3, "what is behind the vocabulary is no token"


# ---------------------------------------------------------------- processes

HOW = dict(detokenize=False, ignore_eos=True)
HOUSES = {
    "serial": {},
    "one step ahead": dict(async_scheduling=True),
    "drafts": dict(speculative_config=dict(method="ngram", num_speculative_tokens=3)),
}
MESHES = [dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)]


def watched(engine) -> Counter:
    """How often the workers are asked for what."""
    asked, talk = Counter(), engine.runner.talk
    ask_later = talk.ask_later

    def noted(method, *arguments):
        asked[method] += 1
        return ask_later(method, *arguments)

    talk.ask_later = noted
    return asked


def every_wish(index: int) -> SamplingParams:
    """Of an engine with a tokenizer."""
    wishes = [
        dict(structured_outputs=StructuredOutputsParams(regex="(red|green)[0-9]{1,9}")),
        dict(temperature=0.9, bad_words=["self", " def"], repetition_penalty=1.3),
        dict(temperature=0.7, allowed_token_ids=list(range(200, 900)), seed=4),
        dict(temperature=0, logprobs=0, min_tokens=5, stop="\n"),
        dict(temperature=0, min_tokens=6, stop_token_ids=[*range(0, 4000, 2)]),
        dict(
            temperature=0,
            max_tokens=26,
            structured_outputs=StructuredOutputsParams(regex="(red green blue ){4}"),
        ),
        dict(temperature=0),
        dict(n=3, best_of=4, temperature=1.1, top_k=40, seed=9),
        dict(temperature=0.9, logprobs=20, prompt_logprobs=2, logit_bias={7: 3.0}, seed=3),
        dict(temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
    ]
    return SamplingParams(**dict(seed=1, max_tokens=9) | wishes[index % len(wishes)])


def tokens_and_logprobs(outputs) -> list:
    return [
        [(a.token_ids, a.finish_reason, a.logprobs and len(a.logprobs[0])) for a in o.outputs]
        for o in outputs
    ]


@pytest.mark.parametrize("how", HOUSES)
@pytest.mark.parametrize("mesh", MESHES, ids=["shards", "stages"])
@pytest.mark.sample(2, of="sampling in workers")
def test_every_wish_is_sampled_in_the_workers(mesh, how):
    """And no logits travel, not even where drafts are verified."""
    changes = HOUSES[how]
    common = dict(dtype="float32", device="cpu", max_model_len=128, num_gpu_blocks_override=64)
    prompts = ["def f(x):\n    return x\n\ndef g(x):\n    ", "import ", "a = 1\nb = 1\nc = "] * 4
    params, found = [every_wish(index) for index in range(len(prompts))], []
    for where in ({}, mesh):
        llm = LLM("models/tiny", **common, **where, **changes)
        asked = watched(llm.engine) if where else None
        found.append(llm.generate(prompts, params, use_tqdm=False))
        llm.shutdown()
    assert tokens_and_logprobs(found[1]) == tokens_and_logprobs(found[0])
    assert set(asked) == {"sample", "scores"} and asked["sample"] > 8


@pytest.mark.parametrize("mesh", MESHES, ids=["shards", "stages"])
@pytest.mark.sample(2, of="sampling in workers")
def test_few_bytes_travel(mesh, tmp_path, seed, monkeypatch):
    """Of every row its token: as many bytes for any vocabulary."""
    shape = FAMILIES["llama"] | dict(vocab_size=4000)
    monkeypatch.setitem(parallel_cases.FAMILIES, "llama", shape)
    model = write_checkpoint(tmp_path, "llama", seed)
    engine = parallel_engine(small_args(model, num_gpu_blocks_override=40, **mesh))
    workers, rows, kinds = engine.runner.talk.workers, 4, {}
    kinds["greedy"] = dict(temperature=0)
    kinds["drawn"] = dict(temperature=0.8, top_p=0.9, repetition_penalty=1.2)
    kinds["three logprobs"] = dict(temperature=0.8, logprobs=3)
    try:
        for kind, wish in kinds.items():
            for row in range(rows):
                params = SamplingParams(max_tokens=12, seed=row, **wish, **HOW)
                engine.add_request(f"{kind} {row}", [row + 1] * 3, params)
            engine.step()
            before = workers.sent_bytes, workers.heard_bytes
            for _ in range(8):
                engine.step()
            sent, heard = workers.sent_bytes - before[0], workers.heard_bytes - before[1]
            kinds[kind] = sent // 8, heard // 8
            while engine.has_unfinished_requests:
                engine.step()
    finally:
        engine.close()
    print(kinds)
    logits = 4 * rows * shape["vocab_size"]  # 64,000 bytes in the first edition
    assert logits == 64_000
    # Of both ranks: an empty answer each, and the token ids.
    assert kinds["greedy"][1] < 200 and kinds["drawn"][1] < 600
    assert kinds["three logprobs"][1] < 2_000
    assert all(sent < 2_000 for sent, _ in kinds.values())


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("mesh", MESHES, ids=["shards", "stages"])
@pytest.mark.sample(2, of="sampling in workers")
def test_bad_logits_end_their_step_and_no_worker(mesh, temperature, tmp_path):
    model = write_checkpoint(tmp_path, "mixtral", seed=3)  # whose answers have no token 57
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][57] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=5, **HOW)
    args = small_args(model, enable_prefix_caching=False, **mesh)
    engine = parallel_engine(args)
    try:
        engine.add_request("bad", [3, 57, 4], params)
        with pytest.raises(ValueError, match="largest of row 0 is not finite"):
            while engine.requests:  # with stages, a step's tokens are told steps later
                engine.step()
        assert not engine.requests and engine.scheduler.is_idle
        asked = [([1, 2, 3], params), ([4], params)]
        assert answers(serve(engine, asked)) == answers(serve(whole_engine(args), asked))
    finally:
        engine.close()
