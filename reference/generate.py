"""Continue a text on the command line.

python -m reference.generate "def quicksort("
python -m reference.generate "import" -n 3 --temperature 0.8 --max-tokens 60
# in two worker processes (lesson 20)
python -m reference.generate "import" --tensor-parallel-size 2
# which share the tokens of the one KV head
python -m reference.generate "import" --model models/tiny-draft -tp 2 -dcp 2
"""

import argparse
import sys
from contextlib import nullcontext

PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "distributed_executor_backend",
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m reference.generate", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("prompts", nargs="+", help="texts to continue")
    add("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    add("--max-tokens", type=int, default=64)
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--top-p", type=float, default=1.0)
    add("-n", type=int, default=1, help="answers to each prompt")
    add("--seed", type=int)
    add("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N", help="shards of a layer")
    add(
        "-pp", "--pipeline-parallel-size", type=int, default=1, metavar="N", help="stages of layers"
    )
    add(
        "-dp",
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="replicas of the model",
    )
    add(
        "-dcp",
        "--decode-context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="shards that share the tokens of a KV head",
    )
    add("--enable-expert-parallel", action="store_true", help="whole experts on each shard")
    add("--distributed-executor-backend", choices=("mp", "ray"), help="who starts the workers")
    add("--stop", action="append", default=[], help="end the answer here; may be given again")
    add(
        "--trace",
        help="write the engine's steps to this file (python -m reference.trace shows it)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        # here, because they take seconds, and --help should not
        from reference import LLM, SamplingParams
        from reference.trace.recorder import traced

        params = SamplingParams(
            n=options.n,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=tuple(options.stop),
        )
        if options.trace and options.data_parallel_size > 1:
            raise ValueError("trace: the steps of one engine; accepted: --data-parallel-size 1")
        llm = LLM(options.model, **{name: getattr(options, name) for name in PARALLEL})
        with traced(llm.engine, options.trace) if options.trace else nullcontext():
            outputs = llm.generate(options.prompts, params, use_tqdm=sys.stderr.isatty())
        for output in outputs:
            for answer in output.outputs:
                print(output.prompt + answer.text, flush=True)
    except ValueError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if type(error).__name__ != "RankError":
            raise
        print(f"generate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("generate: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
