"""reference.bench.speed in small: its files, its workloads, its exit codes, and that other tokens
cannot pass.
"""

import json
import time

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from lessons.l06_mla.deepseek import load_decoder
from lessons.toolbox.model.checkpoint import load_tokenizer
from reference.bench import speed, speed_rows
from reference.engine.sampling_params import SamplingParams
from reference.ladder.peers import load_peer_model
from tests.test_ladder import REPOSITORY, SHAPE, save_random

PROMPTS = REPOSITORY / "models/prompts.json"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    config = LlamaConfig(**SHAPE, head_dim=16)
    return save_random(config, tmp_path_factory.mktemp("random-llama"))


@pytest.fixture
def small(monkeypatch):
    """The overhead of a few steps of a few requests, no library, and the threads as they were."""
    monkeypatch.setattr(speed_rows, "installed", list)
    monkeypatch.setattr(speed, "BATCH", 2)
    monkeypatch.setattr(speed, "STEPS", 3)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def measured(model_folder, out, *more) -> int:
    arguments = ["--model", str(model_folder), "--out", str(out), "--rounds", "1", *more]
    return speed.main([*arguments, "--row", "demo", "--requests", "2"])


@pytest.mark.usefixtures("small")
@pytest.mark.sample(1, of="speed")
def test_a_row_is_measured_judged_and_drawn(model_folder, tmp_path, capsys):
    assert measured(model_folder, tmp_path) == 0
    record = json.loads((tmp_path / "speed.json").read_text())
    (row,) = record["rows"]
    assert (row["name"], row["requests"], row["slots"], row["rounds"]) == ("demo", 2, 32, 1)
    names = [entry["name"] for entry in row["contenders"]]
    assert names == [speed_rows.ENGINE, *speed_rows.PEERS]
    engine = row["contenders"][0]["tokens_per_cpu_s"]["median"]
    for entry in row["contenders"]:
        assert entry["identical"] and entry["requests"] == 2
        assert entry["tokens"] == row["contenders"][0]["tokens"] > 0
        ratio = engine / entry["tokens_per_cpu_s"]["median"]
        assert entry["engine_is_faster"]["median"] == pytest.approx(ratio)
    assert record["threads"] == 1
    for name in ("greedy", "sampled"):
        found = record["overhead"][name]
        assert 0 < found["share"]["p20"] <= found["share"]["p80"] < 1
        assert (found["batch"], found["steps"]) == (2, 3)
    for kind in ("png", "svg"):
        assert (tmp_path / f"speed.{kind}").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "continuous batching" in printed and "overhead, sampled" in printed
    assert str(REPOSITORY) not in (tmp_path / "speed.json").read_text()


@pytest.mark.usefixtures("small")
@pytest.mark.sample(1, of="speed")
def test_other_tokens_are_named_and_fail(model_folder, tmp_path, monkeypatch, capsys):
    honest = speed_rows.EngineRun.__call__

    def slipped(self, prompts, limits, on_token=None):
        rows = honest(self, prompts, limits)
        return [[*row[:-1], (row[-1] + 1) % 4096] for row in rows]

    monkeypatch.setattr(speed_rows.EngineRun, "__call__", slipped)
    assert measured(model_folder, tmp_path) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("speed: FAILED, demo: one by one differs from the engine: request")


@pytest.mark.usefixtures("small")
def test_libraries_serve_every_row_and_one_that_refuses_is_left_out(model_folder, monkeypatch):
    class Library:
        """As the engine, but it knows no longer prompts than five tokens."""

        def __init__(self):
            self.asked, self.renewed = [], 0

        def __call__(self, prompts, limits, on_token=None):
            if max(map(len, prompts)) > 5:
                raise RuntimeError("too long")
            self.asked.append(len(prompts))
            run = speed_rows.EngineRun(str(model_folder), slots=2)
            run.renew()
            return run(prompts, limits)

        def one_by_one(self, prompts, limits, on_token=None):
            return [self([prompt], [limit])[0] for prompt, limit in zip(prompts, limits)]

        def renew(self):
            self.renewed += 1

    library = Library()
    monkeypatch.setattr(speed_rows, "installed", lambda: ["a library"])
    monkeypatch.setattr(speed_rows, "LIBRARIES", {"a library": lambda *told: library})
    told = load_decoder(str(model_folder), device="cpu", dtype=torch.float32)
    peer = load_peer_model(str(model_folder), torch.device("cpu"), torch.float32)

    def names(prompts, slots):
        row = speed_rows.Row("row", prompts, [3] * len(prompts), slots)
        told_of = []
        contenders = speed_rows.measure_row(
            row, str(model_folder), told, peer, 1, lambda description: told_of.append(description)
        )
        assert len(told_of) == len(speed_rows.contender_names(row))
        assert all(contender.identical for contender in contenders)
        return [contender.name for contender in contenders]

    ways = [speed_rows.ENGINE, *speed_rows.PEERS]
    assert names([[5, 6], [7, 8, 9]], 2) == [*ways, "a library"]
    assert library.asked == [1, 2] and library.renewed == 2  # to warm up, then all at once
    assert names([[5, 6], [7, 8, 9]], 1) == [*ways[:2], "a library"]
    assert library.asked[2:] == [1, 1, 1]
    assert names([[5, 6], [7] * 6], 2) == ways


def test_the_workloads_are_what_they_say():
    tokenizer = load_tokenizer(str(REPOSITORY / "models/tiny"))
    demo, mixed, shared, alone = (
        speed_rows.new_row(name, PROMPTS, tokenizer, None) for name in speed.NAMES
    )
    assert (len(demo.prompts), demo.slots) == (32, 32)
    assert (len(mixed.prompts), mixed.slots) == (96, 64)
    assert all(8 <= len(prompt) <= 48 for prompt in mixed.prompts)
    assert all(8 <= limit <= 256 for limit in mixed.max_new_tokens)
    assert (len(shared.prompts), shared.slots) == (48, 48)
    assert len({tuple(prompt[:320]) for prompt in shared.prompts}) == 1
    assert len({tuple(prompt) for prompt in shared.prompts}) == 48
    assert (len(alone.prompts), alone.slots) == (8, 1)
    assert all(prompt in demo.prompts for prompt in alone.prompts)
    again = speed_rows.new_row("mixed", PROMPTS, tokenizer, 5)
    assert again.prompts == mixed.prompts[:5]


def test_each_pass_begins_with_an_empty_prefix_cache(model_folder):
    run = speed_rows.EngineRun(str(model_folder), slots=2)
    for _ in range(2):
        run.renew()
        run([list(range(1, 40))], [2])
        (request,) = run.llm.generate([list(range(1, 40))], SamplingParams(), use_tqdm=False)
        assert request.num_cached_tokens == 32  # of the pass itself
        run.renew()
        (request,) = run.llm.generate([list(range(1, 40))], SamplingParams(), use_tqdm=False)
        assert request.num_cached_tokens == 0


def test_only_the_model_counts_as_the_model(model_folder, monkeypatch):
    """A sampler that takes long is overhead."""
    from reference.engine.sampler import Sampler

    honest = Sampler.__call__

    def slow(self, logits, sequences):
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        return honest(self, logits, sequences)

    monkeypatch.setattr(Sampler, "__call__", slow)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    found = speed_rows.overhead(str(model_folder), [[1, 2, 3]], params, batch=2, steps=3)
    assert found["share"]["median"] > 0.7
    assert found["step_cpu_s"]["median"] > 0.05


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--requests", "0"], ["--row", "other"]])
def test_a_mistake_is_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        speed.main(arguments)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_without_a_model_is_one_line(tmp_path, capsys):
    assert measured(tmp_path / "nothing", tmp_path) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_table_is_readable(capsys):
    band = {"median": 2.0, "p20": 1.9, "p80": 2.1}
    entry = {
        "name": "x",
        "requests": 1,
        "tokens": 2,
        "tokens_per_cpu_s": band,
        "engine_is_faster": band,
        "identical": True,
        "verdict": "",
    }
    row = {"name": "demo", "rounds": 3, "contenders": [{**entry, "name": "the engine"}, entry]}
    speed.print_table({"rows": [row], "overhead": {}}, Console(width=110))
    assert "2.0 (1.9 to 2.1)x" in capsys.readouterr().out
