"""A conversation by the command `llm`: `python with_llm.py URL` prints what it got as JSON."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = """
- model_id: {name}
  model_name: tiny
  api_base: {url}/v1
  can_stream: {stream}
  supports_schema: true
  supports_tools: true
"""


def llm(*arguments: str) -> str:
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout.removesuffix("\n")


def conversation(*more: str) -> list[str]:
    asked = [
        "-m",
        "tiny",
        "--key",
        "none",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "8",
        *more,
    ]
    return [llm("prompt", "class Dog:", *asked), llm("prompt", "-c", "def bark(self):", *asked)]


with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    models = MODEL.format(name="tiny", stream="true", url=sys.argv[1])
    Path(folder, "extra-openai-models.yaml").write_text(models)
    got = dict(turns=conversation("--no-stream"), streamed=conversation())
    asked = ["-m", "tiny", "--key", "none", "-o", "temperature", "0", "-o", "max_tokens", "60"]
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["red", "green"]}, "dark": {"type": "boolean"}},
    }
    schema |= {"required": ["name", "dark"], "additionalProperties": False}
    got["shaped"] = [json.loads(llm("prompt", "Paint it.", "--schema", json.dumps(schema), *asked))]
    got["after"] = llm("prompt", "Paint it.", "-T", "llm_version", *asked)
print(json.dumps(got))
