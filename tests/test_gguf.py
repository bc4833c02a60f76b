"""GGUF files in the engine: the same requests, the same tokens as the loaded model alone; and what
llama.cpp makes of the same file.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import pytest
import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.toolbox.model import checkpoint
from lessons.toolbox.model.config_json import CheckpointError
from reference import LLM, SamplingParams
from reference.checkpoints.gguf.gguf_linear import GgufEmbedding, as_grouped
from reference.checkpoints.gguf.gguf_model import save_gguf
from reference.engine.model import gguf_products, load_model, load_tokenizer

TEXT = "class Heap:\n    def push(self, item):\n        self.items.append(item)\n"
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict:
    """The embedded model as it is, and in 4.5 bits, its embedding in 8.5."""
    folder = tmp_path_factory.mktemp("gguf")
    model = Decoder.from_pretrained("models/tiny")
    tokenizer = checkpoint.load_tokenizer("models/tiny")
    for mixture in ("F32", "Q4_0"):
        save_gguf(folder / f"{mixture}.gguf", model, tokenizer, mixture)
    return {mixture: str(folder / f"{mixture}.gguf") for mixture in ("F32", "Q4_0")}


def test_the_unquantized_file_is_the_model(files):
    tokenizer = load_tokenizer(files["F32"])
    tokens = tokenizer(TEXT)["input_ids"]
    assert tokens == load_tokenizer("models/tiny")(TEXT)["input_ids"]
    logits = []
    for name in ("models/tiny", files["F32"]):
        model = load_model(name, "cpu")
        with torch.inference_mode():
            attend = whole_sequence(model, len(tokens))
            logits.append(model.logits(model(torch.tensor(tokens), attend)))
    assert torch.equal(*logits)


def test_the_engine_serves_it(files):
    """From text and from ids, several at once: the tokens that the model gives alone, which stays
    quantized under the engine's packed form.
    """
    llm = LLM(files["Q4_0"], device="cpu", max_num_batched_tokens=64, kv_cache_memory_bytes=2**24)
    outputs = llm.generate([TEXT, "import os\n"], GREEDY, use_tqdm=False)
    prompts = [output.prompt_token_ids for output in outputs]
    found = [output.outputs[0].token_ids for output in outputs]
    model = load_model(files["Q4_0"], "cpu")
    assert found == naive.generate(model, prompts, 12)
    runner = llm.engine.runner.model
    parts = [part for part in runner.modules() if isinstance(part, QuantizedLinear)]
    assert len(parts) == 7 * 6 + 1 and isinstance(runner.embed_tokens, GgufEmbedding)
    assert {part.quantized.format for part in parts} == {"Q4_0", "Q8_0"}


def test_a_gpu_gets_the_kernels():
    """test_gguf_model.py proves the product that this chooses."""
    assert gguf_products(torch.device("cpu"), torch.float32) == {}
    assert gguf_products(torch.device("cuda"), torch.bfloat16)["prepare"] is as_grouped


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_refuses_in_one_line(load, tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be read: No such file"):
        load(str(tmp_path / "none.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointError, match=r"x\.gguf is not a complete GGUF file: it begins"):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize("mixture", ["F32", "Q4_0"])
def test_llama_cpp_generates_from_it(files, mixture):
    """llama.cpp as a peer: the logits of the last token and the tokens after it. It multiplies
    quantized matrices by activations that it rounds to 8 bits, so these logits are a little off.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    options = dict(n_ctx=128, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0)
    theirs = llama_cpp.Llama(files[mixture], **options)
    tokens = load_tokenizer(files[mixture])(TEXT)["input_ids"]
    theirs.eval(tokens)
    logits = torch.tensor(theirs.scores[len(tokens) - 1])
    model = load_model(files[mixture], "cpu")
    with torch.inference_mode():
        ours = model.logits(model(torch.tensor(tokens), whole_sequence(model, len(tokens))))[-1]
    within = 0.01 if mixture == "F32" else 0.05
    assert float((ours - logits).norm() / ours.norm()) < within
    generated = []
    for token in theirs.generate(tokens, temp=0.0, repeat_penalty=1.0):
        generated.append(token)
        if len(generated) == (12 if mixture == "F32" else 1):
            break
    assert generated == naive.generate(model, [tokens], len(generated))[0]
