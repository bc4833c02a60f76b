"""What the measurements of the engine share: the arguments of its choices (speculation, formats),
and what stands at the head of every record.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from lessons.toolbox.command import OneLineParser
from reference.ladder.command import REPOSITORY, place_of


def read_args(
    argv,
    prog: str,
    documentation: str,
    choice: str,
    choices: Iterable[str],
    requests: int,
    tokens: int,
) -> argparse.Namespace:
    """Read a command line. documentation: the module's, whose first paragraph describes the
    command. choice: the option that measures one of `choices` alone, such as "--method". requests,
    tokens: defaults. A wrong value ends the program with one line.
    """
    parser = OneLineParser(
        prog=f"python -m {prog}", description=" ".join(documentation.split("\n\n")[0].split())
    )
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--prompts", type=Path, default=REPOSITORY / "models/prompts.json")
    parser.add_argument(choice, choices=choices, default=None, help="only this one")
    parser.add_argument("--batch", type=int, default=None, help="only this many requests at once")
    parser.add_argument(
        "--requests", type=int, default=requests, help="served at least, batch by batch"
    )
    parser.add_argument("--tokens", type=int, default=tokens, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="of each batch")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    for name in ("batch", "requests", "tokens", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    args.model = place_of(args.model)
    args.prompts, args.out = args.prompts.expanduser(), args.out.expanduser()
    return args


def record_of(model: str, schema: int, **fields) -> dict:
    """A record: the machine and the model, then `fields`. model: as place_of returns it; schema: of
    the whole record.
    """
    # here, because it takes seconds, and a wrong argument shall be told at once
    import torch

    from lessons.toolbox.measure.device import fingerprint

    return {
        "schema": schema,
        "fingerprint": fingerprint(),
        "threads": torch.get_num_threads(),
        # a hub name, or a folder without where the course lies
        "model": model if model.count("/") == 1 else Path(model).name,
        **fields,
    }
