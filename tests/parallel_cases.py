"""Small checkpoints of three families, and engines over one process or several, for the tests of
the engine's workers.
"""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from lessons.l20_parallelism.lab.testing import random_model
from lessons.l20_parallelism.processes.launch import PRELOAD
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.places import places_of
from reference.engine.assembly import engine_over
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.engine.sampling_params import SamplingParams
from reference.parallel import engine as parallel
from reference.parallel.processes import WARM
from tests.engine_cases import assert_clean

# At import, which is before the first test: the server of all ranks of this run is then warm for
# workers, too, whichever test needs it first.
PRELOAD.append(WARM)

SHAPE = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    eos_token_id=60,
    hidden_act="silu",
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
LATENTS = dict(
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    n_shared_experts=2,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
)
FAMILIES = {
    "llama": SHAPE | dict(model_type="llama", tie_word_embeddings=True),
    "mixtral": SHAPE | EXPERTS | dict(model_type="mixtral"),
    "deepseek_v3": SHAPE | LATENTS | dict(model_type="deepseek_v3"),
    "gpt_oss": SHAPE
    | dict(
        model_type="gpt_oss",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["full_attention"] * 3,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
    "qwen2_moe": SHAPE
    | dict(
        model_type="qwen2_moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,  # whose output each token weighs
        norm_topk_prob=False,
        decoder_sparse_step=2,  # every other layer is dense
        mlp_only_layers=[],
    ),
}


def write_checkpoint(folder: Path, family: str, seed: int, **changes) -> str:
    """A random model as a folder of config.json and safetensors. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FAMILIES[family] | changes))
    config = load_config(folder)
    model = random_model(config, seed)
    weights, stored = model.state_dict(), {}
    for name, place in places_of(model).items():
        is_copy = name == "lm_head.weight" and config.tie_word_embeddings
        if not is_copy:
            inside = "" if name.startswith("lm_head") else "model."
            stored[inside + place.key] = weights[name].contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def small_args(model: str, **changes) -> EngineArgs:
    """A pool in which not all can stay, and steps that cut prompts."""
    arguments = dict(
        device="cpu",
        dtype="float32",
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        num_gpu_blocks_override=13,
        swap_space=1,
    )
    return EngineArgs(model, **arguments | changes)


def whole_engine(args: EngineArgs) -> Engine:
    """The model in this process, whatever the arguments say of others."""
    return engine_over(load_model(args.model, "cpu", args.dtype, args.quantization), None, args)


parallel_engine = partial(parallel.engine_over_parts, None)


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that begin alike, greedy and sampled, with forks, scores and biases."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(60, (count,), generator=generator).tolist()

    common = dict(detokenize=False, ignore_eos=True)
    head = tokens(9)
    return [
        (head + tokens(14), SamplingParams(temperature=0, max_tokens=14, logprobs=2, **common)),
        (head + tokens(3), SamplingParams(seed=1, max_tokens=12, **common)),
        (tokens(11), SamplingParams(n=3, seed=2, temperature=0.8, max_tokens=9, **common)),
        (
            head + tokens(7),
            SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, **common),
        ),
        (tokens(2), SamplingParams(top_p=0.8, seed=3, max_tokens=10, logit_bias={5: 9}, **common)),
        (head + tokens(14), SamplingParams(temperature=0, max_tokens=20, **common)),
    ]


def serve(engine, asked, abort_at: dict[int, str] | None = None) -> dict[str, object]:
    """All requests at once; abort_at: {step: who gives up before it}. Returns {id: its output}."""
    for index, (prompt, params) in enumerate(asked):
        engine.add_request(str(index), prompt, params)
    outputs, step = {}, 0
    while engine.has_unfinished_requests:
        if (gone := (abort_at or {}).get(step)) is not None:
            outputs[gone] = engine.abort_request(gone)
        for output in engine.step():
            outputs[output.request_id] = output
        step += 1
        assert step < 2000, "the engine makes no progress"
    for each in getattr(engine, "engines", [engine]):
        assert_clean(each)
    return outputs


def answers(outputs: dict) -> dict[str, list[list[int]]]:
    return {id: [answer.token_ids for answer in out.outputs] for id, out in outputs.items()}


def workers_of(engine) -> list:
    """The processes of all of an engine's workers."""
    runners = [each.runner for each in getattr(engine, "engines", [engine])]
    return [process for runner in runners for process, _ in runner.talk.workers.ranks]


def pids_of_workers(monkeypatch, killed: int | None = None) -> list[int]:
    """Those of all workers that start from now on. killed: the rank of one that dies as soon as
    they have started, while it loads.
    """
    pids, new_workers = [], parallel.new_workers

    def watched(*arguments):
        workers = new_workers(*arguments)
        pids.extend(process.pid for process, _ in workers.ranks)
        if killed is not None:
            os.kill(pids[killed], signal.SIGKILL)
        return workers

    monkeypatch.setattr(parallel, "new_workers", watched)
    return pids


def gone(pid: int) -> bool:
    """Whether a process has ended. One that waits for its parent to look counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def assert_all_gone(pids: list[int], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(gone, pids)), f"still there: {[pid for pid in pids if not gone(pid)]}"
    assert os.getpid() not in pids
