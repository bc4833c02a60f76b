"""transformers' own server, `transformers serve`, under the same requests: started here, or named.

It is given a cache as large as the requests need, because on a CPU it would take most of the
memory.
"""

import argparse
import json
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec

from reference.bench.bench_load import BenchRequest, Failed, OpenAI, Stream

BLOCK = 32
NO_END = {"eos_token_id": -1}  # its form of ignore_eos


class Heard(OpenAI):
    """Also keeps the texts of the answers: {prompt: text}."""

    def __init__(self, *args, **body):
        super().__init__(*args, **body)
        self.texts: dict[str, str] = {}

    async def send(self, request: BenchRequest, stream: Stream) -> None:
        """As OpenAI's."""
        stream.text = ""
        await super().send(request, stream)
        self.texts[str(request.prompt)] = stream.text

    def take(self, event: dict, stream: Stream) -> None:
        """As OpenAI's."""
        super().take(event, stream)
        stream.text += "".join(self.part(choice) or "" for choice in event.get("choices", ()))


class Transformers(Heard):
    """Its stream ends with a finish_reason, and without [DONE]."""

    def __init__(self, client, model: str):
        super().__init__(client, model, temperature=0, generation_config=json.dumps(NO_END))

    async def read(self, response, stream: Stream) -> None:
        """Events to the end of the stream."""
        reason = None
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            event = json.loads(line.removeprefix("data:"))
            self.take(event, stream)
            for choice in event.get("choices", ()):
                reason = choice.get("finish_reason") or reason
        if reason is None:
            raise Failed("the stream ended in the middle of an answer")


def can_start() -> bool:
    """Whether `transformers serve` and what it needs are installed."""
    return all(find_spec(name) for name in ("transformers.cli.serve", "openai", "fastapi"))


@contextmanager
def started(args: argparse.Namespace, port: str):
    """Its process, with continuous batching, on one thread as ours."""
    blocks = args.streams * -(-(2 * args.input_len + args.output_len) // BLOCK)
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()",
               "serve", str(args.model), "--port", port, "--host", "127.0.0.1", "--device", "cpu",
               "--dtype", "float32", "--continuous-batching", "--cb-block-size", str(BLOCK),
               "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", "512"]  # fmt: skip
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, **quiet)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
