"""Every name of vLLM 0.32's interface works, is accepted without effect and said, or is refused in
one line by its reason; and the page that says which is up to date.
"""

import json
import subprocess
import warnings
from pathlib import Path

import pytest
from pydantic import ValidationError
from tqdm.auto import tqdm

import reference.engine.llm
from reference import (
    LLM,
    AsyncEngineArgs,
    BeamSearchParams,
    EngineArgs,
    SamplingParams,
    StructuredOutputsParams,
)
from reference.bench.peers.processes import PYTHON
from reference.engine.compatibility import reasons
from reference.engine.compatibility import vllm_names as listing
from reference.engine.compatibility.reading import LIST, asks_for_nothing, route_reason, vllm_names
from reference.engine.compatibility.status import (
    BODIES,
    NO_EFFECT,
    NOT_HERE,
    OURS_WITHOUT_EFFECT,
    PAGE,
    WORKS,
    status,
    with_table,
)
from reference.server import flags

MODEL = str(Path(__file__).resolve().parents[1] / "models/tiny")
NAMES = [(group, name) for group, names in vllm_names().items() for name in names]
CALLED = {
    "LLM": LLM,
    "AsyncEngineArgs": AsyncEngineArgs,
    "SamplingParams": SamplingParams,
    "BeamSearchParams": lambda **wishes: BeamSearchParams(1, 1, **wishes),
    "StructuredOutputsParams": lambda **wishes: StructuredOutputsParams(**wishes),
}
A_THING = object()  # no argument takes it


@pytest.fixture
def without_model(monkeypatch):
    """LLM reads its arguments and loads nothing."""
    monkeypatch.setattr(reference.engine.llm, "new_engine", lambda args: None)


def of_kind(kind: str, *groups: str) -> list[tuple[str, str]]:
    """Names of this status."""
    return [
        (group, name)
        for group, name in NAMES
        if group in groups and status(group, name).kind == kind and group != "routes"
    ]


@pytest.mark.parametrize("group", vllm_names())
def test_every_name_has_one_status(group):
    for name in vllm_names()[group]:
        found = status(group, name)  # KeyError for a name that nothing decides
        assert bool(found.reason) == (found.kind != WORKS), name


@pytest.mark.parametrize("table", [reasons.WITHOUT_EFFECT, reasons.REFUSED])
def test_the_tables_have_a_name_once_and_no_name_in_vain(table):
    older = {"guided_decoding_backend", "worker_use_ray", "use_v2_block_manager", "task"}
    older |= {"disable_log_requests", "max_seq_len_to_capture", "uvicorn_log_config"}
    older |= {"max_logprobs", "chat_template"}  # of LLM, and not of EngineArgs
    for group, by_reason in table.items():
        names = " ".join(by_reason.values()).split()
        assert sorted(set(names)) == sorted(names), group
        asked = {
            name.removeprefix("--").replace("-", "_") if kind == "vllm serve" else name
            for kind, name in NAMES
            if status(kind, name).reason
        }
        assert set(names) - asked <= older, group
    for both in set(reasons.WITHOUT_EFFECT) & set(reasons.REFUSED):
        assert not set(" ".join(reasons.WITHOUT_EFFECT[both].values()).split()) & set(
            " ".join(reasons.REFUSED[both].values()).split()
        )


@pytest.mark.parametrize("group, name", of_kind(WORKS, *CALLED))
def test_what_works_is_read(without_model, group, name):
    """A thing that cannot be a value is refused as one, or read later; the name is known."""
    try:
        CALLED[group](**{name: A_THING})
    except (ValueError, TypeError) as error:
        said = str(error)
        assert "unknown argument" not in said and "of vLLM that" not in said
        assert "keyword" not in said, "Python's own refusal of a name"


@pytest.mark.parametrize("group, name", of_kind(NO_EFFECT, *CALLED))
def test_what_has_no_effect_is_accepted_and_said(without_model, group, name):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        CALLED[group](**{name: 0.5 if name == "temperature" else A_THING})
    if (group, name) not in OURS_WITHOUT_EFFECT:
        [line] = [str(one.message) for one in said]
        assert said[0].filename == __file__, "the warning names the caller's line"
        assert line == f"{name}: accepted without effect, because {status(group, name).reason}"


@pytest.mark.parametrize("group, name", of_kind(NOT_HERE, *CALLED))
def test_what_is_refused_is_named_with_the_reason(without_model, group, name):
    with pytest.raises(ValueError) as error:
        CALLED[group](**{name: A_THING})
    assert str(error.value) == (
        f"{name}: an argument of vLLM that this engine does not have, because "
        f"{status(group, name).reason}"
    )
    CALLED[group](**{name: None})  # which asks for nothing


def test_the_default_of_vllm_asks_for_nothing():
    args = EngineArgs(
        MODEL, cpu_offload_gb=0, enable_sleep_mode=False, logprobs_mode="raw_logprobs"
    )
    assert args == EngineArgs(MODEL)
    assert not asks_for_nothing("LLM", "cpu_offload_gb", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EngineArgs(MODEL, trust_remote_code=False, load_format="auto")


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: LLM(MODEL, max_num_seq=3), "did you mean max_num_seqs?"),
        (lambda: LLM(MODEL, max_logprob=3), "did you mean max_logprobs?"),
        (lambda: EngineArgs(max_model_length=3), "did you mean max_model_len?"),
        (lambda: AsyncEngineArgs(max_waiting_request=3), "did you mean max_waiting_requests?"),
        (lambda: SamplingParams(temprature=1), "did you mean temperature?"),
        (lambda: BeamSearchParams(beam_widht=1), "did you mean beam_width?"),
        (lambda: StructuredOutputsParams(jsn={}), "did you mean json?"),
        (lambda: SamplingParams(qqqq=1), "unknown argument; accepted: n, best_of"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(call, said):
    with pytest.raises(ValueError) as error:
        call()
    assert said in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) <= 300


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, device="cpu", num_gpu_blocks_override=32, max_num_seqs=2)


@pytest.mark.parametrize("method", ["generate", "enqueue", "chat", "beam_search"])
def test_the_calls_of_an_llm(llm, method):
    call = getattr(llm, method)
    for name in vllm_names()[f"LLM.{method}"]:
        found = status(f"LLM.{method}", name)
        if found.kind == NOT_HERE:
            with pytest.raises(ValueError, match=rf"{name}: an argument of vLLM that .* because"):
                call("x", None, **{name: {"a": 1}})
    with pytest.raises(
        ValueError, match="lora_requst: unknown argument; did you mean lora_request"
    ):
        call("x", None, lora_requst=None)
    with pytest.warns(UserWarning, match="concurrency_limit: accepted without effect"):
        llm.beam_search("x", BeamSearchParams(1, 1), concurrency_limit=3)


def test_the_methods_of_an_llm(llm):
    for name in vllm_names()["methods of LLM"]:
        found = status("methods of LLM", name)
        if found.kind == WORKS:
            assert callable(getattr(llm, name))
        else:
            assert not hasattr(llm, name)
            with pytest.raises(AttributeError, match=rf"{name}: a method of vLLM that .*, because"):
                getattr(llm, name)
    with pytest.raises(AttributeError, match="genrate: unknown method; did you mean generate"):
        llm.genrate("x")


def of_flag(flag: str) -> list[str]:
    """The flag with a value, if it takes one."""
    values = {"--port": ["1"], "--lora-modules": ["a=b"], "--allowed-origins": ['["a"]']}
    is_switch = vllm_names()["vllm serve"][flag] == ""
    return [flag] if is_switch else [flag, *values.get(flag, ["1"])]


def test_flags(capsys):
    for flag in vllm_names()["vllm serve"]:
        found = status("vllm serve", flag)
        if found.kind == NOT_HERE:
            with pytest.raises(SystemExit):
                flags.parse(of_flag(flag), "serve")
            said = f"{flag}: a flag of vLLM that this engine does not have, because {found.reason}"
            assert said in capsys.readouterr().err
        else:
            notes = flags.notes(flags.parse(of_flag(flag), "serve"))
            said = f"{flag}: accepted without effect, because {found.reason}"
            assert notes == ([said] if found.kind == NO_EFFECT else [])


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_bodies(path):
    for name in vllm_names()[path]:
        found = status(path, name)
        with pytest.raises(ValidationError) as error:  # A_THING is no JSON
            BODIES[path].model_validate({name: A_THING, "no_such_field": 1})
        said = str(error.value)
        assert ("because" in said) == (found.kind == NOT_HERE), name
        if found.kind == NOT_HERE:
            assert f"{name}: " in said and found.reason.partition(" (but")[0] in said
            with pytest.raises(ValidationError, match="no_such_field: unknown field"):
                BODIES[path].model_validate({name: None, "no_such_field": 1})


def test_paths():
    for path in vllm_names()["routes"]:
        found, asked = status("routes", path), path.replace("{response_id}", "resp_1")
        assert found.kind == WORKS or route_reason(asked) == found.reason
    assert route_reason("/v1/responses/a/b") is route_reason("/nothing") is None


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "python -m reference.engine.compatibility.status"


def test_kinds_and_defaults_are_read_from_signatures():
    def call(self, a: int, b: "str | None" = None, *, c: Path = MODEL * 9, **more): ...

    assert listing.parameters(call) == {"a": "int", "b": "str | None = None", "c": "Path"}


def test_vllm_still_has_these_names(request):
    if not PYTHON.exists():
        pytest.skip("NOT RUN: needs vLLM, which make peers installs")
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: vLLM takes long to start, make test-all")
    done = subprocess.run(
        [PYTHON, listing.__file__], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout) == json.loads(LIST.read_text(encoding="utf-8"))


def test_what_is_enqueued_is_answered_later(llm):
    params = SamplingParams(temperature=0, max_tokens=5)
    expected = [output.outputs[0].text for output in llm.generate(["def f(", "x"], params)]
    first = llm.enqueue("def f(", params)
    assert len(first) == 1 and llm.wait_for_completion() != [] == llm.wait_for_completion()
    ids = llm.enqueue(["def f("], params) + llm.enqueue("x", params)
    llm.generate("def g(", SamplingParams(max_tokens=50))  # which steps the others, too
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].text for output in outputs] == expected
    with pytest.raises(ValueError, match=r"output_type: got .*int"):
        llm.wait_for_completion(int)


def test_the_bar_may_be_of_another_kind(llm):
    made = []

    def new_bar(**wishes):
        made.append(wishes["total"])
        return tqdm(**wishes)

    llm.generate(["x", "y"], SamplingParams(max_tokens=2), use_tqdm=new_bar)
    assert made == [2]


def test_the_content_of_messages_has_the_format_that_the_template_reads(llm):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    params = SamplingParams(max_tokens=1)

    def prompt(content, form):
        message = [{"role": "user", "content": content}]
        how = {"chat_template": template, "chat_template_content_format": form}
        [output] = llm.chat(message, params, use_tqdm=False, **how)
        return llm.get_tokenizer().decode(output.prompt_token_ids)

    assert prompt(parts, "string") == "a\nb" and prompt("a", "string") == prompt("a", "auto") == "a"
    assert prompt("a", "openai") == str(parts[:1]) and prompt(parts, "auto") == str(parts)
    with pytest.raises(ValueError, match="chat_template_content_format: got 'x'; accepted: auto"):
        prompt("a", "x")


def test_an_llm_of_engine_args_and_its_sizes():
    args = EngineArgs(MODEL, device="cpu", num_gpu_blocks_override=8, max_num_seqs=1, seed=5)
    llm = LLM.from_engine_args(args)
    assert llm.args == args and llm.get_world_size() == 1
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("config", [None, {"prompt_lookup_max": 2}])
def test_the_short_forms_of_speculative_config(config):
    args = EngineArgs.read(
        model=MODEL, spec_method="ngram", spec_tokens=2, speculative_config=config
    )
    assert args.speculative_config.method == "ngram"
    assert args.speculative_config.num_speculative_tokens == 2
    with pytest.raises(ValueError, match=r"speculative_config: got .* None with spec_method"):
        EngineArgs.read(
            model=MODEL, spec_tokens=2, speculative_config={"num_speculative_tokens": 2}
        )
