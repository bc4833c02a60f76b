"""A worker: one rank of a replica. It holds its part of the model and of every block of the cache,
and does what it is told.

It knows nothing of requests but what their sampling asks for. What runs and who owns which block is
decided in the engine's process, and every worker is told the same. So block tables are equal on all
ranks, and one of them is enough.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import BAD_LOGITS, read_tokens
from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l03_kv_cache.generate import Rung
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l12_paged_kv.blocks import Copy
from lessons.l12_paged_kv.more.swap import read_blocks, write_blocks
from lessons.l20_parallelism.pipeline import run_stage
from lessons.l20_parallelism.processes.mesh import Links
from lessons.l20_parallelism.shards.greedy import likeliest as likeliest_of_shards
from lessons.l20_parallelism.shards.layers import ParallelHead
from lessons.l20_parallelism.shards.loading import load_sharded
from lessons.l23_experts.grouped import grouped
from lessons.toolbox.model.checkpoint import load_config
from reference.checkpoints.any_checkpoint import GGUF, stored_method
from reference.engine.assembly import new_runner
from reference.engine.cache_memory import blocks_that_fit
from reference.engine.engine_args import EngineArgs
from reference.engine.model import default_place, gguf_products, load_model, load_quantized
from reference.engine.model_runner import ModelRunner
from reference.engine.sampler import likeliest
from reference.features.decode_graphs import Chunks
from reference.parallel.experts import run_experts_alone, shared_layers, spread
from reference.parallel.sampling import PartSampler, Sampled, Wanted, sample_part

if TYPE_CHECKING:
    from reference.parallel.shared_tokens import TokenShare


class Held(NamedTuple):
    """What a worker holds, in bytes. bytes_per_token: of its part of the cache."""

    weight_bytes: int
    pool_bytes: int
    bytes_per_token: int


class StageRunner(ModelRunner):
    """A ModelRunner over a part of a model. The stages before it and its shards have to run,
    too. share: which tokens of the cache are here (TokenShare); None: all. splits_rows: whether
    each shard has some rows between the sums.
    """

    def __init__(
        self,
        links: Links,
        *args,
        share: "TokenShare | None" = None,
        splits_rows: bool = False,
        **arguments,
    ):
        self.links, self.share = links, share
        super().__init__(*args, **arguments)
        if splits_rows:
            from lessons.l20_parallelism.shards.sequence import sequence_parallel

            self.model = sequence_parallel(self.model, links)

    def rung_of_pool(self, rung: Rung, kv_cache_dtype: str) -> Rung:
        """As in ModelRunner."""
        if self.share is None:
            return rung
        from reference.parallel.shared_tokens import rung_over_share  # here: few engines share

        return rung_over_share(rung, self.share, kv_cache_dtype)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor | None:
        """tokens: [T] -> hidden: [T, hidden_size] on the last stage, None on the others."""
        return run_stage(self.model, self.links, tokens, attend)

    def capture(self, graphs, buckets: Sequence[int], most_each: int = 1) -> None:
        """As in ModelRunner: this rank's part of the steps that only decode."""
        from reference.parallel.stage_graphs import StageGraphs  # here, because only GPUs have any

        what = self.model, self.pool, graphs, buckets, self.max_model_len
        self.captured = StageGraphs(self.links, *what, most_each, self.adapters)

    @torch.inference_mode()
    def likeliest(self, hidden: Tensor, rows: list[int]) -> list[int]:
        """The likeliest token of each row of hidden, [T, hidden_size], on the last stage. Its
        shards gather no logits. Raises ValueError for a row whose largest logit is not finite.
        """
        head = self.model.lm_head
        if not isinstance(head, ParallelHead):
            return likeliest(self.logits(hidden, rows))
        local = head.local(hidden[rows])
        tokens, logprobs = likeliest_of_shards(local, head.vocab_size, head.group)
        return read_tokens(torch.where(logprobs.isfinite(), tokens, BAD_LOGITS))


class Worker:
    """args: the engine's. links: this rank and its neighbours. device: its own."""

    def __init__(self, args: EngineArgs, links: Links, device: str):
        self.args, self.links = args, links
        self.share = None
        if args.decode_context_parallel_size > 1:
            from reference.parallel.shared_tokens import new_share

            self.share = new_share(args, links)
        self.model = load_part(args, links, device)
        self.adapters = None
        if args.enable_lora:
            from reference.parallel.adapters import PartAdapters  # here: it imports lesson 21

            config = load_config(args.model) if args.cuts_model else self.model.config
            self.adapters = PartAdapters(self.model, args, config, links)
            self.model = self.adapters.model
        self.runner: ModelRunner | None = None
        self.hidden: Tensor | None = None  # of the last step
        self.sampler: PartSampler | None = None  # once a step is sampled
        self.away: dict[int, list[Tensor]] = {}  # K and V of a sequence that waits on the host

    # ------------------------------------------------------------ before the first step

    def blocks_that_fit(self, max_model_len: int) -> int:
        """How many blocks this rank has memory for. Raises ValueError if that is too few."""
        return blocks_that_fit(self.args, self.model, max_model_len, new_runner=self.new_runner)

    def allocate(self, num_blocks: int, max_model_len: int) -> Held:
        """Make the pool. The model itself is kept by the runner alone, which may pack its
        matrices.
        """
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in self.model.parameters()}
        args, model, kind = self.args, self.model, self.new_runner
        self.runner = new_runner(args, num_blocks, model, max_model_len, self.adapters, kind=kind)
        del self.model, model
        pool = self.runner.pool
        return Held(sum(weights.values()), pool.allocated_bytes, pool.bytes_per_token)

    def new_runner(self, *args, **arguments) -> ModelRunner:
        """Of this rank's part."""
        how = dict(share=self.share, splits_rows=self.args.splits_rows)
        return StageRunner(self.links, *args, **how, **arguments)

    # ------------------------------------------------------------ a step

    def copy(self, copies: list[Copy]) -> None:
        """Copy whole blocks."""
        self.runner.copy(copies)

    def run(
        self, chunks: Chunks, tables: list[list[int]], row_slots: list[int] | None = None
    ) -> None:
        """Run some tokens of each sequence; the hidden states stay here. Arguments:
        ModelRunner's.
        """
        self.hidden = self.runner.run(chunks, tables, row_slots)

    def run_empty(self) -> None:
        """Take part in a step of other replicas: their rows come to this rank's experts."""
        run_experts_alone(self.runner.model)

    def place_experts(self, placements: dict) -> None:
        """Have the experts that placements give this rank: {layer: Placement}."""
        from reference.parallel.balance import place_experts  # here, because few engines move any

        model = self.model if self.runner is None else self.runner.model
        place_experts(model, self.args, placements)

    def expert_counts(self) -> dict[int, list[int]]:
        """{layer: how often this rank's tokens chose each expert}, since the start."""
        return {layer.index: layer.counts.tolist() for layer in shared_layers(self.runner.model)}

    def put_adapter(self, slot: int, layers: dict) -> None:
        """An adapter into a slot: {layer: LayerAdapter}, of the whole model."""
        self.adapters.put(slot, layers)

    def sample(self, wanted: Wanted) -> Sampled | None:
        """The tokens of the last step. The shards of the last stage sample them; one tells."""
        if not self.links.is_last_stage:
            return None
        if self.sampler is None:
            speculates = self.args.speculative_config is not None
            self.sampler = PartSampler(speculates, self.runner.model.device)
        rows_of = (
            partial(self.runner.likeliest, self.hidden),
            partial(self.runner.logits, self.hidden),
        )
        return sample_part(self.sampler, wanted, *rows_of, is_first=self.links.tensor.rank == 0)

    def scores(self, rows: list[int], tokens: list[int], count: int) -> list | None:
        """As ModelRunner.scores, of rows of the last step. One rank tells them."""
        if not self.links.is_last_stage:
            return None
        found = self.runner.scores(self.hidden, rows, tokens, count)
        return None if self.links.tensor.rank else found

    def logits(self, rows: list[int]) -> np.ndarray | None:
        """Of these rows of the last step, in float32 or wider: [len(rows), V]. Every shard of the
        last stage computes them; one tells them.
        """
        if not self.links.is_last_stage:
            return None
        logits = self.runner.logits(self.hidden, rows)
        if self.links.tensor.rank:
            return None
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu().numpy()

    # ------------------------------------------------------------ blocks that go elsewhere

    def open_transfer(self, of: str) -> None:
        """From now on blocks may be sent to other engines. of: names the weights and the format."""
        from reference.parallel.transfers import RankSender  # here, because few engines send any

        config = self.args.kv_transfer_config
        self.sender = RankSender(self.runner.pool, config, of, self.links.tensor.rank)

    def send_blocks(self, *what) -> None:
        """Begin to send this rank's heads of some blocks. Arguments: RankSender.send's."""
        self.sender.send(*what)

    def sent_blocks(self) -> tuple:
        """What has become of them: RankSender.ended."""
        return self.sender.ended()

    # ------------------------------------------------------------ blocks that wait on the host

    @torch.inference_mode()
    def swap_out(self, sequence: int, table: list[int]) -> None:
        """Keep a copy of these blocks."""
        self.away[sequence] = read_blocks(self.runner.pool, self.runner.pool.tensors, table)

    @torch.inference_mode()
    def swap_in(self, sequence: int, table: list[int]) -> None:
        """Put what was kept into these blocks."""
        pool = self.runner.pool
        write_blocks(pool, pool.tensors, table, self.away.pop(sequence))

    def forget(self, sequence: int) -> None:
        """What was kept is not wanted any more."""
        del self.away[sequence]

    def num_away(self) -> int:
        """Sequences that wait here. For tests."""
        return len(self.away)


def load_part(args: EngineArgs, links: Links, device: str) -> Decoder:
    """This rank's part of the model; a rank that is alone has all of it, in any format. Raises
    ValueError (CheckpointError for the checkpoint).
    """
    dtype = None if args.dtype == "auto" else args.dtype
    if not args.cuts_model:
        return load_model(args.model, device, dtype, args.quantization)
    expert_parallel, place = args.enable_expert_parallel, default_place(device, dtype)
    if args.quantization is None and stored_method(args.model) is None:
        part = load_sharded(args.model, links, *place, expert_parallel)
    else:
        part = load_quantized_part(args, links, *place)
    if links.experts is not None:
        spread(part, links, args)
    return part if part.device.type == "cpu" else grouped(fused(part))  # as load_model


def load_quantized_part(
    args: EngineArgs, links: Links, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """The same of quantized weights. A rank reads them all on the host, because a scale belongs to
    numbers of several ranks, and keeps its part.
    """
    from reference.weights.cut import noted, shard_quantized  # here: it imports lesson 18
    from reference.weights.quantization import multiply_for

    stored, multiply = stored_method(args.model), None
    where = torch.device("cpu"), dtype
    whole = load_quantized(args.model, *where, stored, args.quantization, rounded=noted)
    if device.type != "cpu":
        multiply = multiply_for(device, dtype)
        if stored == GGUF:
            multiply = gguf_products(device, dtype)["multiply"]
    return shard_quantized(whole, links, args.enable_expert_parallel, device, multiply)
