"""Proves that the excerpts and counts of the README are those of the code. Its numbers are held to
results/counted/l17_trees.json by the course's own rule.
"""

import json
from pathlib import Path

import pytest
import torch

from lessons.l17_tree_speculation.lab import pictures
from lessons.l17_tree_speculation.lab.experiments import (
    NODES,
    PLAIN,
    WAYS,
    acceptance,
    counted,
    recorded,
    typical_bias,
)
from lessons.l17_tree_speculation.lab.workload import KINDS, is_there
from lessons.l17_tree_speculation.naive import accept_among, follow
from lessons.l17_tree_speculation.trees.tree import Tree, best_tree, expected_tokens, full_tree
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
REPOSITORY = ROOM.parents[1]
README = pages(ROOM)


def found_for(kind: str) -> dict:
    if not is_there(kind):
        pytest.skip(f"NOT RUN: models/tiny-{kind} is not there")
    return recorded()["kinds"][kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_tree_is_the_best(kind):
    found = found_for(kind)
    table, tree = found["acceptance"], Tree(tuple(found["tree"]))
    # Not node by node, because rounded shares may tie.
    assert len(tree) == NODES == len(best_tree(table, NODES))
    assert expected_tokens(tree, table) == pytest.approx(found["expected"][str(NODES)], abs=1e-3)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_the_counted_tokens(kind, request):
    """To the last digits with --all; else with two of the requests, near it."""
    found = found_for(kind)
    tree = Tree(tuple(found["tree"]))
    if request.config.getoption("--all"):
        for way, params in WAYS.items():
            tokens = counted(kind, params, tree)[0].tokens_a_pass
            # Another machine may round a tie the other way.
            assert tokens == pytest.approx(found[way]["tree"], abs=0.1)
        first = acceptance(kind)[0][0]
        assert first == pytest.approx(found["acceptance"][0][0], abs=0.05)
    else:
        tokens = counted(kind, WAYS["greedy"], tree, requests=2)[0].tokens_a_pass
        assert tokens == pytest.approx(found["greedy"]["tree"], abs=0.9)


def test_typical_acceptance_emits_more_and_means_less(request):
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: takes a minute, --all runs it")
    tree = Tree(tuple(found_for("medusa")["tree"]))
    found = typical_bias("medusa", tree)
    for name, value in recorded()["typical"].items():
        assert found[name] == pytest.approx(value, abs=0.15)
    assert found["typical_tokens"] > found["exact_tokens"]
    assert found["typical_surprise"] < found["exact_surprise"]
    assert PLAIN.temperature == 1


def test_the_example_of_the_readme():
    """Step 6's numbers, and the quiz's."""
    tree = Tree((-1, 0, 0, 1))
    assert len(tree) * 10 + int((tree.table > 0).sum()) == 48
    tree = full_tree([3, 2])
    assert len(tree) * 100 + int((tree.table > 0).sum()) == 1025
    assert "10 · 100 + 1 + 3 · 2 + 6 · 3 = 1025" in README


def test_what_the_texts_say_about_the_time_of_a_batch():
    """EAGLE wins with one request alone, Medusa never; and a pass over a tree takes longer."""
    record = json.loads((REPOSITORY / "results/cpu/l17_batch.json").read_text(encoding="utf-8"))
    seconds = {
        name: {point["x"]: point["median_s"] for point in series["points"]}
        for name, series in record["series"].items()
    }
    plain, eagle = seconds["one token a pass"], seconds["EAGLE, 16 nodes"]
    assert [x for x in plain if eagle[x] < plain[x]] == [1]
    assert all(seconds["Medusa, 16 nodes"][x] > plain[x] for x in plain)
    assert recorded()["kinds"]["eagle"]["greedy"]["tree"] > 2 * plain[1] / eagle[1]


def test_the_excerpts_of_the_readme_are_the_code():
    names = ("naive.py", "trees/kernel.py", "runner.py", "heads/heads.py")
    code = "".join((ROOM / name).read_text(encoding="utf-8") for name in names)
    for excerpt in README.split("```python\n")[1:]:
        assert excerpt.split("```")[0] in code


@pytest.mark.parametrize("name", ["mask", "typical", "nodes"])
@pytest.mark.sample(4, of="pictures")
def test_pictures_fit_their_frame(name):
    figure = getattr(pictures, f"draw_{name}")()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_numbers_of_the_derivation_and_the_quiz():
    """The bottleneck, steps 6, 8 and 10, and quiz items 4 and 5."""
    tree = Tree((-1, 0, 0, 1))
    assert round(0.6**-10) == 165
    assert tree.table[3].tolist() == [3, 2, 0, 1]
    p, q = torch.tensor([0.2, 0.2, 0.6]), torch.tensor([0.5, 0.25, 0.25])
    assert accept_among(p, q, [0, 1], [0.39, 0.9])[0] == 0
    place, rest = accept_among(p, q, [0, 1], [0.41, 0.0])
    assert place == -1 and rest.tolist() == [0, 0, 1]
    assert expected_tokens(tree, [[0.6, 0.2], [0.5]]) == pytest.approx(2.1)
    assert f"{0.95**9:.2f}" == "0.63"
    assert round(4 * (4096**2 + 4096) * 2 / 1e6) == 134


@pytest.mark.parametrize("kind", KINDS)
def test_the_curves_of_nodes_flatten_and_end_with_the_guesses_that_were_counted(kind):
    entry = found_for(kind)
    curve = dict(pictures.curve_of(entry))
    assert len(entry["acceptance"]) == 4 and max(curve) <= 45
    assert curve[max(curve)] < 1.08 * curve[16]


def test_the_example_of_step_7():
    """The picture's tree, walked by `follow`: nodes 0, 1 and 4 stay, and 3 tokens are emitted."""
    words = [*pictures.WORDS, "len"]
    tokens = [words.index(word) for word in pictures.WORDS]
    sampled = [words.index(word) for word in ("range", "(", ".", "(", "len", "(", "(")]
    *nodes, last = follow(pictures.EXAMPLE, tokens, sampled)
    assert nodes == [0, 1, 4]
    emitted = [words[tokens[node]] for node in nodes[1:]] + [words[last]]
    assert f"emitted: {' '.join(emitted)}, three tokens of one pass" in README
    assert "in the example of step 7 h, h + 1, h + 4. The next" in README
    others = set(range(len(pictures.EXAMPLE))) - set(nodes)
    assert others == {2, 3, 5, 6} and "after nodes 2, 3, 5 and 6 is of no use" in README
