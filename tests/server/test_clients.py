"""The clients that people use, unchanged, against the server."""

import importlib.util
import json
from itertools import pairwise

import pytest

PROMPT = "def quicksort("
MESSAGES = [{"role": "user", "content": "def f("}]


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"NOT RUN: {package} is not installed")


@pytest.fixture
def openai(live):
    from openai import OpenAI

    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.sample(2, of="clients of the server")
@needs("openai")
def test_openai_completions_and_models(openai):
    assert [model.id for model in openai.models.list()] == ["tiny", "base", "sql", "tests"]
    assert openai.models.retrieve("sql").id == "sql"
    wishes = dict(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    whole = openai.completions.create(**wishes, logprobs=1)
    stream = openai.completions.create(
        **wishes, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage and len(whole.choices[0].logprobs.tokens) == 8


@pytest.mark.sample(2, of="clients of the server")
@needs("openai")
def test_openai_chat_with_tools_and_formats(openai):
    from pydantic import BaseModel

    class Colour(BaseModel):
        red: bool

    wishes = dict(model="tiny", messages=MESSAGES, max_tokens=30, temperature=0)
    ends = dict(extra_body={"guided_regex": "So it is: [a-z]{3}"})
    whole = openai.chat.completions.create(**wishes, **ends)
    with openai.chat.completions.stream(**wishes, **ends) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    tool = {"type": "function", "function": {"name": "add"}}
    wishes |= dict(max_tokens=60)
    answer = openai.chat.completions.create(**wishes, tools=[tool], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    parsed = openai.chat.completions.parse(**wishes, response_format=Colour)
    assert isinstance(parsed.choices[0].message.parsed.red, bool)
    extra = openai.chat.completions.create(**wishes, extra_body={"guided_choice": ["yes", "no"]})
    assert extra.choices[0].message.content in ("yes", "no")


@pytest.mark.sample(2, of="clients of the server")
@needs("openai")
def test_openai_responses_and_embeddings(openai):
    wishes = dict(model="tiny", input="def f(", max_output_tokens=8, temperature=0)
    whole = openai.responses.create(**wishes)
    assert whole.usage.output_tokens == 8 and whole.incomplete_details.reason == "max_output_tokens"
    events = list(openai.responses.create(**wishes, stream=True))
    assert (
        "".join(event.delta for event in events if "text.delta" in event.type) == whole.output_text
    )
    assert events[-1].type == "response.incomplete"
    colours = {"type": "json_schema", "name": "c", "schema": {"enum": ["red", "green"]}}
    with openai.responses.stream(**wishes, text={"format": colours}) as stream:
        assert stream.get_final_response().output_text in ('"red"', '"green"')
    vectors = openai.embeddings.create(model="tiny", input=["def f(", "import os"]).data
    assert [len(one.embedding) for one in vectors] == [384, 384]
    assert sum(x * x for x in vectors[0].embedding) == pytest.approx(1, abs=1e-5)
    as_numbers = openai.embeddings.create(model="tiny", input="def f(", encoding_format="float")
    assert as_numbers.data[0].embedding == pytest.approx(vectors[0].embedding, abs=1e-6)


@pytest.mark.sample(2, of="clients of the server")
@needs("openai")
def test_openai_errors(openai):
    import openai as package

    with pytest.raises(package.NotFoundError) as error:
        openai.completions.create(model="../../etc/passwd", prompt="x")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    with pytest.raises(package.BadRequestError, match="temprature: unknown field; did you mean"):
        openai.completions.create(model="tiny", prompt="x", extra_body={"temprature": 1})


@pytest.mark.sample(2, of="clients of the server")
@needs("anthropic")
def test_anthropic(live):
    import anthropic

    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        wishes = dict(model="tiny", messages=MESSAGES, max_tokens=8, system="Be brief.")
        extra = dict(extra_body={"temperature": 0})
        whole = client.messages.create(**wishes, **extra)
        with client.messages.stream(**wishes, **extra) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text == final.content[0].text
        assert final.usage.output_tokens == whole.usage.output_tokens == 8
        count = client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens
        assert count > 4
        thinking = client.messages.create(**wishes, thinking={"type": "adaptive"}, **extra)
        assert thinking.content[0].text == text
        with pytest.raises(anthropic.BadRequestError, match="inference_geo: got"):
            client.messages.create(**wishes, extra_body={"inference_geo": "eu"})


@pytest.mark.sample(2, of="clients of the server")
@needs("huggingface_hub")
def test_hugging_face(live):
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=live.url)
    text = client.text_generation(PROMPT, max_new_tokens=8)
    # Fmt: skip.
    assert (
        text
        == live.post("/generate", dict(inputs=PROMPT, parameters=dict(max_new_tokens=8))).json()[
            "generated_text"
        ]
    )
    assert "".join(client.text_generation(PROMPT, max_new_tokens=8, stream=True)) == text
    whole = client.text_generation(
        PROMPT, max_new_tokens=8, details=True, decoder_input_details=True, top_n_tokens=2
    )
    assert whole.details.finish_reason == "length" and len(whole.details.prefill) == 7
    assert [len(top) for top in whole.details.top_tokens] == [2] * 8
    found = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True))
    assert [one.token.id for one in found] == [one.id for one in whole.details.tokens]
    assert found[-1].generated_text == text and found[-1].details.generated_tokens == 8
    stopped = client.text_generation(PROMPT, max_new_tokens=8, stop=[text[2:4]], details=True)
    assert stopped.generated_text == text[: text.index(text[2:4]) + 2], "its stop string is shown"
    assert stopped.details.finish_reason == "stop_sequence"
    chat = InferenceClient(base_url=live.url).chat_completion(MESSAGES, model="tiny", max_tokens=4)
    assert chat.usage.completion_tokens == 4


@pytest.mark.sample(2, of="clients of the server")
@needs("langchain_openai")
def test_langchain(live):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    # Fmt: skip.
    chat = ChatOpenAI(
        base_url=f"{live.url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=8
    )
    whole = chat.invoke("def f(")
    assert "".join(chunk.text for chunk in chat.stream("def f(")) == whole.text
    assert whole.usage_metadata["output_tokens"] == 8
    # Fmt: skip.
    vectors = OpenAIEmbeddings(
        base_url=f"{live.url}/v1", api_key="none", model="tiny", check_embedding_ctx_length=False
    )
    assert len(vectors.embed_query("def f(")) == 384


def test_vllm_legacy_generate(live):
    body = dict(prompt=PROMPT, max_tokens=8, temperature=0)
    (text,) = live.post("/generate", body).json()["text"]
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)
    lines = live.post("/generate", body | dict(stream=True)).text.splitlines()
    told = [json.loads(line.removeprefix("data: "))["text"][0] for line in lines if line]
    assert told[-1] == text and all(b.startswith(a) for a, b in pairwise(told))
