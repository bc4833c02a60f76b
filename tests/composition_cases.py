"""Tiny engines with any set of the product's features, and the tokens that they have to give.

Features are of two kinds. Some say what a token is: the weights, the format of K and V, the family,
an adapter, pictures, a structure, beams. The others may not change one: drafts, processes, the
prefix cache, preemption, a loop that is one step ahead, chunks. So the tokens of a set are those of
its first kind alone, run one request at a time, and where the cache holds plain numbers those of
the model without any engine. All in float64, where two orders of a sum differ by about 1e-15.
"""

import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import decoder_class
from lessons.l17_tree_speculation.heads.heads import KINDS, Eagle3Draft, EagleDraft, MedusaHeads
from lessons.l17_tree_speculation.heads.mtp_files import load_mtp
from lessons.l17_tree_speculation.heads.parallel import ParallelDraft
from lessons.l17_tree_speculation.lab.mtp_checkpoint import write_checkpoint
from lessons.l21_multi_lora.batch import AdapterContext
from lessons.l21_multi_lora.lab.testing import random_adapter
from lessons.l21_multi_lora.layers import adapter_layers, merged, with_adapter_slots
from lessons.l21_multi_lora.peft.adapters import save_adapter
from lessons.l24_structured_outputs.vocabulary import Vocabulary, bytes_of_tokens
from lessons.toolbox.model.checkpoint import REPOSITORY, load_config, load_tokenizer
from lessons.toolbox.model.places import places_of
from reference import BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from reference.checkpoints.write_checkpoint import save_quantized
from reference.engine.assembly import engine_over, new_engine
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.features.beam_search import BeamSearch
from reference.speculation.speculative_config import METHODS, WITHOUT_MODEL
from reference.vision.config import VisionConfig
from reference.vision.pictures import Picture
from reference.vision.tower import Eyes
from reference.weights.quantization import Settings, quantize_model
from reference.weights.quantize import main as quantize
from tests.engine_cases import assert_clean
from tests.vision_cases import plain_answer, seen

VOCAB, IMAGE, EDGE = 4096, 4095, 12
MASK = 7  # of a draft that guesses all tokens at once
LIMIT = 6  # tokens of an answer
FOLDER = Path(tempfile.mkdtemp(prefix="composition"))  # of checkpoints, until the process ends
SHAPE = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
LATENTS = dict(
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,  # so that two shards have whole groups of 32
    n_shared_experts=1,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    n_group=2,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
)
STATES = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    partial_rotary_factor=1.0,  # else it could not be written in fewer bits
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
ONE_HEAD = "one KV head"
DENSE = dict(model_type="llama")
EXPERTS = dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
FAMILIES = {
    "dense": DENSE,
    "MoE": EXPERTS,
    f"dense, {ONE_HEAD}": dict(DENSE, num_key_value_heads=1),
    f"MoE, {ONE_HEAD}": dict(EXPERTS, num_key_value_heads=1),
    "MLA": dict(model_type="deepseek_v3", **LATENTS),
    "states": dict(model_type="qwen3_next", **STATES),  # it has experts, too
}


# ---------------------------------------------------------------- checkpoints


@cache
def folder_of(family: str) -> Path:
    """A random checkpoint of a family, with the tokenizer of models/tiny."""
    out = FOLDER / family
    out.mkdir()
    for file in (REPOSITORY / "models/tiny").glob("*.json"):
        shutil.copyfile(file, out / file.name)
    raw = json.loads((out / "config.json").read_text()) | SHAPE | FAMILIES[family]
    raw |= dict(tie_word_embeddings=False, pard_token=MASK)
    raw.pop("architectures", None)
    (out / "config.json").write_text(json.dumps(raw))
    config = load_config(out)
    torch.manual_seed(5)
    model, tensors = decoder_class(config)(config), {}
    for name, place in places_of(model).items():
        shape = model.state_dict()[name].shape
        drawn = torch.randn(shape) * 1.5 * shape[-1] ** -0.5
        if name.endswith(("A_log", "dt_bias")):
            tensors[f"model.{place.key}"] = [drawn]
            continue
        if len(shape) == 1:
            drawn = torch.randn(shape) * 0.1 + (0 if "bias" in name else 1)
        inside = "" if name.startswith("lm_head") else "model."
        tensors.setdefault(inside + place.key, []).append(drawn)
    # several of the decoder's may be one there
    merged_ones = {key: torch.cat(parts).contiguous() for key, parts in tensors.items()}
    save_file(merged_ones, out / "model.safetensors", metadata={"format": "pt"})
    return out


@cache
def stored_as(weights: str, family: str) -> tuple[str, str | None]:
    """(model, quantization) as a user gives them."""
    folder = folder_of(family)
    if weights in ("plain", "int8", "int4", "FP8", "MXFP4"):
        return str(folder), None if weights == "plain" else weights.lower()
    out = FOLDER / f"{family}-{weights}"
    kinds = {"GGUF": ["q8_0"], "W8A8": ["int8", "--activations", "int8"]}
    kinds["W4A8"] = ["int4", "--activations", "int8"]
    if weights in kinds:
        out = out.with_suffix(".gguf") if weights == "GGUF" else out
        where = ["--model", str(folder), "--out", str(out)]
        assert quantize([*where, "--method", *kinds[weights]]) == 0
    else:
        model = load_model(folder, "cpu", torch.float32)
        codes = quantize_model(model, "int4", None, Settings(group_size=32))
        save_quantized(codes, str(folder), out, weights.lower())
    return str(out), None


@cache
def model_of(weights: str, family: str) -> Decoder:
    model, quantization = stored_as(weights, family)
    return load_model(model, "cpu", torch.float64, quantization)


# ---------------------------------------------------------------- what a set of features asks for

STORED = ("W8A8", "W4A8", "AWQ", "GPTQ", "GGUF")  # weights that a checkpoint has in fewer bits
WEIGHTS = ("int8", "int4", "FP8", "MXFP4", *STORED)
# feature -> arguments of the engine; of several the later ones win
ARGUMENTS = {
    "fp8 KV": dict(kv_cache_dtype="fp8"),
    "int8 KV": dict(kv_cache_dtype="int8"),
    "int4 KV": dict(kv_cache_dtype="int4"),
    "fp8_ds_mla KV": dict(kv_cache_dtype="fp8_ds_mla"),
    "LoRA": dict(enable_lora=True, max_loras=2, max_lora_rank=8),
    "tensor parallel": dict(tensor_parallel_size=2),
    "pipeline parallel": dict(pipeline_parallel_size=2),
    "data parallel": dict(data_parallel_size=2),
    # blocks of 4 tokens, as without
    "decode context": dict(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=2),
    "prefix cache": dict(enable_prefix_caching=True, mamba_block_size=4),
    "recompute": dict(num_gpu_blocks_override=11),
    "offloading": dict(
        num_gpu_blocks_override=11,
        enable_prefix_caching=True,
        kv_offloading_size=0.001,
        kv_offloading_folder="memory://kv",  # of all engines of this process
    ),
    "transfer": dict(
        num_gpu_blocks_override=11,
        enable_prefix_caching=True,
        kv_transfer_config=dict(  # with itself
            kv_connector="TcpConnector", kv_role="kv_both", kv_port=0, kv_buffer_size=1e6
        ),
    ),
    "swap": dict(num_gpu_blocks_override=11, preemption_mode="swap"),
    "async": dict(async_scheduling=True),
    "chunked prefill": dict(enable_chunked_prefill=True, max_num_batched_tokens=16),
    "batch invariant": dict(batch_invariant=True),
}
# Which say what a token is. What is left may not change one.
CODES = {"fp8 KV", "int8 KV", "int4 KV", "fp8_ds_mla KV"}
MEANINGS = {*WEIGHTS, *CODES, "LoRA", "structured", "n > 1", "beams"}
MEANINGS |= {"pictures", "MoE", "MLA", "states", ONE_HEAD}


def family_of(features) -> str:
    usual = "MLA" if "fp8_ds_mla KV" in features else "dense"  # only latents have that format
    family = next((name for name in ("states", "MoE", "MLA") if name in features), usual)
    # Two shards share the tokens of a head if there is one alone.
    has_one = {ONE_HEAD, "decode context"} & set(features) and family in ("dense", "MoE")
    return f"{family}, {ONE_HEAD}" if has_one else family


def weights_of(features) -> str:
    return next((name for name in WEIGHTS if name in features), "plain")


@cache
def drafter_of(method: str, weights: str, family: str, is_third: bool = False):
    """What drafts for a model: a model much like it, or heads of random weights."""
    model = model_of(weights, family)
    torch.manual_seed(7)
    if method in WITHOUT_MODEL:
        return None
    if method == "draft":
        return model_of("plain", "dense")
    if method == "medusa":
        heads = MedusaHeads(64, 3)
    elif method == "mtp" and family == "MLA":  # a layer like the target's own
        raw = json.loads((folder_of(family) / "config.json").read_text())
        folder = FOLDER / f"mtp-{weights}"
        write_checkpoint(folder, **raw | dict(num_nextn_predict_layers=1))
        heads = load_mtp(folder, model).double()
    elif method == "eagle":
        heads = (Eagle3Draft if is_third else EagleDraft)(model.config, 32)
    else:
        heads = KINDS[method].for_target(model.config, dict(intermediate_size=32))
    return heads.double().eval().requires_grad_(False)


@cache
def eyes_of() -> Eyes:
    """A small tower of random weights."""
    config = VisionConfig(16, 32, 2, 2, 1e-5, EDGE, 6, "quick_gelu", 1, False, True, 64, IMAGE)
    torch.manual_seed(1)
    eyes = Eyes(config).double().eval().requires_grad_(False)
    for weight in eyes.parameters():
        weight.normal_(std=1.5 * weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.5)
    return eyes


@cache
def adapter_of(family: str) -> tuple[LoRARequest, object]:
    """An adapter of a family's linear layers, as PEFT stores it, and in memory."""
    slots = with_adapter_slots(model_of("plain", family), AdapterContext(), 1, 8)
    layers = {name: (x.out_features, x.in_features) for name, x in adapter_layers(slots).items()}
    adapter, folder = random_adapter(layers, "a", 4, seed=3), FOLDER / f"{family}-adapter"
    pairs = {name: (layer.a.double(), layer.b.double()) for name, layer in adapter.layers.items()}
    save_adapter(folder, pairs, lora_alpha=2 * adapter.rank)
    return LoRARequest("a", 1, str(folder)), adapter


@cache
def vocabulary() -> Vocabulary:
    tokenizer = load_tokenizer(REPOSITORY / "models/tiny")
    return Vocabulary(bytes_of_tokens(tokenizer, VOCAB))


def prompts_of(features) -> list:
    """Four, of which three begin alike."""
    draw = np.random.default_rng(11)

    def ids(length: int) -> list[int]:
        return draw.integers(1, 4000, length).tolist()

    head = ids(9)
    prompts = [head + ids(5), head + ids(2), ids(7), head + ids(5)]
    if "pictures" not in features:
        return prompts
    picture = Picture.of(draw.integers(0, 255, (EDGE, EDGE, 3), dtype=np.uint8))
    return [
        seen([*prompts[0], IMAGE, 5], picture),
        seen([IMAGE, *prompts[1]], picture),
        *prompts[2:],
    ]


def args_of(features) -> EngineArgs:
    """The arguments of an engine, refused as a user's would be."""
    model, quantization = stored_as(weights_of(features), family_of(features))
    arguments = dict(
        device="cpu",
        dtype="float64",
        block_size=4,
        max_num_seqs=4,
        max_model_len=64,
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        quantization=quantization,
    )
    for feature in ARGUMENTS:
        if feature in features:
            arguments |= ARGUMENTS[feature]
    ends_early = "structured" in features and family_of(features) == "MLA"
    if ends_early and {"recompute", "swap"} & set(features):
        arguments |= dict(num_gpu_blocks_override=10)
    if {"states", "prefix cache"} <= set(features):  # a prompt stops where it parts from another
        arguments |= dict(enable_chunked_prefill=True)
    for method in METHODS:
        if method in features:
            name = None if method in WITHOUT_MODEL else str(folder_of("dense"))
            config = dict(method=method, model=name, num_speculative_tokens=3)
            arguments |= dict(speculative_config=config)
    if "parallel draft" in features:
        config = dict(method="draft", model=str(folder_of("dense")), num_speculative_tokens=3)
        arguments |= dict(speculative_config=config | dict(parallel_drafting=True))
    return EngineArgs(model, **arguments)


def engine_of(features, is_third: bool = False):
    """An engine with these features and no others. Raises ValueError for a set that is refused."""
    args = args_of(features)
    if args.has_workers:
        return new_engine(args)
    weights, family, drafter = weights_of(features), family_of(features), None
    model = model_of(weights, family)
    if args.speculative_config is not None:
        drafter = drafter_of(args.speculative_config.method, weights, family, is_third)
        if args.speculative_config.parallel_drafting:
            drafter = ParallelDraft(drafter, MASK)
    eyes = eyes_of() if "pictures" in features else None
    engine = engine_over(model, None, args, drafter, eyes)
    pools = [engine.runner.pool, *(engine.speculation.proposer.pools if drafter else ())]
    for slots in (slots for pool in pools for slots in pool.tensors):
        # no row may be read that was not written: as a code or a scale of FP8, 0xFF is NaN, too
        slots.fill_(torch.nan if slots.is_floating_point() else 0xFF)
    return engine


def params_of(features) -> SamplingParams:
    common = dict(temperature=0, max_tokens=LIMIT, detokenize=False)
    if "n > 1" in features:
        common |= dict(n=2, temperature=0.9, seed=4)
    if "structured" in features:
        wish = StructuredOutputsParams(regex="(ab|c[0-9]+|d, )+")
        return SamplingParams(**common, structured_outputs=wish)
    return SamplingParams(**common, ignore_eos=True)


def sent_to(engine, params: SamplingParams) -> SamplingParams:
    """These, for requests whose K and V are sent to an engine; which has none of them already."""
    engine.scheduler.blocks.connector.known = lambda key: False
    place = {name: engine.transfers.about[name] for name in ("remote_host", "remote_port")}
    return replace(params, extra_args={"kv_transfer_params": {"do_remote_decode": True} | place})


def serve(engine, features) -> list[list[list[int]]]:
    """All four requests at once, with a prefix cache the first one a step before the others: the
    answers to each. With states the second one, too: a state is kept where it parts from the first.
    Nothing may be left taken after them.
    """
    prompts, lora, params = prompts_of(features), None, params_of(features)
    if "transfer" in features:
        params = sent_to(engine, params)
    if "LoRA" in features:
        lora, _ = adapter_of(family_of(features))
    for each in engine.engines:
        if "structured" in features:
            each.structures.vocabulary, each.structures.tokenizer = vocabulary(), "there"
    if "beams" in features:
        wish = (
            StructuredOutputsParams(regex="(ab|c[0-9]+|d, )+") if "structured" in features else None
        )
        params = BeamSearchParams(2, LIMIT, ignore_eos=wish is None, structured_outputs=wish)
        search = BeamSearch(engine.engines[0], params)
        found = []
        for prompt in prompts:
            one = search.new_search(prompt, lora) if lora else search.new_search(prompt)
            search.run([one])
            found.append([each.tokens for each in one.output(None).sequences])
    else:
        outputs, steps = {}, 0
        for at, prompt in enumerate(prompts):
            engine.add_request(str(at), prompt, params, lora_request=lora if at != 2 else None)
            if at <= ("states" in features) and "prefix cache" in features:
                outputs |= {out.request_id: out for out in engine.step()}
        while engine.has_unfinished_requests:
            outputs |= {out.request_id: out for out in engine.step()}
            steps += 1
            assert steps < 500, "the engine makes no progress"
        found = [[one.token_ids for one in outputs[str(at)].outputs] for at in range(len(prompts))]
        absent = unseen(features, list(outputs.values()))
        assert not absent, f"nothing was seen of {absent}"
    for each in engine.engines:
        assert_clean(each)
    return found


def unseen(features, outputs: list) -> set[str]:
    """Those of the features of which the answers of four requests would show a trace, and do not:
    drafts, blocks taken back, and blocks found.
    """
    counts = [out.metrics.speculation for out in outputs]
    drafted = sum(each.drafted for each in counts if each is not None)
    traces = dict.fromkeys(set(METHODS) - set(WITHOUT_MODEL), drafted)
    preempted = sum(out.metrics.preemptions for out in outputs)
    if "offloading" not in features:  # a thread copies then, and how fast decides who waits
        traces |= dict(recompute=preempted, swap=preempted)
    if not {"states", "pictures"} <= set(features):  # no three prompts begin alike then
        traces |= {"prefix cache": sum(out.num_cached_tokens for out in outputs)}
    return {name for name in features if not traces.get(name, 1)}


@cache
def expected(meanings: frozenset) -> list[list[list[int]]]:
    """The tokens of these features, which are all of the first kind."""
    family, prompts = family_of(meanings), prompts_of(meanings)
    if meanings & (CODES | {"structured", "beams", "n > 1"}):
        return serve_alone(meanings)
    if "LoRA" in meanings and meanings & {"W8A8", "W4A8"}:
        return serve_alone(meanings)  # a matrix that rounds what it receives merges with none
    model = model_of(weights_of(meanings), family)
    adapted = merged(model, adapter_of(family)[1]) if "LoRA" in meanings else model
    return [
        [plain_answer(adapted if at != 2 else model, eyes_of(), prompt, LIMIT)]
        for at, prompt in enumerate(prompts)
    ]


def serve_alone(meanings: frozenset) -> list[list[list[int]]]:
    """By an engine that runs one request at a time and has nothing else."""
    engine = engine_of(meanings)
    engine.scheduler.max_num_seqs = 2
    return serve(engine, meanings)


def check(features: frozenset, is_third: bool = False) -> None:
    """Serve with these features. Raises AssertionError for other tokens, and ValueError for a set
    that is refused.
    """
    engine = engine_of(features, is_third)
    try:
        got = serve(engine, features)
        if "transfer" in features and "beams" not in features:
            connector = engine.scheduler.blocks.connector
            assert connector.received_blocks, "no block has travelled"
            assert not connector.faults, connector.faults
        if "offloading" in features and "beams" not in features:
            connector = engine.scheduler.blocks.connector
            assert connector.saved_blocks or connector.loaded_blocks, "no block has travelled"
            assert not connector.faults, connector.faults
    finally:
        engine.close()
    # A draft model's guesses are drawn for a request that samples, so that other tokens of the same
    # distribution come.
    drawn = {"draft", "parallel draft"}
    meanings = MEANINGS | drawn if "n > 1" in features else MEANINGS
    shape = {ONE_HEAD} if "decode context" in features else set()
    assert got == expected(frozenset(features & meanings | shape))
