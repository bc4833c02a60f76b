"""Decode steps of a worker as CUDA graphs: the engine's DecodeGraphs, over one rank's part.

The sums of its shards are inside of the graph: NCCL's are kernels like any other, and all ranks
replay the same step. What comes from the stage before is received into a buffer that the graph
reads, and what goes to the next is sent when it was replayed, because only Python knows how many
rows there are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l03_kv_cache.cache import KVPool
from lessons.l20_parallelism.processes.mesh import Links
from lessons.toolbox.model.arguments import refuse
from reference.features.decode_graphs import Chunks, DecodeGraphs


class StageModel:
    """One stage as a model that a graph captures. given: [most rows, hidden_size], where the stage
    before writes; None on the first stage.
    """

    def __init__(self, model: Decoder, links: Links, given: Tensor | None):
        self.model, self.links, self.given = model, links, given
        self.config, self.device = model.config, model.device

    def __call__(self, tokens: Tensor, attend: Attend) -> Tensor:
        """tokens: [T] -> [T, hidden_size], with its norm on the last stage."""
        model = self.model
        if self.given is None:
            x = model.embed_tokens(tokens)
        else:
            x = self.given[: len(tokens)]
        x = model.run_layers(x, attend, model.stage_layers)
        return model.norm(x) if self.links.is_last_stage else x


class StageGraphs(DecodeGraphs):
    """Captured steps of one rank. Arguments after `links`: DecodeGraphs'. Raises ValueError if the
    shards talk by something that a graph cannot hold.
    """

    def __init__(
        self, links: Links, model: Decoder, pool: KVPool, graphs, buckets: Sequence[int], *more
    ):
        group = links.tensor
        if not group.can_be_captured:
            accepted = "nccl in captured steps, because a graph holds kernels; or enforce_eager"
            refuse("backend", group.backend, accepted)
        self.links, given = links, None
        if not links.is_first_stage:
            given = model.norm.weight.new_zeros(max(buckets), model.config.hidden_size)
        self.given = given
        super().__init__(StageModel(model, links, given), pool, graphs, buckets, *more)

    @torch.inference_mode()
    def __call__(self, chunks: Chunks, *arguments) -> tuple[Tensor | None, Tensor | None]:
        """As DecodeGraphs. hidden: [T, hidden_size] twice on the last stage, None on others."""
        pipe, count = self.links.pipeline, sum(len(new) for new, _ in chunks)
        if self.given is not None:
            pipe.receive(self.given[:count], pipe.rank - 1)
        hidden, features = super().__call__(chunks, *arguments)
        if self.links.is_last_stage:
            return hidden, features
        pipe.send(hidden, pipe.rank + 1)
        return None, None
