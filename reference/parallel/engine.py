"""An engine whose model lies in workers: arguments are held to the checkpoint, workers are started,
and an ordinary Engine is put on top.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch

from lessons.l20_parallelism.pipeline import split_layers
from lessons.l20_parallelism.processes.mesh import Mesh
from lessons.l20_parallelism.shards.sharding import local_config
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model import checkpoint
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.placement import read_device
from reference.checkpoints.any_checkpoint import is_gguf, llava_folder
from reference.checkpoints.gguf.gguf_config import config_of
from reference.checkpoints.gguf.gguf_file import read_gguf
from reference.engine.assembly import engine_on, max_model_len_of, new_runner
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs
from reference.engine.model import default_place, load_tokenizer
from reference.features.composition import refuse_together
from reference.parallel.ahead import RemoteAhead
from reference.parallel.balance import first_placements
from reference.parallel.experts import check_spread
from reference.parallel.in_flight import InFlight, PipelinedScheduler
from reference.parallel.lockstep import LockstepEngine
from reference.parallel.processes import ProcessWorkers, Refused
from reference.parallel.remote_sampler import RemoteSampler
from reference.parallel.replicas import ReplicatedEngine
from reference.parallel.runner import DistributedRunner, RemotePool
from reference.parallel.talk import Talk, Workers

if TYPE_CHECKING:
    from reference.speculation.protocol import Proposer


def new_parallel_engine(args: EngineArgs) -> Engine | ReplicatedEngine:
    """Raises ValueError, in one line, for arguments that cannot work; RankError if a worker
    fails.
    """
    max_model_len_of(args, config_for(args))  # what is wrong is said before anything is loaded
    devices_for(args)
    return engine_over_parts(load_tokenizer(args.tokenizer or args.model), args)


def engine_over_parts(tokenizer, args: EngineArgs) -> Engine | ReplicatedEngine:
    """The same with a tokenizer that is there already; None, if no request wants text."""
    config, devices = config_for(args), devices_for(args)
    # Replicas that share experts are ranks of one world.
    together = args.data_parallel_size if args.shares_experts else 1
    mesh = Mesh(args.tensor_parallel_size, args.pipeline_parallel_size, together)
    with ExitStack() as undo:
        talks = []
        for first in range(0, len(devices), mesh.size):  # all, before any has loaded
            workers = new_workers(args, mesh, devices[first : first + mesh.size])
            undo.callback(workers.close)
            for each in [workers] if together == 1 else workers.replicas():
                talks.append(Talk(each))
                undo.callback(talks[-1].close)
        new = partial(engine_over_workers, config=config, tokenizer=tokenizer, args=args)
        # Side by side, because a GPU runs a step to see what fits, and it takes all replicas.
        with ThreadPoolExecutor(together) as pool:
            try:
                engines = list(pool.map(new, talks))
            except BaseException as error:
                undo.close()  # first, because the pool waits for its threads, and they for workers
                raise (ValueError(error.said) if isinstance(error, Refused) else error) from None
        undo.pop_all()
    if len(engines) == 1:
        return engines[0]
    if args.shares_experts:
        return LockstepEngine(engines, first_placements(args, config), args.eplb_config, args.seed)
    return ReplicatedEngine(engines, args.seed)


def new_workers(args: EngineArgs, mesh: Mesh, devices: list[str]) -> Workers:
    """The workers of a replica, not ready yet."""
    if args.distributed_executor_backend == "ray":
        if importlib.util.find_spec("ray") is None:
            accepted = "mp, because the package ray is not installed"
            refuse("distributed_executor_backend", "ray", accepted)
        from reference.parallel.ray_workers import RayWorkers  # here, because few have ray

        return RayWorkers(args, mesh, devices)
    return ProcessWorkers(args, mesh, devices)


def engine_over_workers(talk: Talk, config: ModelConfig, tokenizer, args: EngineArgs) -> Engine:
    """An engine, when its workers have loaded. Raises Refused, ValueError, RankError."""
    max_model_len = max_model_len_of(args, config)
    talk.wait_until_ready()
    if args.enable_eplb:
        talk.tell("place_experts", first_placements(args, config))
    # The same on all ranks, so the one with the least memory decides.
    num_blocks = min(talk.ask("blocks_that_fit", max_model_len))
    held = talk.ask("allocate", num_blocks, max_model_len)
    # A token that ranks share is stored by one of them.
    shares = args.decode_context_parallel_size
    bytes_per_token = sum(each.bytes_per_token for each in held) // shares
    pool = RemotePool(num_blocks, args.tokens_per_block, bytes_per_token)
    _, dtype = default_place(args.device, None if args.dtype == "auto" else args.dtype)
    runner = DistributedRunner(talk, config, pool, max_model_len, held, dtype)
    if (stages := args.pipeline_parallel_size) > 1:
        runner.new_scheduler = partial(PipelinedScheduler, num_batches=stages)
    if args.enable_lora:
        from reference.parallel.adapters import RemoteAdapters  # here: it imports lesson 21

        runner.adapters = RemoteAdapters(talk, config, args)
    engine = engine_on(runner, tokenizer, args, proposer_for(runner, tokenizer, args))
    engine.emit = RemoteSampler(runner, engine.speculation)  # in front of its class's
    if isinstance(engine.scheduler, PipelinedScheduler):
        engine.run = InFlight(engine).run
    elif args.async_scheduling:
        engine.run = RemoteAhead(engine).run
    return engine


def proposer_for(runner: DistributedRunner, tokenizer, args: EngineArgs) -> "Proposer | None":
    """What drafts, in this process, where the logits arrive. Raises ValueError for a draft that
    does not fit.
    """
    config = args.speculative_config
    if config is None:
        return None
    from reference.speculation.drafting import load_drafter, new_proposer

    config.check_context(runner.max_model_len)
    drafter = load_drafter(config, runner.model, tokenizer)
    new = partial(new_runner, args, runner.pool.num_blocks)
    return new_proposer(args, drafter, runner, new)


# ---------------------------------------------------------------- what can work


def config_for(args: EngineArgs) -> ModelConfig:
    """The model's shape. Raises ValueError if it cannot be cut as the arguments say."""
    if llava_folder(args.model) is not None:
        accepted = "a model that reads text alone, where it is in other processes (…_parallel_size)"
        refuse_together("model", args.model, "pictures", "processes", accepted)
    if is_gguf(args.model):
        config = config_of(read_gguf(args.model))
    else:
        config = checkpoint.load_config(args.model)
    if config.state is not None:
        from reference.features.states.room import check_states

        check_states(args)
    if args.enable_expert_parallel and config.moe is None:
        refuse("enable_expert_parallel", True, f"False for {args.model}, which has no experts")
    if args.shares_experts:
        check_spread(args, config)
    named(
        "tensor_parallel_size",
        args,
        partial(local_config, config, 0, args.tensor_parallel_size, args.enable_expert_parallel),
    )
    if args.decode_context_parallel_size > 1:
        from reference.parallel.shared_tokens import check_share  # here: few engines share

        name = "decode_context_parallel_size"
        sizes = args.tensor_parallel_size, args.decode_context_parallel_size
        named(name, args, partial(check_share, config, *sizes))
    if args.splits_rows:
        from lessons.l20_parallelism.shards.sequence import check_chain

        named("compilation_config", args, partial(check_chain, config))
    named(
        "pipeline_parallel_size",
        args,
        partial(split_layers, config.num_hidden_layers, args.pipeline_parallel_size),
    )
    return config


def named(argument: str, args: EngineArgs, check) -> None:
    """check(), whose ValueError is told as this argument's."""
    try:
        check()
    except ValueError as error:
        raise ValueError(f"{argument}: got {getattr(args, argument)}; {error}") from None


def devices_for(args: EngineArgs) -> list[str]:
    """The device of each worker: all on the CPU, or a GPU each. Raises ValueError for too few
    GPUs.
    """
    device = default_device() if args.device is None else read_device(args.device)
    sizes = (args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size)
    count = sizes[0] * sizes[1] * sizes[2]
    if device.type == "cpu":
        return ["cpu"] * count
    if device.index is not None and count > 1:
        refuse("device", args.device, "cuda, because each of several workers has a GPU of its own")
    if (found := torch.cuda.device_count()) < count:
        product = " × ".join(str(size) for size in sizes)
        raise ValueError(
            f"tensor_parallel_size × pipeline_parallel_size × data_parallel_size: got {product}; "
            f"accepted: at most {found} in all, because each worker needs a GPU"
        )
    return [f"cuda:{index}" for index in range(device.index or 0, (device.index or 0) + count)]
