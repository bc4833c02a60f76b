"""Generation by all ranks together: each runs the same loop, over its part of the model.

    python -m lessons.l20_parallelism.generate "def f(" --tp 2
    python -m torch.distributed.run --nproc-per-node 2 -m lessons.l20_parallelism.generate "def f("

Nobody gives orders. Every rank reads the same prompts, owns a pool of the same blocks (for its own
KV heads and layers) and gets the same logits. So all make the same choices: which request comes in,
which block it gets, which token comes next. Only what is random has to be agreed on, which is the
seeds. Read `ParallelRunner.step`; the loop is lesson 12's, unchanged.

An engine with one scheduler, which sends its choices to workers, is the other way (reference/).

Source: SPMD as in Megatron-LM's text generation; vLLM's `external_launcher`.
"""

import argparse
import os
import sys
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import GREEDY, SamplingParams
from lessons.l12_paged_kv import generate as lesson_12
from lessons.l12_paged_kv.runner import PagedRunner, new_pool, paged_rung_of
from lessons.l20_parallelism.group import Group
from lessons.l20_parallelism.launch import RankError, run_ranks, world_from_environment
from lessons.l20_parallelism.loading import load_sharded
from lessons.l20_parallelism.mesh import Links, Mesh, new_links
from lessons.l20_parallelism.pipeline import run_stage
from lessons.toolbox.command import OneLineParser, one_line, run_command
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.checkpoint import load_tokenizer
from lessons.toolbox.model.placement import DTYPES, read_device


class ParallelRunner(PagedRunner):
    """A part of a model over a pool of its own KV heads and layers. Every rank has one, and calls
    the same methods in the same order.
    """

    links: Links

    @classmethod
    def for_part(
        cls, part: Decoder, num_blocks: int, block_size: int, max_context_len: int, links: Links
    ) -> "ParallelRunner":
        """As PagedRunner.for_model. part: from `shard` or `load_sharded`."""
        part = paged_rung_of(part).prepare(part)
        runner = cls(part, new_pool(part, num_blocks, block_size, max_context_len))
        runner.links = links
        return runner

    @torch.inference_mode()
    def step(self, new: dict[int, list[int]]) -> Tensor:
        """As PagedRunner's: the logits behind the last token of each sequence, [B, V], on all ranks."""
        batch = self.grown(new)
        hidden = run_stage(self.model, self.links, batch.tokens, self.pool.attending(batch))
        if hidden is None:  # a stage before the last: room for what the last one sends
            weight = self.model.norm.weight
            logits = weight.new_empty(len(new), self.model.config.vocab_size)
        else:
            logits = self.model.logits(hidden[batch.logits_at])
        # Logits, so that every rank can sample by lesson 2's code. A production engine samples on
        # the last stage and sends the tokens, which are some ten thousand times fewer bytes.
        pipe = self.links.pipeline
        return pipe.broadcast(logits, source=pipe.size - 1)


def generate(
    part: Decoder,
    links: Links,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    **options,
) -> list[list[int]]:
    """The tokens of each prompt, on every rank. Every rank calls it with the same arguments, but for
    its part of the model. options, result and errors: lesson 12's `generate`.
    """
    new_runner = partial(ParallelRunner.for_part, links=links)
    sampling = with_agreed_seeds(sampling, len(prompts), links, part.device)
    return lesson_12.generate(
        part, prompts, max_new_tokens, sampling, new_runner=new_runner, **options
    )


def with_agreed_seeds(
    sampling: SamplingParams | list[SamplingParams] | None,
    num_prompts: int,
    links: Links,
    device: torch.device,
) -> SamplingParams | list[SamplingParams] | None:
    """The same with a seed for each prompt: where none was given one that the first rank drew."""
    params = [sampling or GREEDY] * num_prompts if not isinstance(sampling, list) else sampling
    if not all(isinstance(each, SamplingParams) for each in params):
        return sampling  # lesson 12 will refuse it by name
    params = [each.seeded() for each in params]
    seeds = torch.tensor([each.seed for each in params], device=device)
    links.tensor.broadcast(seeds)  # then all shards of the first stage have its first one's
    links.pipeline.broadcast(seeds)
    return [replace(each, seed=seed) for each, seed in zip(params, seeds.tolist())]


# ---------------------------------------------------------------- the command


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m lessons.l20_parallelism.generate", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("prompts", nargs="+", help="texts to continue")
    add("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    add("--tp", type=int, help="ranks that share each layer (default: all)")
    add("--pp", type=int, default=1, help="stages of layers")
    add("--expert-parallel", action="store_true", help="each rank has some experts whole")
    add("--max-new-tokens", type=int, default=32)
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--seed", type=int)
    add("--device", default=default_device(), help="cpu or cuda")
    add("--dtype", default="float32", choices=list(DTYPES))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_command("generate", lambda: run(parse(argv)))


def run(options: argparse.Namespace) -> int:
    """Generate in the world of torchrun, or in processes that this one starts."""
    backend = "nccl" if read_device(options.device).type == "cuda" else "gloo"
    if "RANK" in os.environ:
        world = world_from_environment(backend)
        texts = texts_of_rank(world, options)
        dist.destroy_process_group()
        if world.rank:  # all have the same, and one is enough to read
            return 0
    else:
        options.tp = 1 if options.tp is None else options.tp
        try:
            texts = run_ranks(Mesh(options.tp, options.pp).size, texts_of_rank, options)[0]
        except RankError as error:
            print(one_line(f"generate: {error}"), file=sys.stderr)
            return 2
    for prompt, text in zip(options.prompts, texts):
        print(prompt + text, flush=True)
    return 0


def texts_of_rank(world: Group, options: argparse.Namespace) -> list[str]:
    """What each prompt is continued by. Runs on every rank."""
    tp = world.size // options.pp if options.tp is None else options.tp
    mesh = Mesh(tp, options.pp)
    if mesh.size != world.size:
        refuse(
            "--tp, --pp", (tp, options.pp), f"two numbers whose product is the {world.size} ranks"
        )
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    links = new_links(mesh)
    part = load_sharded(options.model, links, device, options.dtype, options.expert_parallel)
    tokenizer = load_tokenizer(options.model)
    prompts = [tokenizer(text)["input_ids"] for text in options.prompts]
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)
    answers = generate(part, links, prompts, options.max_new_tokens, sampling)
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


if __name__ == "__main__":
    sys.exit(main())
