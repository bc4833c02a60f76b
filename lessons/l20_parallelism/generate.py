"""Generation by all ranks together: each runs the same loop, over its part of the model.

    python -m lessons.l20_parallelism.generate "def f(" --tp 2
    python -m torch.distributed.run --nproc-per-node 2 -m lessons.l20_parallelism.generate "def f("

No rank gives orders. Every rank reads the same prompts, owns a pool of the same blocks (for its own
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
from lessons.l20_parallelism.pipeline import run_stage, split_layers
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks, world_from_environment
from lessons.l20_parallelism.processes.mesh import Links, Mesh, new_links
from lessons.l20_parallelism.shards.greedy import likeliest
from lessons.l20_parallelism.shards.layers import ParallelHead
from lessons.l20_parallelism.shards.loading import load_sharded, refuse_quantized_parts
from lessons.l20_parallelism.shards.sharding import local_config
from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.exercises.drop_ins import use_implementation
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.arguments import check_whole, one_line, refuse
from lessons.toolbox.model.checkpoint import load_config, load_tokenizer
from lessons.toolbox.model.placement import DTYPES, read_device


class ParallelRunner(PagedRunner):
    """A part of a model over a pool of its own KV heads and layers. Every rank has one, and calls
    the same methods in the same order.
    """

    links: Links
    is_greedy: bool  # each request wants the likeliest token, and no logits

    @classmethod
    def for_part(
        cls,
        part: Decoder,
        num_blocks: int,
        block_size: int,
        max_context_len: int,
        links: Links,
        is_greedy: bool = False,
    ) -> "ParallelRunner":
        """As PagedRunner.for_model. part: from `shard` or `load_sharded`."""
        part = paged_rung_of(part).prepare(part)
        runner = cls(part, new_pool(part, num_blocks, block_size, max_context_len))
        runner.links, runner.is_greedy = links, is_greedy
        return runner

    @torch.inference_mode()
    def step(self, new: dict[int, list[int]]) -> Tensor:
        """As PagedRunner's: the logits after the last token of each sequence, [B, V], on all
        ranks.
        """
        batch = self.grown(new)
        hidden = run_stage(self.model, self.links, batch.tokens, self.pool.attending(batch))
        if hidden is None:  # a stage before the last: room for what the last one sends
            weight = self.model.norm.weight
            logits = weight.new_empty(len(new), self.model.config.vocab_size)
        else:
            logits = self.logits(hidden[batch.logits_at])
        # Logits, so that every rank can sample by lesson 2's code. A production engine samples on
        # the last stage and sends the tokens, which are some ten thousand times fewer bytes.
        pipe = self.links.pipeline
        return pipe.broadcast(logits, source=pipe.size - 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [B, hidden_size] -> [B, V]. Where only the likeliest token is wanted, the logits
        stay on their ranks, and every other token's is -inf.
        """
        head = self.model.lm_head
        if not self.is_greedy or not isinstance(head, ParallelHead):
            return self.model.logits(hidden)
        tokens, logprobs = likeliest(head.local(hidden), head.vocab_size, head.group)
        logits = hidden.new_full((len(hidden), head.vocab_size), -torch.inf)
        return logits.scatter_(1, tokens[:, None], logprobs[:, None].to(logits.dtype))


def generate(
    part: Decoder,
    links: Links,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    **options,
) -> list[list[int]]:
    """The tokens of each prompt, on every rank. Every rank calls it with the same arguments, but
    for its part of the model. options, result and errors: lesson 12's `generate`.
    """
    is_greedy = all(is_plain_greedy(one) for one in wishes_of(sampling, len(prompts)))
    new_runner = partial(ParallelRunner.for_part, links=links, is_greedy=is_greedy)
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
    params = wishes_of(sampling, num_prompts)
    if not all(isinstance(each, SamplingParams) for each in params):
        return sampling  # lesson 12 will refuse it by name
    params = [each.seeded() for each in params]
    seeds = torch.tensor([each.seed for each in params], device=device)
    links.tensor.broadcast(seeds)  # then all shards of the first stage have its first one's
    links.pipeline.broadcast(seeds)
    return [replace(each, seed=seed) for each, seed in zip(params, seeds.tolist())]


def wishes_of(sampling: SamplingParams | list[SamplingParams] | None, num_prompts: int) -> list:
    """What is wanted of each prompt; not checked yet."""
    return sampling if isinstance(sampling, list) else [sampling or GREEDY] * num_prompts


def is_plain_greedy(wish) -> bool:
    """Whether a request wants the token with the largest logit of the model, and nothing else."""
    return isinstance(wish, SamplingParams) and wish.temperature == 0 and not wish.has_penalties


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
    add("--impl", help="exercises: a solved 20.2 chooses the tokens")
    add("--dtype", default="float32", choices=list(DTYPES))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_command("generate", lambda: run(parse(argv)))


def run(options: argparse.Namespace) -> int:
    """Generate in the world of torchrun, or in processes that this one starts."""
    backend = "nccl" if read_device(options.device).type == "cuda" else "gloo"
    is_started = "RANK" in os.environ  # by torchrun
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_started else None
    mesh = mesh_of(options.tp, options.pp, num_ranks)
    check_options(options, mesh)  # in one place, and before processes are started
    if backend == "nccl" and not is_started:
        check_gpus(mesh, torch.cuda.device_count())
    tokenizer = load_tokenizer(options.model)
    prompts = [tokenizer(text)["input_ids"] for text in options.prompts]
    if is_started:
        world = world_from_environment(backend)
        answers = answers_of_rank(world, mesh, options, prompts)
        dist.destroy_process_group()
        if world.rank:  # all have the same, and one is enough to read
            return 0
    else:
        try:
            answers = run_ranks(
                mesh.size, answers_of_rank, mesh, options, prompts, backend=backend, timeout_s=3600
            )[0]
        except RankError as error:
            print(one_line(f"generate: {error}"), file=sys.stderr)
            return 2
    for prompt, answer in zip(options.prompts, answers):
        print(prompt + tokenizer.decode(answer, skip_special_tokens=True), flush=True)
    return 0


def mesh_of(tp: int | None, pp: int, num_ranks: int | None) -> Mesh:
    """The mesh that is asked for. num_ranks: how many torchrun has started, or None. Raises
    ValueError.
    """
    check_whole(**{"--pp": pp, "--tp": 1 if tp is None else tp})
    if tp is None:
        tp = 1 if num_ranks is None else max(1, num_ranks // pp)
    if num_ranks not in (None, tp * pp):
        refuse(
            "--tp, --pp", (tp, pp), f"two numbers whose product is {num_ranks}, the ranks there are"
        )
    return Mesh(tp, pp)


def check_options(options: argparse.Namespace, mesh: Mesh) -> None:
    """Raise ValueError for what no rank could do."""
    config = load_config(options.model)
    refuse_quantized_parts(config)
    local_config(config, 0, mesh.tp, options.expert_parallel)
    split_layers(config.num_hidden_layers, mesh.pp)
    sampling_of(options)
    check_whole(0, **{"--max-new-tokens": options.max_new_tokens})


def check_gpus(mesh: Mesh, num_gpus: int) -> None:
    """Raise ValueError for more ranks than GPUs, because NCCL wants a GPU for each rank."""
    if mesh.size > num_gpus:
        accepted = f"two numbers whose product is at most {num_gpus}, the GPUs of this machine"
        refuse("--tp, --pp", (mesh.tp, mesh.pp), accepted)


def sampling_of(options: argparse.Namespace) -> SamplingParams:
    """How every prompt is sampled."""
    return SamplingParams(temperature=options.temperature, seed=options.seed)


def answers_of_rank(
    world: Group, mesh: Mesh, options: argparse.Namespace, prompts: list[list[int]]
) -> list[list[int]]:
    """The tokens after each prompt. Runs on every rank."""
    if options.impl is not None:  # here, because each rank is a process of its own
        (chosen,) = use_implementation(options.impl, only="20.2")
        if world.rank == 0:
            print(f"exercise 20.2: {chosen.how}", file=sys.stderr)
    device = torch.device(options.device)
    if device.type == "cuda":  # the one that launch.py has given to this process
        device = torch.device("cuda", torch.cuda.current_device())
    links = new_links(mesh)
    part = load_sharded(options.model, links, device, options.dtype, options.expert_parallel)
    return generate(part, links, prompts, options.max_new_tokens, sampling_of(options))


if __name__ == "__main__":
    sys.exit(main())
