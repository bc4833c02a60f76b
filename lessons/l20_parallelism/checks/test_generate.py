"""Proves that the command prints the same text on one rank and on several, however they are
started, and that a mistake is one line.
"""

import contextlib
import random
import socket
import subprocess
import sys

import pytest

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import GREEDY, SamplingParams
from lessons.l12_paged_kv import generate as lesson_12
from lessons.l20_parallelism.generate import check_gpus, main, mesh_of
from lessons.l20_parallelism.lab.testing import started_by_torchrun
from lessons.l20_parallelism.processes.launch import gather_results, started
from lessons.l20_parallelism.processes.mesh import Mesh
from lessons.toolbox.model.checkpoint import REPOSITORY, load_tokenizer

PROMPTS = ["def f(", "import "]
ARGUMENTS = [*PROMPTS, "--max-new-tokens", "8", "--device", "cpu"]


def expected_of(sampling: SamplingParams) -> str:
    """By lesson 12, in this process."""
    tokenizer, model = load_tokenizer("models/tiny"), Decoder.from_pretrained("models/tiny")
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    answers = lesson_12.generate(model, prompts, 8, sampling)
    return "".join(p + tokenizer.decode(a) + "\n" for p, a in zip(PROMPTS, answers))


@pytest.fixture(scope="module")
def expected() -> str:
    return expected_of(GREEDY)


@pytest.mark.sample(1, of="commands of lesson 20")
@pytest.mark.parametrize("mesh", ["--tp 1", "--tp 2", "--pp 3", "--tp 2 --pp 2"])
def test_the_command_starts_ranks_itself(mesh, capsys):
    assert main([*ARGUMENTS, *mesh.split(), "--temperature", "0.9", "--seed", "7"]) == 0
    assert capsys.readouterr().out == expected_of(SamplingParams(temperature=0.9, seed=7))


def free_port() -> int:
    """Below those that a system gives to a process that asks for any, so that none takes it
    meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@pytest.mark.sample(1, of="commands of lesson 20")
def test_in_the_world_of_torchrun_the_first_rank_prints(expected):
    with started(2, started_by_torchrun, 2, free_port(), ARGUMENTS) as ranks:
        assert gather_results(ranks, timeout_s=120) == [expected, ""]


@pytest.mark.sample(0)
def test_torchrun_itself(expected):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "lessons.l20_parallelism.generate", *ARGUMENTS, "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    assert done.stdout == expected


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--tp 3", "intermediate_size: got 1024; accepted: a multiple of the 3 tensor ranks"),
        ("--tp 2 --pp 7", "num_stages: got 7; accepted: 1 to 6"),
        ("--tp 0", "--tp: got 0; accepted: a whole number"),
        ("--max-new-tokens -1", "--max-new-tokens: got -1"),
        ("--temperature -1", "temperature"),
        ("--model nowhere/at-all/x", "model"),
        ("--device tpu", "device: got 'tpu'"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert main([*ARGUMENTS, *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith("generate: ")


def test_each_rank_wants_a_gpu_of_its_own():
    check_gpus(Mesh(tp=2, pp=2), 4)
    with pytest.raises(ValueError, match="at most 3, the GPUs of this machine"):
        check_gpus(Mesh(tp=2, pp=2), 3)


def test_a_mesh_fills_the_world_of_torchrun():
    assert mesh_of(None, 1, 4) == Mesh(tp=4) and mesh_of(None, 2, 4) == Mesh(tp=2, pp=2)
    assert mesh_of(None, 1, None) == Mesh()
    for tp, pp in [(2, 1), (4, 2), (None, 3)]:
        with pytest.raises(ValueError, match="whose product is 4, the ranks there are"):
            mesh_of(tp, pp, 4)
