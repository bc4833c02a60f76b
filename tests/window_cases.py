"""Small models whose layers look back differently far, for the tests of window groups."""

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.deepseek import decoder_class
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_parts import MoEConfig, Multipliers
from reference.engine.assembly import engine_over
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs
from reference.engine.sampling_params import SamplingParams
from tests.engine_cases import assert_clean

VOCAB, LONGEST = 61, 96
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=20,
    max_position_embeddings=LONGEST,
)
EXPERTS = MoEConfig(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True
)
GEMMA = dict(norms_after=True, query_pre_attn_scalar=6.0, tie_word_embeddings=True)
# name -> (a family's own fields, windows)
FAMILIES = {
    "mistral": (dict(model_type="mistral"), (7, 7, 7)),
    "olmo3": (dict(model_type="olmo3", variant="olmo", qk_norm=True), (5, 5, 5, None)),
    "cohere2": (
        dict(
            model_type="cohere2",
            variant="cohere",
            multipliers=Multipliers(logits_scaling=0.5, attention_multiplier=6**-0.5),
            no_rope_layers=(2,),
        ),
        (6, 6, None),
    ),
    "gemma2": (dict(model_type="gemma2", attn_logit_softcapping=20.0, **GEMMA), (6, None)),
    "gemma3": (
        dict(model_type="gemma3_text", rope_local_base_freq=100.0, qk_norm=True, **GEMMA),
        (4, 4, 4, 4, 4, None, 4),
    ),
    "gpt-oss": (dict(model_type="gpt_oss", attention_sinks=True, moe=EXPERTS), (6, None) * 2),
    "two windows": (dict(model_type="mistral"), (3, None, 9)),
}


def new_model(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """A random model of a family."""
    own, windows = FAMILIES[name]
    shape = SIZES | dict(num_hidden_layers=len(windows), sliding_windows=windows)
    config = ModelConfig(**shape | own)
    torch.manual_seed(3)
    model = decoder_class(config)(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    for part, parameter in model.named_parameters():
        if "norm" in part and parameter.dim() == 1:
            parameter.add_(1)
    return model.to(dtype)


def new_engine(model: Decoder, drafter=None, **how) -> Engine:
    """An engine whose pool has held nothing: what was not written must not be read."""
    house = dict(max_num_seqs=4, max_model_len=LONGEST, block_size=4, num_gpu_blocks_override=200)
    engine = engine_over(model, None, EngineArgs(device="cpu", **house | how), drafter)
    for slots in engine.runner.pool.tensors:
        if slots.dtype.is_floating_point:
            slots.fill_(torch.nan)
    return engine


def greedy(limit: int, **how) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=limit, detokenize=False, **how)


def answers_of(engine: Engine, prompts: list[list[int]], params, together: bool = True) -> list:
    """The answers of all requests, added together or one after the other."""
    found = {}
    params = params if isinstance(params, list) else [params] * len(prompts)
    for at, (prompt, wish) in enumerate(zip(prompts, params)):
        engine.add_request(str(at), prompt, wish)
        while not together and engine.has_unfinished_requests:
            found |= ended(engine)
    while engine.has_unfinished_requests:
        found |= ended(engine)
    assert_clean(engine)
    assert not any(getattr(engine.scheduler.blocks, "owned", ())), "counted wrong"
    return [found[str(at)] for at in range(len(prompts))]


def ended(engine: Engine) -> dict[str, list]:
    """One step. Returns the answers of the requests that it ended."""
    return {
        output.request_id: [answer.token_ids for answer in output.outputs]
        for output in engine.step()
        if output.finished
    }


@torch.inference_mode()
def alone(model: Decoder, prompt: list[int], limit: int) -> list[int]:
    """Greedy tokens without a cache: each step runs the whole sequence again (lesson 2)."""
    tokens = list(prompt)
    for _ in range(limit):
        hidden = model(torch.tensor(tokens), whole_sequence(model, len(tokens)))
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
