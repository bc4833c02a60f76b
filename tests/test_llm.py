"""The interfaces that users of vLLM know, on the embedded model: what they give, and what they say."""

import asyncio
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from lessons.l02_naive_attention.naive import generate as alone
from reference import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from reference.detokenizer import Detokenizer
from reference.engine_args import LATER, WITHOUT_EFFECT, EngineArgs
from reference.llm import one_each

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = str(REPOSITORY / "models/tiny")
PROMPTS = ["def quicksort(", "import os\n", "class Stack:\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, max_num_seqs=4, kv_cache_memory_bytes=20_000_000, dtype="float32")


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_answers_are_the_models(llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    model, tokenizer = llm.engine.runner.model, llm.get_tokenizer()
    want = alone(model, [output.prompt_token_ids for output in outputs], 8)
    assert [output.outputs[0].token_ids for output in outputs] == want
    assert texts(outputs) == [tokenizer.decode(tokens) for tokens in want]
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)


def test_one_prompt_token_ids_and_a_list_are_the_same(llm):
    ids = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].prompt_token_ids
    for prompts in (PROMPTS[0], ids, [ids], [PROMPTS[0]]):
        assert texts(llm.generate(prompts, GREEDY, use_tqdm=False)) == texts(
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        )
    assert texts(llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY, use_tqdm=False))


def test_a_stop_string_ends_the_text_and_may_be_kept(llm):
    whole = texts(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False))[0]
    stop = whole[3:6]
    for kept in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=8, stop=stop, include_stop_str_in_output=kept
        )
        answer = llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0]
        assert answer.text == whole[: whole.index(stop)] + stop * kept
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_stop_token_ids_and_the_reason(llm):
    tokens = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[tokens[3]])
    answer = llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0]
    assert answer.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert answer.stop_reason == tokens[3]


def test_best_of_keeps_the_likeliest(llm):
    params = SamplingParams(n=2, best_of=4, temperature=1.0, seed=0, max_tokens=6)
    four = SamplingParams(n=4, temperature=1.0, seed=0, max_tokens=6, logprobs=0)
    best = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs
    drawn = llm.generate(PROMPTS[0], four, use_tqdm=False)[0].outputs
    order = sorted(drawn, key=lambda a: -a.cumulative_logprob / len(a.token_ids))
    assert [a.token_ids for a in best] == [a.token_ids for a in order[:2]]
    assert [a.index for a in best] == [0, 1] and best[0].logprobs is None


def test_ctrl_c_returns_what_there_is(llm, monkeypatch):
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 50, 50)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "abort", "abort"]
    assert len(outputs[1].outputs[0].token_ids) == 4 and not llm.engine.requests
    monkeypatch.undo()
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)), "and it goes on answering"


def test_a_prompt_that_cannot_be_served_costs_nobody_else(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt: got 99999 at 0"):
        llm.generate([[1, 2], [99999]], GREEDY, use_tqdm=False)
    assert not llm.engine.requests and llm.engine.scheduler.is_idle


def test_no_chat_template_is_said(llm):
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_two_engines_on_one_model(llm):
    other = LLM(MODEL, max_num_seqs=2, kv_cache_memory_bytes=5_000_000, dtype="float32")
    assert texts(other.generate(PROMPTS, GREEDY, use_tqdm=False)) == texts(
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    )


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(max_num_seqs=0), "max_num_seqs: got 0"),
        (dict(max_num_seqs=True), "max_num_seqs: got True"),
        (dict(block_size=257), "block_size: got 257; accepted: 1 to 256"),
        (dict(max_model_len=10**6), "accepted: at most 2048, the model's"),
        (dict(max_num_seqs=8, max_num_batched_tokens=4), "a token for each of max_num_seqs"),
        (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization: got 1.5"),
        (dict(dtype="int7"), "dtype: got 'int7'"),
        (dict(scheduling_policy="best"), "fcfs or priority"),
        (dict(enable_prefix_caching=1), "True or False"),
        (dict(kv_cache_memory_bytes=10), "hold no block"),
        (dict(quantization="awq"), "lesson 18"),
        (dict(tensor_parallel_size=2), "lesson 20"),
        (dict(max_num_seq=3), "unknown argument; did you mean max_num_seqs?"),
        (dict(zzz=3), "unknown argument; accepted: model"),
        (dict(device="cuda:7"), "device: got 'cuda:7'"),
    ],
)
def test_arguments_that_cannot_work(arguments, said):
    with pytest.raises(ValueError) as error:
        LLM(MODEL, **arguments)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_arguments_of_guides_are_accepted():
    harmless = {name: values[0] for name, (values, _) in LATER.items()}
    EngineArgs.read(model=MODEL, **harmless, **dict.fromkeys(WITHOUT_EFFECT, True))


@pytest.mark.parametrize(
    "wishes, said",
    [
        (dict(n=0), "n: got 0"),
        (dict(n=3, best_of=2), "best_of: got 2; accepted: n (3) or more"),
        (dict(n=2, temperature=0), "all answers would be equal"),
        (dict(max_tokens=0), "max_tokens: got 0; accepted: None, or"),
        (dict(min_tokens=9, max_tokens=3), "at most max_tokens (3)"),
        (dict(stop=["a", ""]), "none empty"),
        (dict(stop="a", detokenize=False), "text is searched"),
        (dict(logprobs=-1), "logprobs: got -1"),
        (dict(logit_bias={1: 1000}), "from -100 to 100"),
        (dict(temperature=-1), "temperature: got -1"),
        (dict(top_p=0), "top_p: got 0"),
        (dict(seed=-1), "seed: got -1"),
        (dict(detokenize=1), "True or False"),
    ],
)
def test_wishes_that_cannot_work(wishes, said):
    with pytest.raises(ValueError) as error:
        SamplingParams(**wishes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_one_wish_each():
    assert one_each("x", 1, 3) == [1, 1, 1]
    with pytest.raises(ValueError, match="got 2 for 3 prompts"):
        one_each("x", [1, 2], 3)


# ---------------------------------------------------------------- text


def test_characters_are_never_split(llm):
    tokenizer = llm.get_tokenizer()
    text = "naïve — 中文 😀 done"
    detokenizer, shown = Detokenizer(tokenizer, []), []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        detokenizer.append(token)
        shown.append(detokenizer.text)
        assert "\ufffd" not in detokenizer.text and text.startswith(detokenizer.text)
    assert shown[-1] == text


def test_text_that_may_become_a_stop_string_is_held_back(llm):
    tokenizer = llm.get_tokenizer()
    detokenizer = Detokenizer(tokenizer, [], stop=("done!", "zz"))
    for token in tokenizer("ab do", add_special_tokens=False)["input_ids"]:
        assert detokenizer.append(token) is None
    assert detokenizer.text[: detokenizer.safe_length] == "ab "
    for token in tokenizer("ne! x", add_special_tokens=False)["input_ids"]:
        if stop := detokenizer.append(token):
            break
    assert stop == "done!" and detokenizer.text == "ab "


# ---------------------------------------------------------------- many at once, and the command


def test_the_engine_of_an_event_loop():
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(MODEL, max_num_seqs=4, kv_cache_memory_bytes=10_000_000, dtype="float32")
    )

    async def stream(id, prompt, leave_after=None):
        seen = []
        async for output in engine.generate(prompt, GREEDY, id):
            seen.append(output.outputs[0].text)
            if len(seen) == leave_after:
                break
        return seen

    async def everything():
        streams = [stream(str(i), p, 3 if i == 1 else None) for i, p in enumerate(PROMPTS)]
        found = await asyncio.gather(*streams)
        with pytest.raises(ValueError, match=r"prompt: got \[\]"):
            await stream("empty", [])
        waiting = asyncio.create_task(stream("aborted", PROMPTS[0]))
        await asyncio.sleep(0)
        await engine.abort("aborted")
        await engine.abort("nobody")
        await waiting
        cancelled = asyncio.create_task(stream("cancelled", PROMPTS[0]))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        return found

    found = asyncio.run(everything())
    engine.shutdown()
    assert [len(seen) for seen in found] == [8, 3, 8]
    for seen in found:
        assert all(later.startswith(sooner) for sooner, later in pairwise(seen))
    assert not engine.engine.requests
    blocks = engine.engine.scheduler.blocks
    assert blocks.num_free == blocks.num_blocks
    with pytest.raises(RuntimeError, match="the engine has ended: shut down"):
        asyncio.run(stream("late", PROMPTS[0]))


def test_the_command():
    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "reference.generate", "--model", MODEL, *arguments],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    done = command("def f(", "--max-tokens", "5")
    assert done.returncode == 0 and done.stdout.startswith("def f(") and not done.stderr
    done = command("x", "--max-tokens", "0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "max_tokens: got 0" in done.stderr
