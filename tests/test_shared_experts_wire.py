"""Rows of tokens on the way to experts that replicas share: in FP8 by DeepEP's ways if the experts
are FP8 in blocks, as in vLLM; else as they are. Their bytes, and what becomes of the answers.
"""

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh, new_links, share_experts
from lessons.l23_experts.more.naive_fp8 import rounded
from reference.checkpoints.write_checkpoint import save_quantized
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.parallel import experts
from reference.parallel.experts import FORMS, IN_FP8, shared_layers
from reference.parallel.worker import load_part
from reference.weights.quantization import Settings, quantize_model
from tests.parallel_cases import answers, parallel_engine, requests, serve, write_checkpoint
from tests.test_shared_experts import shared_args

WIDTH, INNER, EXPERTS, TOKENS = 160, 136, 4, (5, 3)  # more than one block; tokens of each rank
SLOTS = 12  # of each expert, for each rank: max_num_batched_tokens


def write_blocks(folder: Path, seed: int, fp8_per: str = "block") -> str:
    """A Mixtral whose matrices are FP8. Returns its path."""
    wide = dict(hidden_size=WIDTH, intermediate_size=INNER)
    plain = write_checkpoint(folder / "plain", "mixtral", seed, **wide)
    model = load_model(plain, "cpu", torch.float32)
    codes = quantize_model(model, "fp8", None, Settings(fp8_per=fp8_per))
    form = "fp8" if fp8_per == "block" else "compressed-tensors"
    save_quantized(codes, plain, folder / fp8_per, form)
    return str(folder / fp8_per)


class RoundedInputs(nn.Module):
    """An expert of rows that were FP8 on their way."""

    def __init__(self, expert: nn.Module):
        super().__init__()
        self.expert = expert

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        return self.expert(rounded(x).to(x.dtype))


def with_rounded_inputs(model: Decoder) -> Decoder:
    """The model, whose routed experts get rounded rows. Its router sees them as they are."""
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.experts = nn.ModuleList(map(RoundedInputs, layer.mlp.experts))
    return model


# ---------------------------------------------------------------- a layer


SLIPS = {
    "never in FP8": lambda: mock.patch.object(experts, "IN_FP8", ()),
    "always in FP8": lambda: mock.patch.object(experts, "IN_FP8", tuple(FORMS)),
    "scales of rows are taken for blocks": lambda: mock.patch.object(
        experts, "is_tiled", lambda weight: True
    ),
}


@torch.inference_mode()
def layer_rank(world: Group, args: EngineArgs, seed: int, slip: str | None) -> tuple:
    """Of an engine's first layer of experts: the error against rows as they are, and against
    rounded ones; the bytes that went into exchanges; and the rows that each sent to each.
    """
    links = share_experts(new_links(Mesh(dp=world.size)))
    draw = torch.Generator().manual_seed(seed + world.rank)
    x = torch.randn(TOKENS[world.rank], WIDTH, generator=draw, dtype=torch.float64)
    whole = load_model(args.model, "cpu", "float64")
    plain = whole.layers[0].mlp(x)
    small = with_rounded_inputs(whole).layers[0].mlp(x)
    with SLIPS[slip]() if slip else nullcontext():
        layer = shared_layers(load_part(args, links, "cpu"))[0]
    links.experts.wire.clear()
    found = layer(x)
    errors = [float((found - want).abs().max()) for want in (plain, small)]
    sent = getattr(layer.form, "rows_sent", None)
    return *errors, links.experts.wire.bytes["all_to_all"], sent


def holds(folder: Path, seed: int, backend: str, fp8_per: str, slip: str | None = None) -> None:
    """Raises AssertionError for rows of another form."""
    model = write_blocks(folder, seed, fp8_per)
    args = shared_args(model, all2all_backend=backend, dtype="float64")
    is_small = backend in IN_FP8 and fp8_per == "block"
    row = WIDTH + 2 * 4 if is_small else 8 * WIDTH  # codes and the scales of two groups
    for rank, (to_plain, to_small, moved, sent) in enumerate(
        run_ranks(2, layer_rank, args, seed, slip)
    ):
        right, wrong = (to_small, to_plain) if is_small else (to_plain, to_small)
        assert right < 1e-5 and wrong > 1e-3
        if backend == "deepep_high_throughput":
            of_token = row + 2 * (4 + 8)  # with the numbers of two experts, and their weights
            received = sum(each[rank] for each in sent)
            assert moved == sum(sent[rank]) * of_token + received * 8 * WIDTH
        elif backend == "deepep_low_latency":  # with how many slots of each are full
            assert moved == EXPERTS * (8 + SLOTS * (row + 8 * WIDTH))


@pytest.mark.parametrize("fp8_per", ["block", "row"])
@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.sample(2, of="rows in FP8")
def test_who_rounds_rows(backend, fp8_per, tmp_path, seed):
    holds(tmp_path, seed, backend, fp8_per)


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.sample(2, of="rows in FP8")
def test_a_wrong_form_is_seen(slip, tmp_path, seed):
    backend = "naive" if slip == "always in FP8" else "deepep_high_throughput"
    with pytest.raises(AssertionError):
        holds(tmp_path, seed, backend, "row" if "rows" in slip else "block", slip)


# ---------------------------------------------------------------- an engine


@pytest.mark.parametrize("backend", IN_FP8)
@pytest.mark.sample(2, of="rows in FP8")
def test_tokens_are_those_of_rounded_rows(backend, tmp_path, seed):
    """Which one process has, too, if it rounds what its experts get."""
    args = shared_args(write_blocks(tmp_path, seed), all2all_backend=backend, dtype="float64")
    model = with_rounded_inputs(load_model(args.model, "cpu", args.dtype))
    asked = requests(seed)
    want = answers(serve(engine_over(model, None, args), asked))
    engine = parallel_engine(args)
    try:
        assert answers(serve(engine, asked)) == want
    finally:
        engine.close()
