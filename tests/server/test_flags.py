"""The command line: vllm serve's flags."""

import subprocess
import sys
from dataclasses import fields

import pytest

from reference.engine.async_engine import AsyncEngineArgs
from reference.server import flags
from reference.server.__main__ import main
from reference.server.engine_flags import HELP
from tests.server.paths import REPOSITORY

# From vLLM's documentation and from guides that quote it.
COMMANDS = [
    "models/tiny",
    "--model models/tiny --port 8000 --host 0.0.0.0",
    "models/tiny --tensor-parallel-size 1 --gpu-memory-utilization 0.9 --max-model-len 2048",
    "models/tiny --max_num_seqs 4 --max_num_batched_tokens=2048 --enable_chunked_prefill",
    "models/tiny --dtype bfloat16 --kv-cache-dtype fp8 --quantization int8 --enforce-eager",
    "models/tiny --enable-prefix-caching --no-enable-chunked-prefill --swap-space 4 --seed 3",
    "models/tiny --api-key secret other --served-model-name a b",
    "models/tiny --enable-lora --lora-modules sql=models/tiny-lora-sql --max-loras 2 "
    "--max-lora-rank 16",
    "models/tiny --trust-remote-code --disable-log-requests --uvicorn-log-level warning",
    'models/tiny --allowed-origins ["*"] --enable-auto-tool-choice --tool-call-parser hermes',
    'models/tiny --speculative-config {"method":"ngram","num_speculative_tokens":3}',
    "models/tiny -tp 8 -dcp 8 -ep --cp-kv-cache-interleave-size 16",
    "models/tiny -dp 8 -ep --all2all-backend deepep_low_latency --enable-eplb --eplb-config "
    '{"window_size":1000,"step_interval":3000,"num_redundant_experts":2,"log_balancedness":true}',
    "models/tiny --scheduling-policy priority -tp 1 -q int4 --guided-decoding-backend xgrammar",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_guides(command):
    args = flags.read_args(flags.parse(command.split(), "x"))
    assert args.engine.model == "models/tiny"


def test_values_arrive():
    command = [
        "models/tiny",
        "--max_model_len=77",
        "--lora-modules",
        '{"name": "s", "path": "p"}',
        # Fmt: skip.
        "q=r=s",
        "--enable-lora",
        "--no-enable-prefix-caching",
        "--api-key",
        "k",
        "--port",
        "0",
    ]
    args = flags.read_args(flags.parse(command, "x"))
    assert args.engine.max_model_len == 77 and not args.engine.enable_prefix_caching
    assert args.lora_modules == {"s": "p", "q": "r=s"} and args.api_key == ["k"]
    assert args.served_model_name == ["models/tiny"] and args.host == "127.0.0.1"


def test_where_the_engine_is():
    """A process of its own, unless vLLM's flag says otherwise."""
    for given, in_thread in (([], False), (["--disable-frontend-multiprocessing"], True)):
        args = flags.read_args(flags.parse(given, "x"))
        assert args.disable_frontend_multiprocessing is in_thread


def test_a_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert flags.read_args(flags.parse([], "x")).api_key == ["secret"]
    assert flags.read_args(flags.parse(["--api-key", "k"], "x")).api_key == ["k"]


def test_what_has_no_effect_is_said():
    found = flags.parse(["--trust-remote-code", "--max-log-len", "5", "--port", "1"], "x")
    assert {note.split(":")[0] for note in flags.notes(found)} == {
        "--trust-remote-code",
        "--max-log-len",
    }


@pytest.mark.parametrize(
    "command, said",
    [
        ("--max-modl-len 5", "--max-modl-len: unknown argument; did you mean --max-model-len?"),
        ("--max_num_sequences 5", "did you mean --max-num-seqs?"),
        ("--zzz", "--zzz: unknown argument; --help lists what is accepted"),
        ("--port x", "--port: got 'x'; accepted: a whole number"),
        ("--port 99999", "port: got 99999; accepted: 0 to 65535"),
        ("--tensor-parallel-size 64", "tensor_parallel_size: got 64"),
        ("--max-model-len 0", "max_model_len: got 0"),
        (
            "--lora-modules a=b",
            "lora_modules: got {'a': 'b'}; accepted: none without --enable-lora",
        ),
        ("--lora-modules a", "--lora-modules: 'a' is not accepted: name=folder"),
        (
            "--enable-lora --lora-modules tiny=x --served-model-name tiny",
            "lora_modules: got 'tiny'",
        ),
        ("--tool-call-parser x", "tool_call_parser: got 'x'; accepted: hermes or llama3_json"),
        ("--request-timeout 0", "request_timeout: got 0.0"),
        ("--model a b", "--model: got 'a'; accepted: one model"),
        ("--model no/such/folder --port 0", "unknown model 'no/such/folder'"),
        ("--chat-template no/such/file --port 0", "--chat-template: "),
        ("--host 256.1.1.1", "--host 256.1.1.1 --port 8000"),
        ("--api-key \xe9", "api_key: got 'a key'; accepted: printable ASCII"),
    ],
)
def test_mistakes_are_one_line(command, said, capfd):
    try:
        code = main(command.split())
    except SystemExit as error:
        code = error.code
    lines = capfd.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and said in lines[0], lines


def test_messages_name_what_was_typed(capfd, monkeypatch):
    monkeypatch.setenv("LADDER_COMMAND", "inference-ladder serve")
    with pytest.raises(SystemExit):
        main(["--no-such"])
    assert capfd.readouterr().err.startswith("inference-ladder serve: --no-such: unknown argument")


@pytest.mark.sample(3, of="processes")
def test_help():
    command = [sys.executable, "-m", "reference.server", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and "--served-model-name" in done.stdout and not done.stderr


def test_help_says_what_every_flag_means():
    """In a line or two: of a time its unit, and of whatever has a default that default."""
    parser = flags.new_parser("x")
    text = " ".join(parser.format_help().split())
    assert "SUPPRESS" not in text and "{}" not in text and "{{" not in text
    for action in parser._actions:
        name = action.option_strings[-1] if action.option_strings else action.dest
        assert action.help and len(action.help) <= 120, name
        if name.endswith(("-timeout", "-wait-s")):
            assert action.help.startswith("s, "), name
    assert set(HELP) == {field.name for field in fields(AsyncEngineArgs)} - {"model"}
    for said in ("(default: 64)", "(default: 0.9)", "(default: True)", "(default: fcfs)"):
        assert said in text
