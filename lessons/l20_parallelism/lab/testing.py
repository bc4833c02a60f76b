"""What the tests of this lesson share: small models of every family, and what their ranks run.

A rank is a process, which finds its function by the name of its module. So functions of ranks are
here and not in the tests.
"""

import os
import pickle
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l06_mla.deepseek import decoder_class
from lessons.l20_parallelism.generate import generate, main
from lessons.l20_parallelism.lab.slips import SLIPS
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.pipeline import run_stage
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links, Mesh, new_links
from lessons.toolbox.model.config import MLAConfig, ModelConfig, MoEConfig, Multipliers

# 4 heads and 2 KV heads, so that 4 ranks share KV heads; 61 tokens, so that the last rank has fewer
LLAMA = ModelConfig("llama", 61, 32, 3, 4, 2, 8, 24, 128)
EXPERTS = MoEConfig(8, 2, 12, norm_topk_prob=True)
LATENTS = replace(
    LLAMA,
    num_key_value_heads=4,
    head_dim=12,
    v_head_dim=10,
    mla=MLAConfig(20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10),
)
LITE = replace(LATENTS.mla, q_lora_rank=None)
SHARED = replace(EXPERTS, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=False)
GROUPS = replace(SHARED, scoring_func="sigmoid", topk_method="noaux_tc", n_group=4, topk_group=2)
CAPS = dict(query_pre_attn_scalar=11.0, attn_logit_softcapping=5.0, final_logit_softcapping=5.0)

BIASES = dict(qkv_bias=True, o_bias=True, mlp_bias=True)

CONFIGS = {
    "llama": LLAMA,
    "llama, tied, mlp_bias": replace(LLAMA, tie_word_embeddings=True, mlp_bias=True),
    "qwen2": replace(LLAMA, model_type="qwen2", qkv_bias=True, o_bias=True),
    "qwen3": replace(LLAMA, model_type="qwen3", qk_norm=True, num_key_value_heads=1),
    "phi3": replace(LLAMA, model_type="phi3", partial_rotary_factor=0.5),
    "mistral": replace(LLAMA, model_type="mistral", sliding_windows=(3, None, 3)),
    "mixtral": replace(LLAMA, model_type="mixtral", moe=EXPERTS),
    "deepseek_v2": replace(LATENTS, model_type="deepseek_v2", mla=LITE, moe=SHARED),
    "deepseek_v3": replace(LATENTS, model_type="deepseek_v3", moe=GROUPS),
    "gemma2": replace(
        LLAMA, model_type="gemma2", norms_after=True, sliding_windows=(3, None, 3), **CAPS
    ),
    "gpt_oss": replace(
        LLAMA,
        model_type="gpt_oss",
        attention_sinks=True,
        qkv_bias=True,
        o_bias=True,
        sliding_windows=(3, None, 3),
        moe=replace(EXPERTS, are_stacked=True),
    ),
    "glm4": replace(LLAMA, model_type="glm4", variant="glm4", qkv_bias=True),
    "granite": replace(
        LLAMA, model_type="granite", multipliers=Multipliers(3.0, 0.5, 0.4, 2.0), o_bias=True
    ),
    "olmo2": replace(LLAMA, model_type="olmo2", variant="olmo", qk_norm=True),
    "qwen2_moe": replace(
        LLAMA, model_type="qwen2_moe", moe=replace(EXPERTS, shared_expert_intermediate_size=20)
    ),
    "phi": replace(LLAMA, model_type="phi", variant="phi", **BIASES),
    "smollm3": replace(LLAMA, model_type="smollm3", no_rope_layers=(1,)),
}


def random_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """The same weights in every process that gives the same seed. Biases are as large as
    products.
    """
    model = decoder_class(config)(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1
        size = 1.5 * parameter.shape[-1] ** -0.5 if is_matrix else 0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
        if "norm" in name and not config.norms_after:
            parameter.add_(1)
    return model.to(dtype)


def logits_of(model: Decoder, tokens: Tensor) -> Tensor:
    """Of every token of one sequence: [T, vocab_size]."""
    with torch.inference_mode():
        return model.logits(model(tokens, whole_sequence(model, len(tokens))))


def links_of(mesh: Mesh, rank: int) -> Links:
    """The links of a rank, for what only asks who it is: nothing can be sent over them."""
    _, stage, shard_number = mesh.place(rank)
    tensor = Group(list(range(mesh.tp)), shard_number)
    return Links(mesh, rank, tensor, Group(list(range(mesh.pp)), stage))


# ---------------------------------------------------------------- what ranks run


def rank_logits(
    world: Group,
    meshes: list[Mesh],
    config: ModelConfig,
    seed: int,
    tokens: list[int],
    expert_parallel: bool = False,
    slip: str | None = None,
) -> list[Tensor | None]:
    """Logits of one sequence, [T, vocab_size], from each mesh that fills this world; None on a
    stage before the last. slip: one of SLIPS, made on every rank.
    """
    model, found = random_model(config, seed, torch.float64), []
    with SLIPS[slip]() if slip else nullcontext():
        for mesh in meshes:
            links = new_links(mesh)
            part = shard(model, links, expert_parallel)
            found.append(stage_logits(part, links, torch.tensor(tokens)))
    return found


@torch.inference_mode()
def stage_logits(part: Decoder, links: Links, tokens: Tensor) -> Tensor | None:
    """Of every token of one sequence: [T, vocab_size], on the last stage."""
    hidden = run_stage(part, links, tokens, whole_sequence(part, len(tokens)))
    return None if hidden is None else part.logits(hidden)


def rank_tokens(
    world: Group,
    meshes: list[Mesh],
    config: ModelConfig,
    seed: int,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: SamplingParams | list[SamplingParams],
    options: dict,
) -> list[list[list[int]]]:
    """What is generated on each mesh that fills this world."""
    model, found = random_model(config, seed), []
    for mesh in meshes:
        links = new_links(mesh)
        part = shard(model, links)
        found.append(generate(part, links, prompts, max_new_tokens, sampling, **options))
    return found


def rank_wire(
    world: Group, mesh: Mesh, config: ModelConfig, tokens: list[int], expert_parallel: bool
) -> tuple[dict, dict, dict, dict]:
    """Calls and bytes of one pass with logits of its last token: of the tensor group, then of the
    pipeline.
    """
    links = new_links(mesh)
    part = shard(random_model(config, 0), links, expert_parallel)
    with torch.inference_mode():
        attend = whole_sequence(part, len(tokens))
        hidden = run_stage(part, links, torch.tensor(tokens), attend)
        if hidden is not None:
            part.logits(hidden[-1:])
    tensor, pipeline = links.tensor.wire, links.pipeline.wire
    return dict(tensor.calls), dict(tensor.bytes), dict(pipeline.calls), dict(pipeline.bytes)


def started_by_torchrun(rank: int, pipe: Connection, size: int, port: int, argv: list[str]) -> None:
    """What torchrun does to a process: variables that name its place, then the command. Sends what
    the command prints.
    """
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)  # torchrun does it by OMP_NUM_THREADS
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        main(argv)
    pipe.send_bytes(pickle.dumps((True, printed.getvalue())))
