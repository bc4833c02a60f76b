"""The interfaces that users of vLLM know, on the embedded model: what they give, and what they
say.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from lessons.l02_naive_attention.naive import generate as alone
from reference import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from reference.engine.llm import one_each
from reference.engine.text import Detokenizer
from tests.engine_cases import assert_clean

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


def test_no_prompts_get_no_answers(llm):
    assert llm.generate([], GREEDY) == []


def test_a_chat_by_a_template_that_the_caller_brings(llm):
    """In the call, or of the whole object; what the template is given; and what it refuses."""
    template = "{{ tone }}{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [{"role": "user", "content": "def f("}]
    params = SamplingParams(temperature=0, max_tokens=4)
    with_tone = {"chat_template_kwargs": {"tone": "# "}, "use_tqdm": False}
    (told,) = llm.chat(talk, params, chat_template=template, **with_tone)
    ids = llm.get_tokenizer().backend_tokenizer.encode("# def f(", add_special_tokens=False).ids
    assert told.prompt_token_ids == ids
    for wrong, said in (
        (dict(chat_template="{{ raise_exception('no') }}"), "messages: no; accepted"),
        (dict(continue_final_message=True), "continue_final_message: got True; accepted: False"),
    ):
        with pytest.raises(ValueError) as error:
            llm.chat(talk, params, **wrong)
        assert said in str(error.value) and "\n" not in str(error.value)
    for wrong, name in ((dict(chat_template="no/such/file"), "chat_template"),
                        (dict(max_logprobs=-2), "max_logprobs")):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}: got"):
            LLM(MODEL, **wrong)


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
    step, calls = llm.engine.advance, []

    def interrupted():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "advance", interrupted)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 50, 50)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "abort", "abort"]
    assert len(outputs[1].outputs[0].token_ids) == 4 and not llm.engine.requests
    monkeypatch.undo()
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)), "and it goes on answering"


def press(llm, monkeypatch, at: list[int]) -> None:
    """Press Ctrl-C in the middle of these passes of the model."""
    runner, passes = llm.engine.runner, []

    class Pressed:
        def __call__(self, *step):
            passes.append(1)
            hidden = runner(*step)
            for _ in range(at.count(len(passes))):
                signal.raise_signal(signal.SIGINT)
            return hidden

        def __getattr__(self, name):
            return getattr(runner, name)

    monkeypatch.setattr(llm.engine, "runner", Pressed())


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="NOT RUN: signals reach only the main thread",
)
@pytest.mark.parametrize("at, tokens", [([4], 4), ([4, 4], 3)])
def test_ctrl_c_in_the_middle_of_a_pass(llm, monkeypatch, at, tokens):
    """The step under way is ended; if Ctrl-C comes again in it, its token is lost."""
    press(llm, monkeypatch, at)
    # because a shell starts what runs in the background deaf to SIGINT
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 50, 50)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert signal.signal(signal.SIGINT, inherited) is signal.default_int_handler
    monkeypatch.undo()
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "abort", "abort"]
    assert len(outputs[1].outputs[0].token_ids) == tokens
    assert_clean(llm.engine)
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)), "and it goes on answering"


def test_a_step_that_raises_leaves_no_request_behind(llm, monkeypatch):
    def fails(*step):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(llm.engine, "runner", Failing(llm.engine.runner, fails))
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        llm.generate(PROMPTS * 3, GREEDY, use_tqdm=False)  # more than there are places
    assert_clean(llm.engine)


class Failing:
    """A runner whose pass is `run`."""

    def __init__(self, runner, run):
        self.runner, self.run = runner, run

    def __call__(self, *step):
        return self.run(*step)

    def __getattr__(self, name):
        return getattr(self.runner, name)


@pytest.mark.parametrize(
    "call, said",
    [
        (dict(prompts=[[1, 2], [99999]]), "prompts[1]: prompt: got 99999 at 0"),
        (dict(prompts=["a", 5]), "prompts[1]: prompt: got 5"),
        (dict(prompts=["a", []]), "prompts[1]: prompt: got []"),
        (dict(prompts="a " * 5000), "prompts[0]: prompt: got 5002 tokens; accepted: at most 2047"),
        (dict(prompts=None), "prompts: got None"),
        (dict(prompts=5), "prompts: got 5"),
        (dict(prompts="a", prompt_token_ids=[[1]]), "prompts, prompt_token_ids: got ('a', [[1]])"),
        (dict(prompts="a", sampling_params={"n": 1}), "sampling_params: got {'n': 1}; accepted"),
        (dict(prompts="a", sampling_params=[]), "sampling_params: got 0 for 1 prompts"),
        (dict(prompts=["a", "b"], priority=[1]), "priority: got 1 for 2 prompts"),
        (dict(prompts="a", priority=0.5), "prompts[0]: priority: got 0.5"),
    ],
)
def test_calls_that_cannot_work_cost_no_other_call(llm, call, said):
    with pytest.raises(ValueError) as error:
        llm.generate(**call, use_tqdm=False)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert_clean(llm.engine)


def test_an_empty_text_is_the_start_token(llm):
    [output] = llm.generate("", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [llm.get_tokenizer().bos_token_id]


def test_no_chat_template_is_said(llm):
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])
    for messages in (5, []):
        with pytest.raises(ValueError, match=r"messages: got .{1,2}; accepted: a conversation, or"):
            llm.chat(messages)


@pytest.mark.parametrize("swap_space, is_swapped", [(1, True), (0, False)])
def test_a_pool_that_preempts_gives_the_same_answers(llm, swap_space, is_swapped):
    params = SamplingParams(temperature=0, max_tokens=40)
    want = texts(llm.generate(PROMPTS, params, use_tqdm=False))
    small = LLM(
        MODEL,
        dtype="float32",
        num_gpu_blocks_override=6,
        preemption_mode="swap",
        swap_space=swap_space,
    )
    outputs = small.generate(PROMPTS, params, use_tqdm=False)
    assert texts(outputs) == want
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert bool(small.engine.scheduler.host.swap.swapped_bytes) is is_swapped


def test_an_engines_seed_is_that_of_requests_without_one(llm):
    """Two engines with one seed draw the same, another seed something else."""
    hot = SamplingParams(temperature=1.5, max_tokens=12, n=2)
    small = dict(
        max_num_seqs=4, max_model_len=256, kv_cache_memory_bytes=5_000_000, dtype="float32"
    )

    def drawn(engine) -> list[list[str]]:
        calls = [engine.generate(PROMPTS, hot, use_tqdm=False) for _ in range(2)]
        return [[a.text for a in output.outputs] for outputs in calls for output in outputs]

    first, same, other = (drawn(LLM(MODEL, seed=seed, **small)) for seed in (7, 7, 8))
    assert first == same != other
    assert first[:3] != first[3:], "the second call draws on"
    assert all(a != b for a, b in first), "and so does the second answer"
    fresh = [drawn(LLM(MODEL, seed=None, **small)) for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_two_engines_on_one_model(llm):
    other = LLM(
        MODEL, max_num_seqs=2, max_model_len=256, kv_cache_memory_bytes=5_000_000, dtype="float32"
    )
    assert texts(other.generate(PROMPTS, GREEDY, use_tqdm=False)) == texts(
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    )


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
        AsyncEngineArgs(
            MODEL,
            max_num_seqs=4,
            max_model_len=256,
            kv_cache_memory_bytes=10_000_000,
            dtype="float32",
        )
    )

    async def stream(id, prompt, leave_after=None):
        seen = []
        async for output in engine.generate(prompt, GREEDY, id):
            seen.append(output.outputs[0])
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
        await engine.abort("unknown")
        await waiting
        cancelled = asyncio.create_task(stream("cancelled", PROMPTS[0]))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        return found

    found = asyncio.run(everything())
    engine.shutdown()
    counts = [[len(output.token_ids) for output in seen] for seen in found]
    # A reader slower than the engine skips outputs, but never the last one.
    assert counts[0][-1] == counts[2][-1] == GREEDY.max_tokens and len(counts[1]) <= 3
    for seen, tokens in zip(found, counts, strict=True):
        assert all(fewer < more for fewer, more in pairwise(tokens))
        assert all(later.text.startswith(sooner.text) for sooner, later in pairwise(seen))
    assert not engine.engine.requests
    blocks = engine.engine.scheduler.blocks
    assert blocks.num_free == blocks.num_blocks
    with pytest.raises(RuntimeError, match="the engine has ended: shut down"):
        asyncio.run(stream("late", PROMPTS[0]))


@pytest.mark.sample(3, of="processes")
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
