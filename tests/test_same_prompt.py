"""The same text is the same prompt here, in transformers and in vLLM: the tokenizer's own rule says
which special tokens begin and end it. Small tokenizers made here, on a model of random weights.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import asyncio
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from lessons.toolbox.model.checkpoint import REPOSITORY
from reference import LLM, SamplingParams
from reference.engine.text import encode
from reference.ladder.command import load_requests
from reference.server.errors import ApiError
from reference.server.tokens import Tokens

TEXTS = ["def f(x):", "", " ", "é😀 <b> and <e>\n"]
FIRST, LAST = "<b>", "<e>"
NAMED = dict(bos_token=FIRST, eos_token=LAST)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
TURN = [{"role": "user", "content": "hello"}]
SHORT = SamplingParams(temperature=0, max_tokens=2)


def letters() -> tuple[Tokenizer, int, int]:
    """A token for each byte, then FIRST and LAST, whose ids come with it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([FIRST, LAST])
    return backend, backend.token_to_id(FIRST), backend.token_to_id(LAST)


def around(single: list[str], **special) -> PreTrainedTokenizerFast:
    """A tokenizer whose post-processor says `single`. special: what else transformers knows."""
    backend, first, last = letters()
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(FIRST, first), (LAST, last)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def flagged(**flags) -> PreTrainedTokenizerFast:
    """A tokenizer whose rule is in tokenizer_config.json, as Llama 2's."""
    return PreTrainedTokenizerFast(tokenizer_object=letters()[0], **NAMED, **flags)


def limited() -> PreTrainedTokenizerFast:
    """A tokenizer.json that asks for truncation and padding, as those of sentence encoders do."""
    tokenizer = around([FIRST, "$A", LAST], **NAMED)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    return tokenizer


RULES = {  # the tokenizer, and how many ids of an empty text
    "a start token that it does not add": (lambda: around(["$A"], **NAMED), 0),
    "no start token": (lambda: around(["$A"]), 0),
    "a start token": (lambda: around([FIRST, "$A"], **NAMED), 1),
    "an end token": (lambda: around(["$A", LAST], **NAMED), 1),
    "both": (lambda: around([FIRST, "$A", LAST], **NAMED), 2),
    "BERT's": (lambda: around([FIRST, "$A", LAST], cls_token=FIRST, sep_token=LAST), 2),
    "not by its config": (lambda: flagged(add_bos_token=False), 0),
    "by its config": (lambda: flagged(add_bos_token=True, add_eos_token=True), 2),
    "limits": (limited, 2),
}
PLAIN, BOTH = "a start token that it does not add", "both"


def saved(folder, rule: str, template: str | None = None):
    """The folder of a checkpoint with this tokenizer and random weights."""
    tokenizer = RULES[rule][0]()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=tokenizer.convert_tokens_to_ids(FIRST),
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("rule", RULES)
def test_a_text_has_the_ids_of_transformers(rule, tmp_path):
    """In the engine, and in the server, which asks the `tokenizers` object itself."""
    RULES[rule][0]().save_pretrained(tmp_path)
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path) for _ in range(2))
    served = Tokens(AutoTokenizer.from_pretrained(tmp_path), 64)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert encode(ours, text) == served.encode("prompt", text) == ids
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert served.encode("prompt", text, special=False) == bare
        assert len(ids) - len(bare) == RULES[rule][1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keep", [1, 2, 3, 5, 50, -1])
def test_a_text_is_cut_as_transformers_cuts_it(rule, keep, tmp_path):
    """truncate_prompt_tokens takes the beginning of the text, and not the tokens around it."""
    RULES[rule][0]().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, truncation_side="left")
    served = Tokens(AutoTokenizer.from_pretrained(tmp_path), 33)
    text, most = "what a text this is, of forty-four letters ..", 32 if keep == -1 else keep
    for special in (True, False):
        if most < RULES[rule][1] * special:
            continue  # transformers cannot
        how = dict(add_special_tokens=special, truncation=True, max_length=most)
        assert served.encode("prompt", text, special, keep) == theirs(text, **how)["input_ids"]


def test_less_than_the_tokens_around_a_text_is_cut_too():
    served = Tokens(RULES[BOTH][0](), 33)
    ids = served.cut("prompt", served.encode("prompt", "text", keep=1), 1)
    assert ids == [served.tokenizer.eos_token_id]
    with pytest.raises(ApiError, match="one token at least"):
        served.cut("prompt", served.encode("prompt", "text", keep=0), 0)


# ---------------------------------------------------------------- offline


@pytest.mark.parametrize("rule", [PLAIN, "a start token", BOTH])
def test_prompts_and_conversations_offline(rule, tmp_path):
    """A template that renders the start token gets no second one."""
    folder = saved(tmp_path, rule, TEMPLATE)
    llm = LLM(folder, num_gpu_blocks_override=32, max_num_seqs=4)
    theirs = AutoTokenizer.from_pretrained(folder)
    texts = [text for text in TEXTS if theirs(text)["input_ids"]]
    outputs = llm.generate(texts, SHORT, use_tqdm=False)
    want = [theirs(text)["input_ids"] for text in texts]
    assert [output.prompt_token_ids for output in outputs] == want
    whole = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
    [talk] = llm.chat(TURN, SHORT, use_tqdm=False)
    ids = theirs.apply_chat_template(TURN, **whole)
    assert talk.prompt_token_ids == ids and ids.count(theirs.bos_token_id) == 1
    if rule == PLAIN:
        with pytest.raises(
            ValueError, match="prompt: got ''; accepted: text of one token at least"
        ):
            llm.generate("", SHORT, use_tqdm=False)


def test_the_ladder_counts_the_same_prompts(tmp_path):
    tokenizer = RULES[PLAIN][0]()
    requests = [{"prompt": "import os", "max_new_tokens": 3}]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    prompts, _ = load_requests(tmp_path / "requests.json", tokenizer)
    assert prompts == [tokenizer("import os")["input_ids"]]


# ---------------------------------------------------------------- the server

ROUTES = {  # path: (body, ids of its prompt, or how many there are)
    "/tokenize": (dict(prompt="hi"), lambda found: found["tokens"]),
    "/v1/completions": (
        dict(prompt="hi", max_tokens=1, return_token_ids=True),
        lambda found: found["choices"][0]["prompt_token_ids"],
    ),
    "/v1/embeddings": (dict(input="hi"), lambda found: found["usage"]["prompt_tokens"]),
    "/generate": (
        dict(inputs="hi", parameters=dict(details=True, decoder_input_details=True)),
        lambda found: [token["id"] for token in found["details"]["prefill"]],
    ),
}


@pytest.mark.parametrize("rule", [PLAIN, BOTH])
def test_prompts_and_conversations_served(rule, tmp_path):
    """On every route that takes text, with its field add_special_tokens where it has one."""
    pytest.importorskip("fastapi", reason="NOT RUN: fastapi is not installed")
    from reference.engine.async_engine import AsyncEngineArgs
    from reference.server.app import new_service
    from reference.server.args import ServerArgs
    from tests.server.live import beside

    folder = saved(tmp_path, rule, TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(folder)
    own, bare = theirs("hi")["input_ids"], theirs("hi", add_special_tokens=False)["input_ids"]
    engine = AsyncEngineArgs(folder, num_gpu_blocks_override=32, max_num_seqs=4)
    service = new_service(ServerArgs(engine, disable_frontend_multiprocessing=True))

    async def asked() -> dict[str, list]:
        async with beside(service) as client:

            async def post(path: str, body: dict):
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            found = {}
            for path, (body, read) in ROUTES.items():
                bodies = [body]
                if path != "/generate":  # text-generation-inference has no such field
                    bodies += [body | dict(add_special_tokens=special) for special in (True, False)]
                found[path] = [read(await post(path, one)) for one in bodies]
            cut = ROUTES["/v1/completions"][0] | dict(prompt="hi there", truncate_prompt_tokens=4)
            found["cut"] = (await post("/v1/completions", cut))["choices"][0]["prompt_token_ids"]
            talks = [dict(messages=TURN, **more) for more in ({}, dict(add_special_tokens=True))]
            found["messages"] = [(await post("/tokenize", talk))["tokens"] for talk in talks]
            used = [(await post("/v1/chat/completions", talk))["usage"] for talk in talks]
            found["chat"] = [usage["prompt_tokens"] for usage in used]
            return found

    try:
        found = asyncio.run(asked())
    finally:
        service.engine.shutdown()
    assert found["/tokenize"] == found["/v1/completions"] == [own, own, bare]
    assert found["/v1/embeddings"] == [len(own), len(own), len(bare)]
    assert found["/generate"] == [own]
    theirs.truncation_side = "left"  # as vLLM sets it
    assert found["cut"] == theirs("hi there", truncation=True, max_length=4)["input_ids"]
    ids = theirs.apply_chat_template(TURN, tokenize=True, return_dict=False)
    text = theirs.apply_chat_template(TURN, tokenize=False)
    again = theirs(text)["input_ids"]  # what a client gets that asks for it
    assert found["messages"] == [ids, again] and found["chat"] == [len(ids), len(again)]
    assert ids.count(theirs.bos_token_id) == 1


# ---------------------------------------------------------------- the embedded models


@pytest.mark.parametrize("name", ["tiny", "tiny-draft", "tiny-vision"])
def test_the_embedded_models_begin_a_text_as_they_were_trained(name):
    """With END, as before each document. The rule came into tokenizer.json later, and until then
    the engine added the token itself, so the demo's prompts have the ids that they always had.
    """
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "models" / name)
    before = Tokenizer.from_file(str(REPOSITORY / "models" / name / "tokenizer.json"))
    before.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    requests = json.loads((REPOSITORY / "models/prompts.json").read_text("utf-8"))
    for text in [*(request["prompt"] for request in requests), ""]:
        ids = [0, *before.encode(text).ids]
        assert encode(tokenizer, text) == tokenizer(text)["input_ids"] == ids
