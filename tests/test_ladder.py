"""The ladder as a command: its files, its exit codes, and that a rung with other tokens cannot
pass.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from reference import ladder, peers
from reference.ladder import Measured
from reference.rungs import Rung

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
    monkeypatch.setattr(ladder, "PEERS", {})
    monkeypatch.setattr(ladder, "REPEATS", 1)


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
    # which is for DeepSeek
    assert [r["name"] for r in data["rungs"]] == [r.name for r in ladder.RUNGS if r.lesson != "06"]
    for rung in data["rungs"]:
        assert set(rung) >= {"name", "tokens_per_s", "speedup", "identical", "runs"}
        assert rung["identical"] is True and rung["tokens_per_s"] > 0 and rung["tokens"] > 0
    assert data["rungs"][0]["speedup"] == 1
    assert (tmp_path / "ladder.png").stat().st_size > 10_000 and (tmp_path / "ladder.svg").exists()


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
    assert [rung["lesson"] for rung in rungs] == ["02", "02", "03", "03", "06", "06"]
    assert all(rung["identical"] for rung in rungs)
    expanded, kept = 2 * 4 * (16 + 8 + 12) * 4, 2 * (16 + 8) * 4
    assert [rung["kv_bytes_per_token"] for rung in rungs] == [0, 0, expanded, expanded, kept, kept]


def forgets_one_token(model, prompts, max_new_tokens, sampling=None, on_token=None):
    from lessons.l02_naive_attention.naive import generate

    return [
        [*row[:-1], (row[-1] + 1) % 4096]
        for row in generate(model, prompts, max_new_tokens, sampling, on_token)
    ]


def test_a_rung_with_other_tokens_fails_the_command(
    model_folder, tmp_path, quick, monkeypatch, capsys
):
    wrong = Rung("99", "wrong rung", f"{__name__}:forgets_one_token")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(ladder, "RUNGS", (ladder.RUNGS[0], wrong))
    assert climb(model_folder, tmp_path) == 1
    assert "tokens differ: wrong rung" in capsys.readouterr().err
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"][1]["identical"] is False


def test_a_tie_is_excused_and_its_margin_printed(monkeypatch):
    base, other = Measured("base", [0]), Measured("other", [0])
    base.outputs, other.outputs, other.runs = {0: [5, 6, 7]}, {0: [5, 9, 7]}, [1.0]
    seen = []
    monkeypatch.setattr(
        ladder, "best_two", lambda model, tokens: seen.append(tokens) or ({6, 9}, 2e-4)
    )
    ladder.judge(other, [base, other], None, [[1, 2]])
    assert other.identical and "0.0002" in other.verdict and "0.001" in other.verdict
    assert seen == [[1, 2, 5]]  # the prompt and the tokens that both agree on
    # too far apart; a token that is not one of the two
    for best, margin in (({6, 9}, 0.5), ({6, 8}, 2e-4), ({8, 9}, 2e-4)):
        monkeypatch.setattr(ladder, "best_two", lambda model, tokens, found=(best, margin): found)
        other.verdict = ""
        ladder.judge(other, [base, other], None, [[1, 2]])
        assert not other.identical


def test_an_answer_that_stops_early_is_a_difference(monkeypatch):
    base, other = Measured("base", [0]), Measured("other", [0])
    base.outputs, other.outputs, other.runs = {0: [5, 6, 7]}, {0: [5, 6]}, [1.0]
    monkeypatch.setattr(ladder, "best_two", lambda model, tokens: ({7, 8}, 2e-4))
    ladder.judge(other, [base, other], None, [[1]])
    assert not other.identical


def test_tokens_are_counted_as_generated(model_folder, tmp_path, quick, monkeypatch):
    """A rung that stops after one token must not be credited with the tokens that were asked for."""
    monkeypatch.setattr(ladder, "RUNGS", (Rung("99", "one token", f"{__name__}:one_token"),))
    assert climb(model_folder, tmp_path) == 0
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"][0]["tokens"] == 3


def one_token(model, prompts, max_new_tokens, sampling=None, on_token=None):
    return [[1] for _ in prompts]


def test_a_slow_rung_takes_a_stated_subset(model_folder, tmp_path, quick, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "SLOW_BUDGET_S", 1e-9)
    monkeypatch.setattr(ladder, "RUNGS", (ladder.RUNGS[0], ladder.RUNGS[-1]))
    assert climb(model_folder, tmp_path) == 0
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"][0]["requests"] == 1
    assert "it served 1 of 3 requests" in capsys.readouterr().out.replace("\n", " ")


def test_interrupted_writes_nothing(model_folder, tmp_path, quick, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "judge", interrupt)
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
    monkeypatch.setattr(
        ladder, "RUNGS", (ladder.RUNGS[-1], Rung("99", "yours", f"{__name__}:crashes", has_cache))
    )
    assert climb(model_folder, tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert "yours failed: RuntimeError: mat1" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content, said",
    [
        ("[", "JSONDecodeError"),
        ("{}", "prompts"),
        ("[]", "prompts"),
        ('[{"prompt": "x"}]', "max_new_tokens"),
        ("[1]", "TypeError"),
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


def test_peers_give_the_same_tokens_and_no_more_than_asked_for(model_folder):
    from lessons.l02_naive_attention.decoder import Decoder
    from lessons.l02_naive_attention.naive import generate

    prompts, limits = [[0, 5, 9], [0, 7], list(range(1, 40))], [6, 3, 9]
    want = generate(Decoder.from_pretrained(str(model_folder)), prompts, limits)
    model = peers.load_peer_model(str(model_folder), torch.device("cpu"), torch.float32)
    for name, run in peers.PEERS.items():
        ticks = []
        assert (
            run(model, prompts, limits, lambda row, token, ticks=ticks: ticks.append(row)) == want
        ), name
        assert len(ticks) == sum(map(len, want))


def test_demo_from_another_folder_and_without_a_terminal(tmp_path, model_folder):
    """As a learner would by accident: python -m reference.ladder elsewhere fails in one line or
    works, never a traceback.
    """
    done = subprocess.run(
        [sys.executable, "-m", "reference.ladder", "--model", "missing", "--requests", "1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**__import__("os").environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1
