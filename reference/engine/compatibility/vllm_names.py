"""The names of vLLM's interface, listed by vLLM itself. It runs in the peers' Python and imports
nothing of this course.

    .venv-peers/bin/python reference/engine/compatibility/vllm_names.py > vllm_names.json

The JSON: {"version": …, "names": {group: {name: "kind = default"}}}.
"""

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys

# for vLLM, which reads them when it is imported. All groups of paths, those of developers too.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
CALLS = ("generate", "enqueue", "wait_for_completion", "chat", "beam_search")
# routers that a server has for some models or flags only
MORE = ("pooling.pooling", "pooling.classify", "pooling.embed", "pooling.scoring", "serve.profile")
LONGEST = 48  # characters of a kind


def main() -> None:
    """Print the JSON."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM and its libraries print
    os.environ.update(ENVIRONMENT)
    import vllm

    names = {**offline(), "vllm serve": flags(), **requests(), "routes": routes()}
    print(compact({"version": vllm.__version__, "names": names}), file=answers)


def compact(found: dict) -> str:
    """A line for each group."""
    groups = (
        f"  {json.dumps(group)}: {json.dumps(names)}" for group, names in found["names"].items()
    )
    head = f'{{"version": {json.dumps(found["version"])}, "names": {{\n'
    return head + ",\n".join(groups) + "\n}}"


def offline() -> dict[str, dict[str, str]]:
    """What is called from Python."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    public = [name for name in dir(LLM) if not name.startswith("_")]
    return {
        "LLM": fields_of(EngineArgs) | parameters(LLM.__init__),
        "AsyncEngineArgs": {
            name: kind
            for name, kind in fields_of(AsyncEngineArgs).items()
            if name not in fields_of(EngineArgs)
        },
        "SamplingParams": parameters(SamplingParams),
        "BeamSearchParams": parameters(BeamSearchParams),
        "StructuredOutputsParams": parameters(StructuredOutputsParams),
        "methods of LLM": {name: "" for name in public if callable(getattr(LLM, name))},
        **{f"LLM.{name}": parameters(getattr(LLM, name)) for name in CALLS},
    }


def fields_of(kind: type) -> dict[str, str]:
    """The fields of a dataclass."""
    return {
        field.name: described(field.type, field.default)
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    }


def parameters(function) -> dict[str, str]:
    """The parameters of a callable."""
    return {
        name: described(one.annotation, one.default)
        for name, one in inspect.signature(function).parameters.items()
        if name != "self" and not name.startswith("_") and one.kind is not one.VAR_KEYWORD
    }


def described(kind, default=None) -> str:
    """ "int = 1", without the names of modules. Defaults that are objects are left out."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    text = re.sub(r"\b[a-z_]\w*\.(?=\w)", "", text).replace("'", "")
    text = text if len(text) <= LONGEST else "…"
    is_plain = default is None or isinstance(default, (bool, int, float, str))
    return f"{text} = {default!r}" if is_plain and len(repr(default)) <= LONGEST else text


def flags() -> dict[str, str]:
    """The flags of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = {}
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        is_switch = action.nargs == 0 or "Boolean" in type(action).__name__
        takes = "" if is_switch else {"+": "values", "*": "values"}.get(action.nargs, "value")
        longs = [flag for flag in action.option_strings if flag.startswith("--")]
        if longs and action.dest != "help" and action.default != argparse.SUPPRESS:
            found[longs[0]] = takes
    return found


def requests() -> dict[str, dict[str, str]]:
    """The fields of the main routes' bodies."""
    from vllm.entrypoints.anthropic import protocol as anthropic
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
    from vllm.entrypoints.serve.tokenize import protocol as tokenize

    bodies = {
        "/v1/completions": [CompletionRequest],
        "/v1/chat/completions": [ChatCompletionRequest],
        "/v1/responses": [ResponsesRequest],
        "/v1/messages": [anthropic.AnthropicMessagesRequest],
        "/v1/messages/count_tokens": [anthropic.AnthropicCountTokensRequest],
        "/v1/embeddings": [EmbeddingCompletionRequest],
        "/tokenize": [tokenize.TokenizeCompletionRequest, tokenize.TokenizeChatRequest],
        "/detokenize": [tokenize.DetokenizeRequest],
    }
    return {
        path: {
            field.alias or name: described(field.annotation, field.default)
            for model in models
            for name, field in model.model_fields.items()
        }
        for path, models in bodies.items()
    }


def routes() -> dict[str, str]:
    """The paths of a server of any kind of model, those of developers too: {path: methods}."""
    from importlib import import_module
    from typing import get_args

    from vllm import tasks
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.enable_fault_tolerance = True
    app = build_app(args, tuple(get_args(tasks.SupportedTask)), None)
    routers = [import_module(f"vllm.entrypoints.{name}.api_router").router for name in MORE]
    found: dict[str, set] = {}
    for route in [*app.routes, *(route for router in routers for route in router.routes)]:
        # a mounted application has no methods, nor has a WebSocket
        methods = getattr(route, "methods", None) or {"GET"}
        found.setdefault(route.path, set()).update(methods - {"HEAD"})
    return {path: " ".join(sorted(methods)) for path, methods in sorted(found.items())}


if __name__ == "__main__":
    sys.exit(main())
