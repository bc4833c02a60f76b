"""The command line: vllm serve's flags, with - or with _ between the words.

    python -m reference.server --model models/tiny --enable-lora \\
        --lora-modules sql=models/tiny-lora-sql

A flag is honoured, or accepted without effect and said so, or refused with the nearest that exists.
"""

import argparse
import difflib
import os
from functools import cache
from typing import Any

from lessons.toolbox.command import OneLineParser
from reference.engine.compatibility.reading import effectless, refusal, vllm_names, why
from reference.engine.compatibility.reasons import REFUSED, WITHOUT_EFFECT
from reference.server.engine_flags import as_json, engine_options

# Flags of older versions of vLLM that change nothing here. Values: as argparse's nargs, and why.
OLDER = {
    "disable-log-requests": (0, "requests are not logged"),
    "use-v2-block-manager": (0, "there is one block manager"),
    "task": (None, "the server generates, and embeds when it is asked to"),
    "guided-decoding-backend": (None, "there is one backend"),
    "worker-use-ray": (0, "--distributed-executor-backend names who starts the workers"),
    "max-seq-len-to-capture": (None, "decode graphs reach to max_model_len"),
    "uvicorn-log-config": (None, "--uvicorn-log-level is there"),
}
SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization",
         "-dp": "--data-parallel-size", "-dcp": "--decode-context-parallel-size",
         "-ep": "--enable-expert-parallel"}  # fmt: skip


@cache
def without_effect() -> dict[str, tuple[int | str | None, str]]:
    """OLDER, and such flags of today's vLLM: {flag: (nargs, why)}."""
    takes = {"": 0, "value": None, "values": "+"}
    found = {
        flag.removeprefix("--"): (takes[kind], reason)
        for flag, kind in vllm_names()["vllm serve"].items()
        if (reason := why(WITHOUT_EFFECT, "vllm serve", flag))
    }
    return OLDER | found


def names(text: str) -> list[str]:
    """["a", "b"] as vLLM writes it, or a,b; for argparse."""
    found = as_json(text) if text.startswith("[") else text.split(",")
    if not all(isinstance(name, str) and name for name in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: names")
    return found


def lora_module(text: str) -> tuple[str, str]:
    """name=path, or {"name": …, "path": …}; for argparse."""
    if text.startswith("{"):
        value = as_json(text)
        pair = value.get("name"), value.get("path")
    else:
        pair = tuple(text.split("=", 1))
    if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: name=folder")
    return pair


def server_options(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of ServerArgs."""
    group = parser.add_argument_group("server")

    def option(flag: str, text: str, kind: Any = str, **more: Any) -> None:
        group.add_argument(flag, type=kind, help=text, default=argparse.SUPPRESS, **more)

    def switch(flag: str, text: str) -> None:
        group.add_argument(flag, action="store_true", help=text, default=argparse.SUPPRESS)

    option("--host", "address to listen on (default: 127.0.0.1, this machine only)")
    option("--port", "0 takes a free one (default: 8000)", int)
    option("--served-model-name", "what clients call the model", nargs="+", metavar="NAME")
    option("--lora-modules", "adapters", lora_module, nargs="+", metavar="NAME=FOLDER")
    option("--chat-template", "a file, or a template in one line")
    switch("--trust-request-chat-template", "let clients send templates, which are programs")
    option("--tool-call-parser", "hermes or llama3_json (default: hermes)")
    option("--api-key", "accepted keys; also in VLLM_API_KEY", nargs="+", metavar="KEY")
    option("--allowed-origins", "CORS, off by default: a list in JSON", names)
    option("--allowed-methods", "CORS (default: all)", names)
    option("--allowed-headers", "CORS (default: all)", names)
    switch("--allow-credentials", "CORS")
    option("--root-path", "behind a proxy that strips a prefix")
    option("--ssl-keyfile", "TLS: the key")
    option("--ssl-certfile", "TLS: the certificate")
    option("--uvicorn-log-level", "default: info")
    switch("--disable-uvicorn-access-log", "no line for each request")
    switch("--disable-fastapi-docs", "no /docs, no /openapi.json")
    switch("--disable-frontend-multiprocessing", "the engine in a thread of the server")
    option("--impl", "exercises: serve on your solved exercises wherever they are a part")
    option("--max-logprobs", "of a request at most (default: 20)", int)
    option("--request-timeout", "s, of a whole answer (default: 600)", float)
    option("--write-timeout", "s, of one write to a client that does not read (default: 30)", float)
    option("--read-timeout", "s, of headers and of a body (default: 30)", float)
    option("--shutdown-timeout", "s, to finish answers after SIGTERM (default: 30)", float)
    option("--max-body-bytes", "of a request (default: 1048576)", int)
    option(
        "--allowed-media-domains", "hosts of pictures (default: none)", nargs="+", metavar="HOST"
    )
    option("--limit-concurrency", "connections at a time (default: 1024)", int)


def new_parser(prog: str) -> OneLineParser:
    """Every flag. One that was not given is no attribute, so that the defaults stand in one
    place.
    """
    parser = OneLineParser(
        prog=prog,
        description="An OpenAI-compatible server.",
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--model", help="folder or hub name (default: models/tiny)")
    server_options(parser)
    engine_options(parser)
    group = parser.add_argument_group("accepted without effect")
    for name, (nargs, reason) in without_effect().items():
        how = {"action": argparse.BooleanOptionalAction} if nargs == 0 else {"nargs": nargs}
        option = group.add_argument(f"--{name}", default=argparse.SUPPRESS, **how)
        option.help = reason  # only now, because argparse adds a default to the help of --no-…
    return parser


def with_hyphens(argument: str) -> str:
    """--max_model_len=5 as --max-model-len=5; vLLM's short forms in full."""
    name, equals, value = argument.partition("=")
    if name in SHORT:
        return SHORT[name] + equals + value
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def parse(arguments: list[str], prog: str) -> argparse.Namespace:
    """The flags as given. Exits with one line for a wrong one."""
    parser = new_parser(prog)
    found, unknown = parser.parse_known_args([with_hyphens(one) for one in arguments])
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        name = unknown[0].partition("=")[0]
        if reason := why(REFUSED, "vllm serve", name.replace("--no-", "--", 1)):
            parser.error(refusal(name, reason, "a flag"))
        near = difflib.get_close_matches(name, flags, 1)
        hint = f"did you mean {near[0]}?" if near else "--help lists what is accepted"
        parser.error(f"{unknown[0]}: unknown argument; {hint}")
    if found.model and found.model_tag and found.model != found.model_tag:
        parser.error(
            f"--model: got {found.model!r}; accepted: one model, and {found.model_tag!r} is one"
        )
    return found


def notes(found: argparse.Namespace) -> list[str]:
    """A line for every flag that has no effect."""
    given = vars(found)
    return [
        effectless(f"--{name}", reason)
        for name, (_, reason) in without_effect().items()
        if name.replace("-", "_") in given
    ]


def read_args(found: argparse.Namespace):
    """ServerArgs. Raises ValueError for a value that cannot work."""
    from dataclasses import fields

    from reference.engine.async_engine import AsyncEngineArgs
    from reference.server.args import ServerArgs

    given = {
        name: value
        for name, value in vars(found).items()
        if name.replace("_", "-") not in without_effect()
    }
    model = given.pop("model") or given.pop("model_tag", None) or AsyncEngineArgs.model
    given.pop("model_tag", None)
    own = {field.name for field in fields(ServerArgs)}
    server = {name: given.pop(name) for name in list(given) if name in own}
    if "lora_modules" in server:
        server["lora_modules"] = dict(server["lora_modules"])
    if "api_key" not in server and os.environ.get("VLLM_API_KEY"):
        server["api_key"] = [os.environ["VLLM_API_KEY"]]
    return ServerArgs(AsyncEngineArgs.read(model=model, **given), **server)
