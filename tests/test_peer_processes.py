"""vLLM and llama.cpp as contenders: what is asked of them in another process, by stand-ins that say
what they were asked.
"""

import sys
import textwrap

import pytest

from reference.bench.peers import contenders, processes
from reference.bench.peers.contenders import Library
from reference.bench.peers.processes import llama_cpp, processor_time, python_with, vllm

# Each answers with the prompt's tokens in reverse, and ends at the limit or with token 0.
LLAMA = """
    from types import SimpleNamespace

    ggml_type = SimpleNamespace(GGML_TYPE_F32=0)
    llama_flash_attn_type = SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_DISABLED=0)

    class CommonParams:
        def __init__(self):
            self.model, self.cpuparams = SimpleNamespace(), SimpleNamespace()
            self.cpuparams_batch = SimpleNamespace()

    class Server:
        def __init__(self, params):
            print("what it prints is no answer")
            assert params.n_ctx == params.n_parallel * 100 and not params.warmup
            assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 1

        def handle_completions(self, asked):
            assert not asked["cache_prompt"] and asked["temperature"] == 0
            if not asked["prompt"]:
                return {"code": 400, "message": "no prompt"}
            ids = asked["prompt"][::-1][: asked["n_predict"]]
            reason = "length" if len(ids) == asked["n_predict"] else "stop"
            content = [{"id": token} for token in ids]
            choice = {"text": "t", "finish_reason": reason, "logprobs": {"content": content}}
            return {"choices": [choice]}
"""
VLLM = """
    import time
    from types import SimpleNamespace

    class LLM:
        def __init__(self, **told):
            self.forgot, self.told = 0, told

        def reset_prefix_cache(self):
            self.forgot += 1

        def generate(self, prompts, params, use_tqdm):
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
            return [self.output(one["prompt_token_ids"], p) for one, p in zip(prompts, params)]

        def output(self, prompt, params):
            ids = [*prompt[::-1], 0][: params["max_tokens"]] + [self.forgot] * params.get("tell", 0)
            one = SimpleNamespace(
                index=0, text="t", token_ids=ids, cumulative_logprob=None, logprobs=None,
                finish_reason="length" if ids[-1] else "stop", stop_reason=None)
            return SimpleNamespace(prompt=None, prompt_token_ids=prompt, prompt_logprobs=None,
                                   outputs=[one], finished=True)

    SamplingParams = dict
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A Python whose vllm and xllamacpp are the stand-ins."""
    (tmp_path / "xllamacpp.py").write_text(textwrap.dedent(LLAMA))
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(textwrap.dedent(VLLM))
    (tmp_path / "vllm/sampling_params.py").write_text("StructuredOutputsParams = dict\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "PYTHON", tmp_path / "none")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_each_is_asked_all_requests_at_once_and_its_end_is_named(here):
    starts = {"llama.cpp": lambda: llama_cpp("x.gguf", 2, 100), "vLLM": lambda: vllm("folder")}
    for name, start in starts.items():
        library, ticks = Library(start, [0]), []
        rows = library(
            [[5, 6], [7, 8, 9], [3]], [9, 2, 1], lambda row, token, to=ticks: to.append(row)
        )
        assert rows == [[6, 5, 0], [9, 8], [3]], name
        assert ticks == [0, 0, 0, 1, 1, 2]
        assert library.one_by_one([[5, 6], [7]], [9, 9]) == [[6, 5, 0], [7, 0]]
        library.renew()


def test_a_refused_request_is_an_error(here):
    library = Library(lambda: llama_cpp("x.gguf", 2, 100), [0])
    with pytest.raises(RuntimeError, match="no prompt"):
        library([[5], []], [1, 1])


def test_a_process_that_ends_says_how(here):
    (here / "xllamacpp.py").write_text("raise SystemExit(3)")
    library = Library(lambda: llama_cpp("x.gguf", 2, 100), [0])
    with pytest.raises(RuntimeError, match=r"llama\.cpp ended with exit code 3"):
        library([[5]], [1])


def test_its_processor_time_counts_and_a_renewed_one_forgets(here):
    before = processor_time()
    with vllm("folder") as theirs:
        (answer,) = theirs([{"prompt": [5], "params": {"max_tokens": 1, "tell": 1}}])
        assert answer["outputs"][0]["token_ids"] == [5, 0]
        assert 0.2 <= theirs.cpu_s < processor_time() - before
        theirs.forget()
        (answer,) = theirs([{"prompt": [5], "params": {"max_tokens": 1, "tell": 1}}])
        assert answer["outputs"][0]["token_ids"] == [5, 1]


def test_which_python_has_them(here, monkeypatch):
    assert {str(python_with(name)) for name in processes.MODULES} == {sys.executable}
    assert contenders.installed() == list(processes.MODULES)
    (here / "xllamacpp.py").unlink()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(here)])
    assert contenders.installed() == []
    monkeypatch.setattr(processes, "PYTHON", here / "python")
    (here / "python").touch()
    assert contenders.installed() == list(processes.MODULES)
