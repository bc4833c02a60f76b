"""Proves that ranks with some rows each give tensor parallelism's answers, norm 1/P of the rows,
send the same bytes, and half of the second half in FP8; and that planted bugs are seen.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from lessons.l02_naive_attention.decoder import MLP, RMSNorm
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l20_parallelism.lab.testing import CONFIGS, logits_of, random_model, stage_logits
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh, new_links
from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.l20_parallelism.shards import sequence
from lessons.l20_parallelism.shards.sequence import Float8GatheredNorm, GatheredNorm, mlp_on_rows
from lessons.toolbox.proof.planted import with_bug

FAMILIES = [
    "llama", "llama, tied, mlp_bias", "qwen2", "qwen3", "phi3", "mistral", "mixtral",
    "deepseek_v2", "deepseek_v3",
]  # fmt: skip
TOKENS = 9  # no multiple of the ranks


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "llama, tied, mlp_bias"])
def test_lists_of_rows_give_the_layer(name, size, seed):
    config, generator = CONFIGS[name], torch.Generator().manual_seed(seed)
    norm, mlp = RMSNorm(config.hidden_size, 1e-6).double(), MLP(config).double()
    x = torch.randn(8, config.hidden_size, generator=generator, dtype=torch.float64)
    ranks = Ranks(size)
    with torch.inference_mode():
        outs = mlp_on_rows(list(x.chunk(size)), norm, mlp, ranks)
        torch.testing.assert_close(torch.cat(outs), mlp(norm(x)))
    n = x.numel()
    assert ranks.calls == [("all_gather", n // size), ("reduce_scatter", n)]


class CountingNorm(nn.Module):
    """A norm that writes down how many rows it was given."""

    def __init__(self, norm: nn.Module, rows: list[int]):
        super().__init__()
        self.norm, self.rows, self.weight = norm, rows, norm.weight

    def forward(self, x):
        self.rows.append(len(x))
        return self.norm(x)


@torch.inference_mode()
def sequence_rank(
    world: Group, names: list[str], seed: int, num_tokens: int, kind: str, bug=None
) -> list:
    """Of each model: logits, the rows that norms had, and what the wire was asked to move."""
    with tempfile.TemporaryDirectory() as folder:
        module = with_bug(sequence, Path(folder), *bug) if bug else sequence
    links, found = new_links(Mesh(tp=world.size)), []
    for name in names:
        part, rows = shard(random_model(CONFIGS[name], seed, torch.float64), links), []
        for layer in part.layers:
            layer.input_layernorm = CountingNorm(layer.input_layernorm, rows)
            layer.post_attention_layernorm = CountingNorm(layer.post_attention_layernorm, rows)
        if kind != "tensor parallel":
            part = module.sequence_parallel(part, links, getattr(module, kind))
        wire = links.tensor.wire
        wire.clear()
        hidden = part(tokens_of(num_tokens), whole_sequence(part, num_tokens))
        moved = dict(wire.bytes)
        found.append((part.logits(hidden), rows, moved))
    return found


def tokens_of(num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens) * 7 % 61


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.sample(1)
def test_rows_on_several_ranks_give_the_logits_of_one_process(size, seed):
    ranks = run_ranks(size, sequence_rank, FAMILIES, seed, TOKENS, "GatheredNorm")
    for name, parts in zip(FAMILIES, zip(*ranks)):
        want = logits_of(random_model(CONFIGS[name], seed, torch.float64), tokens_of(TOKENS))
        for logits, rows, moved in parts:
            torch.testing.assert_close(logits, want, atol=1e-10, rtol=0, msg=name)
            assert set(rows) == {-(-TOKENS // size)}, "norms of more rows than a rank has"
            assert "all_reduce" not in moved


def sent_bytes(moved: dict, size: int) -> float:
    """What a rank sends for what it put into its collectives, at least."""
    halves = moved.get("all_reduce", 0) * 2 + moved.get("reduce_scatter", 0)
    return halves * (size - 1) / size + moved.get("all_gather", 0) * (size - 1)


def test_the_bytes_are_those_of_the_all_reduces(seed):
    """And with FP8 on the wire a gather of float64 has an eighth, and a scale for each row."""
    size, tokens, moved = 4, 8, {}
    for kind in ("tensor parallel", "GatheredNorm", "Float8GatheredNorm"):
        moved[kind] = run_ranks(size, sequence_rank, ["llama"], seed, tokens, kind)[0][0][2]
    bytes_of = {kind: sent_bytes(found, size) for kind, found in moved.items()}
    assert bytes_of["GatheredNorm"] == bytes_of["tensor parallel"]
    n = tokens * CONFIGS["llama"].hidden_size
    sums = 2 * CONFIGS["llama"].num_hidden_layers + 1
    assert moved["GatheredNorm"] == {"reduce_scatter": sums * 8 * n, "all_gather": sums * 2 * n}
    gathered = (sums - 1) * (n + 4 * tokens) / size + 8 * n / size  # the last norm is in full
    assert moved["Float8GatheredNorm"]["all_gather"] == gathered


def test_eight_bits_on_the_wire_change_little(seed):
    """Three mantissa bits: rows are off by a few percent. No model with experts, because a token
    near a tie would choose others.
    """
    names = ["llama", "qwen3", "phi3"]
    ranks = run_ranks(2, sequence_rank, names, seed, TOKENS, "Float8GatheredNorm")
    for name, parts in zip(names, zip(*ranks)):
        want = logits_of(random_model(CONFIGS[name], seed, torch.float64), tokens_of(TOKENS))
        assert all(torch.equal(logits, parts[0][0]) for logits, *_ in parts)
        error = (parts[0][0] - want).norm() / want.norm()
        assert 1e-4 < error < 0.3, name


BUGS = {
    "rows of zeros stay": ("own, dim=0)[: self.num_tokens]", "own, dim=0)"),
    "each rank normed another's rows": ("self.group.all_gather(own, dim=0)",
                                        "self.group.all_gather(own, dim=0).flip(0)"),
    "bias forgotten": ("out if bias is None else out + bias", "out"),
    "a part in place of the sum": ("self.group.reduce_scatter(pad(partial, (0, 0, 0, missing)))",
                                   "pad(partial, (0, 0, 0, missing))"
                                   ".chunk(self.group.size)[self.group.rank]"),
    "every rank has the first rows": ("self.group.reduce_scatter(pad(partial, (0, 0, 0, missing)))",
                                      "self.group.all_reduce(pad(partial, (0, 0, 0, missing)))"
                                      ".chunk(self.group.size)[0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.sample(3)
def test_planted_bugs_are_seen(name, seed):
    """In wrong logits, or because rows no longer fit to their queries."""
    family = ["llama, tied, mlp_bias"]
    want = logits_of(random_model(CONFIGS[family[0]], seed, torch.float64), tokens_of(TOKENS))
    try:
        ranks = run_ranks(2, sequence_rank, family, seed, TOKENS, "GatheredNorm", BUGS[name])
    except RankError as refused:
        assert "size of tensor" in str(refused), refused
    else:
        assert any((parts[0][0] - want).abs().max() > 1e-4 for parts in ranks)


def refused_rank(world: Group, name: str, mesh: Mesh) -> None:
    links = new_links(mesh)
    sequence.sequence_parallel(shard(random_model(CONFIGS[name], 0), links), links)


def test_models_and_meshes_without_such_a_chain_are_refused():
    for name, mesh, why in [
        ("gemma2", Mesh(tp=2), "model: got 'gemma2'; accepted: one with a norm before"),
        ("llama", Mesh(pp=2), "pp: got 2; accepted: 1"),
    ]:
        with pytest.raises(RankError, match=why):
            run_ranks(2, refused_rank, name, mesh)


@torch.inference_mode()
def alone_rank(world: Group) -> list:
    links = new_links(Mesh())
    model = random_model(CONFIGS["llama"], 0)
    part = sequence.sequence_parallel(shard(model, links), links, Float8GatheredNorm)
    kinds = {type(module) for module in part.modules()}
    tokens = tokens_of(5)
    same = torch.equal(stage_logits(part, links, tokens), logits_of(model, tokens))
    return [GatheredNorm not in kinds and Float8GatheredNorm not in kinds, same]


def test_one_rank_has_all_rows():
    assert run_ranks(1, alone_rank) == [[True, True]]
