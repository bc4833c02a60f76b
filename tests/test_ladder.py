"""The ladder as a command: its files, its exit codes, and that a rung with other tokens cannot
pass.
"""

import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import generate, whole_sequence
from lessons.toolbox.exercises.drop_ins import parts_of_the_engine
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.checkpoint import load_tokenizer
from reference.ladder import climb as climbing
from reference.ladder import command as ladder
from reference.ladder import contest, judging, peers
from reference.ladder.contest import Contender, subset
from reference.ladder.rungs import WITH_HEADS, WITH_LATENTS, Step

REPOSITORY = Path(__file__).parents[1]


SHAPE = dict(
    vocab_size=4096,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=1024,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=0,
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random Llama of two small layers with the embedded tokenizer."""
    return save_random(LlamaConfig(**SHAPE, head_dim=16), tmp_path_factory.mktemp("random-llama"))


def save_random(config, folder):
    """A checkpoint of random weights with the embedded tokenizer."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in (REPOSITORY / "models/tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def quick(monkeypatch):
    """No peers and no repetitions: the rungs are what is tested."""
    monkeypatch.setattr(climbing, "all_peers", tuple)
    monkeypatch.setattr(contest, "MOST_PASSES", 1)


def use_rungs(monkeypatch, *steps):
    """A ladder of these rungs."""
    monkeypatch.setattr(climbing, "rungs_of", lambda config: steps)


def climb(model_folder, out, *more):
    return ladder.main(
        [
            "--model",
            str(model_folder),
            "--out",
            str(out),
            "--requests",
            "3",
            "--device",
            "cpu",
            *more,
        ]
    )


def test_every_rung_gives_the_same_tokens_and_the_files_are_complete(model_folder, tmp_path, quick):
    assert climb(model_folder, tmp_path) == 0
    data = json.loads((tmp_path / "ladder.json").read_text())
    assert set(data) >= {"device", "versions", "model", "peers", "rungs"}
    assert [r["name"] for r in data["rungs"]] == [step.name for step in WITH_HEADS]
    for rung in data["rungs"]:
        assert set(rung) >= {"name", "tokens_per_s", "speedup", "identical", "runs"}
        assert rung["identical"] is True and rung["tokens_per_s"] > 0 and rung["tokens"] > 0
        assert rung["not_run"] is None and rung["in_batches"] == (rung["lesson"] >= "11")
        assert rung["regime"] is None or rung["regime"]["gain"] > 0
    stand_ins = {rung["lesson"] for rung in data["rungs"] if rung["stand_in"]}
    assert stand_ins == {"02", "04", "07", "09", "10", "11"}, "on a CPU"
    names = [rung["name"] for rung in data["rungs"] if rung["lesson"] >= "12"]
    assert names == [
        "paged cache",
        "prefix cache",
        "continuous batching",
        "chunked prefill",
        "n-grams, verified",
        "the engine",
    ]
    assert data["rungs"][0]["speedup"] == 1
    assert (tmp_path / "ladder.png").stat().st_size > 10_000 and (tmp_path / "ladder.svg").exists()


@pytest.mark.sample(3, of="processes")
def test_deepseek_climbs_rungs_of_its_own(tmp_path, quick):
    """A cache of latents holds 16 + 8 values a layer, one of expanded heads 4 · (16 + 8 + 12)."""
    latent = dict(
        q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
    )
    experts = dict(
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
    )
    shape = SHAPE | latent | experts | dict(num_key_value_heads=4)
    assert climb(save_random(DeepseekV3Config(**shape), tmp_path / "model"), tmp_path) == 0
    rungs = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert [rung["name"] for rung in rungs] == [step.name for step in WITH_LATENTS]
    assert all(rung["identical"] for rung in rungs)
    expanded, kept = 2 * 4 * (16 + 8 + 12) * 4, 2 * (16 + 8) * 4
    bytes_held = [rung["kv_bytes_per_token"] for rung in rungs]
    assert bytes_held == [0] * 2 + [expanded] * 5 + [kept] * 13


def forgets_one_token(model, prompts, max_new_tokens, sampling=None, on_token=None):
    return [
        [*row[:-1], (row[-1] + 1) % 4096]
        for row in generate(model, prompts, max_new_tokens, sampling, on_token)
    ]


@pytest.mark.sample(2, of="ladders")
def test_a_rung_with_other_tokens_fails_the_command(
    model_folder, tmp_path, quick, monkeypatch, capsys
):
    use_rungs(monkeypatch, WITH_HEADS[0], Step("99", "wrong rung", forgets_one_token))
    assert climb(model_folder, tmp_path) == 1
    assert "tokens differ: wrong rung" in capsys.readouterr().err
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"][1]["identical"] is False


def contenders(theirs: list[int], ours: list[int]) -> tuple[Contender, Contender]:
    """Two contenders with these answers to request 0."""
    base, other = Contender("base", None, [0]), Contender("other", None, [0])
    base.outputs, other.outputs, other.runs = {0: theirs}, {0: ours}, [1.0]
    return base, other


def test_a_tie_is_excused_and_its_margin_printed(monkeypatch):
    base, other = contenders([5, 6, 7], [5, 9, 7])
    seen = []
    monkeypatch.setattr(
        judging, "best_two", lambda model, tokens: seen.append(tokens) or ({6, 9}, 2e-4)
    )
    judging.judge(other, [base, other], None, [[1, 2]])
    assert other.identical and "0.0002" in other.verdict and "0.001" in other.verdict
    assert seen == [[1, 2, 5]]  # the prompt and the tokens that both agree on
    # too far apart; a token that is not one of the two
    for best, margin in (({6, 9}, 0.5), ({6, 8}, 2e-4), ({8, 9}, 2e-4)):
        monkeypatch.setattr(judging, "best_two", lambda model, tokens, found=(best, margin): found)
        other.verdict = ""
        judging.judge(other, [base, other], None, [[1, 2]])
        assert not other.identical


def test_an_answer_that_stops_early_is_a_difference(monkeypatch):
    base, other = contenders([5, 6, 7], [5, 6])
    monkeypatch.setattr(judging, "best_two", lambda model, tokens: ({7, 8}, 2e-4))
    judging.judge(other, [base, other], None, [[1]])
    assert not other.identical


def test_the_two_best_logits_of_a_model(model_folder):
    """Where the model is in doubt is found without any cache, and far from it where it is not."""
    model = Decoder.from_pretrained(str(model_folder))
    best, margin = judging.best_two(model, [0, 5, 9])
    logits = model.logits(model(torch.tensor([0, 5, 9]), whole_sequence(model, 3)))[-1]
    assert best == set(logits.topk(2).indices.tolist())
    assert margin == pytest.approx(float(logits.topk(2).values.diff().abs()), rel=1e-3)


def test_tokens_are_counted_as_generated(model_folder, tmp_path, quick, monkeypatch):
    """A rung that stops after one token is not credited with the tokens that were asked for."""
    use_rungs(monkeypatch, Step("99", "one token", one_token))
    assert climb(model_folder, tmp_path) == 0
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"][0]["tokens"] == 3


def one_token(model, prompts, max_new_tokens, sampling=None, on_token=None):
    return [[1] for _ in prompts]


@pytest.mark.sample(2, of="ladders")
def test_a_slow_rung_takes_a_stated_subset(model_folder, tmp_path, quick, monkeypatch, capsys):
    monkeypatch.setattr(contest, "SLOW_BUDGET_S", 1e-9)
    use_rungs(monkeypatch, WITH_HEADS[0], WITH_HEADS[-1])
    assert climb(model_folder, tmp_path) == 0
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"][0]["requests"] == 1
    assert "served 1 of 3 requests" in capsys.readouterr().out.replace("\n", " ")


def test_a_subset_asks_as_much_of_a_rung_as_all_requests_do():
    random.seed(5)
    prompts = [[0] * random.randint(5, 300) for _ in range(32)]
    limits = [random.randint(0, 96) for _ in range(32)]
    limits[3] = 0
    for count in (4, 8, 16):
        chosen = subset(prompts, limits, count)
        assert len(set(chosen)) == count and 3 not in chosen
        assert chosen == subset(prompts, limits, count), "the same every time"
        for lengths in ([len(p) for p in prompts], limits):
            mean = sum(lengths[i] for i in chosen) / count
            asking = [length for length, limit in zip(lengths, limits) if limit]
            assert mean == pytest.approx(sum(asking) / len(asking), rel=0.05)
    assert subset(prompts, limits, 32) == [i for i in range(32) if limits[i]]


@pytest.mark.sample(3, of="processes")
def test_requests_for_no_token_or_without_room_for_three(model_folder, tmp_path, quick):
    """One asks for nothing, one leaves room for a single token of the 1024 that the model knows."""
    text = "a " * 1021
    tokens = load_tokenizer(str(model_folder))(text)["input_ids"]
    assert len(tokens) == 1023, "1022 and the start token"
    requests = [{"prompt": "x", "max_new_tokens": 0}, {"prompt": text, "max_new_tokens": 1}]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    assert climb(model_folder, tmp_path, "--prompts", str(tmp_path / "requests.json")) == 0
    rungs = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert {rung["tokens"] for rung in rungs} == {1}


def test_a_warm_up_needs_as_much_room_as_a_pass():
    """As many requests, and as long ones, so that lesson 11 captures nothing in a timed pass."""
    room = []

    def run(prompts, limits, on_token):
        room.append((len(prompts), max(len(p) + n for p, n in zip(prompts, limits))))

    prompts, limits = [[1] * (3 + i % 7) for i in range(20)], [30 - i for i in range(20)]
    contender = Contender("in batches", run, list(range(20)), in_batches=True)
    contest.warm_up(contender, prompts, limits, torch.device("cuda"))
    warmed = max(room)
    run(prompts, limits, None)
    assert warmed == room[-1]
    room.clear()
    contest.warm_up(contender, prompts, limits, torch.device("cpu"))
    assert room == [(1, 5)], "a CPU captures nothing, and its time is dear"


def test_time_is_shared_out_by_budget():
    contender = Contender("x", None, [0])
    assert contender.wants_a_pass(6.0), "the first pass always"
    contender.runs, contender.spent_s = [1.0], 6.0
    assert not contender.wants_a_pass(6.0)
    contender.spent_s = 3.0
    assert contender.wants_a_pass(6.0) and not contender.wants_a_pass(5.9)
    contender.runs = [1.0] * contest.MOST_PASSES
    assert not contender.wants_a_pass(6.0)


def test_many_contenders_share_a_fixed_total(monkeypatch):
    """Ten that take their share of a second each; alone, one would go on for 6 seconds."""
    passes = []

    def timed(contender, prompts, limits, device, tick):
        passes.append(contender.name)
        contender.runs.append(1.0)
        contender.spent_s += 2.0

    monkeypatch.setattr(contest, "run_pass", timed)
    monkeypatch.setattr(contest, "TOTAL_S", 40.0)
    several = [Contender(str(i), lambda *args: None, [0]) for i in range(10)]
    contest.take_turns(several, [[1]], [1], torch.device("cpu"), Console(file=io.StringIO()))
    assert len(passes) == 20 and sum(c.spent_s for c in several) == 40
    assert passes[:10] == passes[10:], "in turns"


def test_a_smaller_subset_is_one_of_all_requests(monkeypatch):
    """Request 0 asks for nothing: a rung that serves fewer of the others must not serve it."""
    monkeypatch.setattr(contest, "SLOW_BUDGET_S", 1e-9)
    prompts, limits = [[1] * 9, [1] * 3, [1] * 4, [1] * 5, [1] * 6], [0, 4, 4, 4, 4]
    served = contest.within_budget(lambda *args: None, prompts, limits, [1, 2, 3, 4])
    assert len(served) == 1 and served[0] in (1, 2, 3, 4)


def test_a_pass_is_estimated_by_its_prompts_and_its_steps():
    limits, times = [5, 9, 2], {"first_s": 10.0, "next_s": 1.0}
    assert contest.estimated_s(limits, [0, 1], in_batches=False, **times) == 2 * 10 + 4 + 8
    assert contest.estimated_s(limits, [0, 1], in_batches=True, **times) == 2 * 10 + 8


@pytest.mark.sample(2, of="ladders")
def test_what_only_a_library_served_is_judged_too(model_folder, tmp_path, quick, monkeypatch):
    """On a slow machine every rung serves one request, and a library all of them."""

    def library(model, prompts, limits, on_token):
        decoder = Decoder.from_pretrained(str(model_folder))
        rows = generate(decoder, prompts, limits)
        if len(rows) == 3:  # not while it warms up
            rows[2][0] = (rows[2][0] + 1) % 4096
        return rows

    guest = peers.Peer("one wrong token", library)
    monkeypatch.setattr(climbing, "all_peers", lambda: (guest,))
    monkeypatch.setattr(contest, "SLOW_BUDGET_S", 1e-9)
    use_rungs(monkeypatch, WITH_HEADS[0], WITH_HEADS[3])
    assert climb(model_folder, tmp_path) == 0
    data = json.loads((tmp_path / "ladder.json").read_text())
    assert [rung["requests"] for rung in data["rungs"]] == [1, 1]
    (peer,) = data["peers"]
    assert peer["requests"] == 3 and peer["identical"] is False
    assert "request 2, new token 0" in peer["verdict"]


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(
    model_folder, tmp_path, quick, monkeypatch, capsys
):
    use_rungs(monkeypatch, Step("99", "yours", crashes))
    (tmp_path / "out").write_text("a file")
    assert climb(model_folder, tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert "yours" not in err and err.count("\n") == 1


def test_interrupted_writes_nothing(model_folder, tmp_path, quick, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(climbing, "judge", interrupt)
    use_rungs(monkeypatch, WITH_HEADS[0])
    assert climb(model_folder, tmp_path) == 130
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--model", "no/such-model"], "no/such-model"),
        (["--prompts", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_arguments_are_one_line(model_folder, tmp_path, arguments, said, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert climb(model_folder, tmp_path, *arguments) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err


def crashes(model, prompts, max_new_tokens, sampling=None, on_token=None):
    raise RuntimeError("mat1 and mat2 cannot be multiplied")


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_rung_that_raises_is_one_line(
    has_cache, model_folder, tmp_path, quick, monkeypatch, capsys
):
    """A learner's drop-in may raise anything, while it is measured or when its time is first
    estimated.
    """
    use_rungs(monkeypatch, WITH_HEADS[-1], Step("99", "yours", crashes, has_cache))
    assert climb(model_folder, tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert "yours failed: RuntimeError: mat1" in err and err.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "content, said",
    [
        ("[", "JSONDecodeError"),
        ("{}", "prompts"),
        ("[]", "prompts"),
        ('[{"prompt": "x"}]', "max_new_tokens"),
        ("[1]", "got 1; accepted"),
        ("[" * 100_000, "RecursionError"),
        ("\0\1\2", "JSONDecodeError"),
        ('{"prompt": "x", "max_new_tokens": 1}', "accepted: a JSON list"),
        ('[{"prompt": ["x"], "max_new_tokens": 1}]', "got {"),
        ('[{"prompt": "\\ud800", "max_new_tokens": 1}]', "accepted: a JSON list"),
        ('[{"prompt": "x", "max_new_tokens": true}]', "accepted: a JSON list"),
        ('[{"prompt": "x", "max_new_tokens": null}]', "accepted: a JSON list"),
        ('[{"prompt": "x", "max_new_tokens": 99999999999999999999}]', "accepted: a JSON list"),
        ('[{"prompt": "%s", "max_new_tokens": 1}]' % ("x " * 5000), "1024"),
        ('[{"prompt": "x", "max_new_tokens": 0}]', "0 everywhere"),
        ('[{"prompt": "x", "max_new_tokens": -1}]', "max_new_tokens"),
        ('[{"prompt": "x", "max_new_tokens": 5000}]', "1024"),
    ],
)
def test_bad_requests_are_one_line(model_folder, tmp_path, quick, content, said, capsys):
    (tmp_path / "requests.json").write_text(content)
    assert climb(model_folder, tmp_path / "out", "--prompts", str(tmp_path / "requests.json")) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [(["--requests", "0"], "at least 1"), (["--device", "abacus"], "'cpu', 'cuda'")],
)
def test_options_out_of_range_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        ladder.main(arguments)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.sample(2, of="ladders")
def test_peers_give_the_same_tokens_and_no_more_than_asked_for(model_folder):
    tokenizer, limits = load_tokenizer(str(model_folder)), [6, 3, 9]
    texts = ["def f(x):", "import os", "class A:\n    def __init__(self, name):\n"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    want = generate(Decoder.from_pretrained(str(model_folder)), prompts, limits)
    model = peers.load_peer_model(str(model_folder), torch.device("cpu"), torch.float32)
    # A model that drafts for itself: all of its guesses are right.
    shutil.copytree(model_folder, f"{model_folder}-draft", dirs_exist_ok=True)
    for peer in peers.PEERS:
        ticks = []
        got = peer.run(model, prompts, limits, lambda row, token, ticks=ticks: ticks.append(row))
        assert got == want, peer.name
        assert len(ticks) == sum(map(len, want))


def elsewhere(tmp_path, *command, **environment):
    """Run Python in another folder, as a learner would by accident."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", **environment},
    )


@pytest.mark.sample(3, of="processes")
def test_a_missing_model_is_one_line_from_another_folder_too(tmp_path):
    done = elsewhere(tmp_path, "-m", "reference.ladder", "--model", "missing", "--requests", "1")
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_on_a_learners_code_no_library_is_measured(model_folder, tmp_path, monkeypatch, capsys):
    """They would take a large part of the time. What is left out is said."""
    called = []
    guest = peers.Peer("a library", lambda *given: called.append(given))
    monkeypatch.setattr(climbing, "all_peers", lambda: (guest,))
    monkeypatch.setattr(contest, "MOST_PASSES", 1)
    use_rungs(monkeypatch, *WITH_HEADS[:1])
    # its parts would stay in place for the tests that follow
    monkeypatch.setattr("lessons.toolbox.exercises.drop_ins.use_implementation", lambda impl: [])
    assert climb(model_folder, tmp_path, "--impl", "solutions") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert not called and ladder.WITHOUT_LIBRARIES in said
    assert json.loads((tmp_path / "ladder.json").read_text())["peers"] == []
    assert climb(model_folder, tmp_path) == 0 and called
    assert ladder.WITHOUT_LIBRARIES not in capsys.readouterr().out


def test_a_climb_where_every_part_is_a_learners(tmp_path, request):
    """In 300 s of processor time, whatever else the machine does. Without --all on two requests."""
    everything = request.config.getoption("--all", False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["-m", "reference.ladder", "--model", str(REPOSITORY / "models/tiny"), "--out=out"]
    command += ["--impl=solutions", "--device=cpu", *([] if everything else ["--requests=2"])]
    done = elsewhere(tmp_path, *command, OMP_NUM_THREADS="1")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    count = len(parts_of_the_engine())
    assert f"{count} of {count} parts are yours" in done.stdout
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent_s <= 300, f"{spent_s:.0f} s of processor time"


ONE_RUNG = """
import sys
from reference.ladder import climb, command, contest, rungs
climb.all_peers, contest.MOST_PASSES = tuple, 1
climb.rungs_of = lambda config: rungs.WITH_HEADS[:1]
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.sample(3, of="processes")
def test_home_folders_another_folder_and_a_terminal_of_ascii(model_folder, tmp_path):
    """A model and an output folder under ~, nothing left there but the three files."""
    shutil.copytree(model_folder, tmp_path / "home/model")
    places = ("--model=~/model", "--out=~/out", "--requests=1", "--device=cpu")
    environment = {"HOME": str(tmp_path / "home"), "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = elsewhere(tmp_path, "-c", ONE_RUNG, *places, **environment)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.isascii() and "no cache: recompute" in done.stdout
    left = {path.name for path in (tmp_path / "home/out").iterdir()}
    assert left == {"ladder.json", "ladder.png", "ladder.svg"}
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]


def test_the_courses_models_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ladder.place_of("models/tiny") == str(REPOSITORY / "models/tiny")
    (tmp_path / "models/tiny").mkdir(parents=True)
    assert ladder.place_of("models/tiny") == "models/tiny", "one's own comes first"
    assert ladder.place_of("someone/on-the-hub") == "someone/on-the-hub"


def test_ctrl_c_while_libraries_are_imported_is_one_line(tmp_path):
    """Importing torch takes seconds. Here it is interrupted at once."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = elsewhere(tmp_path, "-m", "reference.ladder", PYTHONPATH=path)
    assert done.returncode == 130 and done.stderr == "ladder: interrupted\n"


def test_a_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """Ctrl-C between the temporary file and its final name leaves neither."""

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "ladder.json", {"rungs": []})
    assert list(tmp_path.iterdir()) == []
