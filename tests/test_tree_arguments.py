"""Arguments of trees in the engine, and a fault of a proposer."""

import ast
import re

import pytest

from lessons.l17_tree_speculation.lab.testing import random_heads
from lessons.l17_tree_speculation.trees.tree import Tree
from lessons.toolbox.model.checkpoint import REPOSITORY
from lessons.toolbox.proof.pages import pages
from reference.speculation.drafting import check_depth
from reference.speculation.speculative_config import SpeculativeConfig
from tests.engine_cases import assert_clean, greedy, new_model
from tests.test_speculative_engine import new_engine

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.mark.parametrize("method", ["draft", "eagle", "mtp"])
def test_a_prefix_cache_knows_no_block_that_a_proposer_has_not_filled(model, method):
    """`observe` raises: the target's K and V are there, the draft's are not."""
    drafter = model if method == "draft" else random_heads(model, method)
    engine = new_engine(model, method, drafter)

    def fail(*_):
        raise RuntimeError("planted")

    engine.speculation.proposer.observe = fail
    engine.add_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], greedy(3))
    with pytest.raises(RuntimeError, match="planted"):
        engine.step()
    assert_clean(engine)
    assert engine.scheduler.blocks.reuse(9, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def config_of(**given):
    return SpeculativeConfig.read(dict(method="eagle", model="made here") | given)


def test_a_tree_may_be_asked_for_in_any_spelling():
    tree = [(0,), (1,), (0, 0)]
    want = config_of(num_speculative_tokens=3, speculative_token_tree=str(tree))
    assert config_of(speculative_token_tree=tree).tree == want.tree == Tree((-1, 0, 0, 1))
    assert config_of(speculative_token_tree=tree).num_speculative_tokens == 3
    assert config_of(num_speculative_tokens=3).tree is None
    assert config_of(num_speculative_tokens=3, speculative_token_tree="auto").tree is None


def test_the_configs_of_the_texts_are_some():
    text = pages(REPOSITORY / "lessons/l17_tree_speculation")
    shown = re.findall(r"speculative_config=(\{.*?\})", text, re.DOTALL)
    own, config, parallel = (
        SpeculativeConfig.read(ast.literal_eval(each), "a target") for each in shown
    )
    assert own.method == "mtp" and own.model == "a target" and parallel.parallel_drafting
    assert config.num_speculative_tokens == 4 and config.tree == Tree((-1, 0, 0, 1, 1))


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(speculative_token_tree="[(0,), (1"), "or a list of ranks such as"),
        (dict(speculative_token_tree="[0, 1]"), "or a list of ranks such as"),
        (dict(speculative_token_tree=7), "or a list of ranks such as"),
        (dict(speculative_token_tree=[]), "1 to 63 nodes"),
        (dict(speculative_token_tree=[(0,) * (n + 1) for n in range(64)]), "1 to 63 nodes"),
        (dict(speculative_token_tree=[(0,), (0, -1)]), "or a list of ranks such as"),
        (dict(speculative_token_tree="[(0,), (0,)]"), "each node but the root, once"),
        (dict(speculative_token_tree="[(0,), (2,)]"), "so (1,) must be in it"),
        (dict(speculative_token_tree="[(0,), (1, 0)]"), "so (1,) must be in it"),
        (
            dict(speculative_token_tree="[(0,)]", num_speculative_tokens=2),
            "got 2; accepted: 1, the nodes of speculative_token_tree",
        ),
        (dict(speculative_token_tree="auto"), "num_speculative_tokens: got None"),
        (dict(num_speculative_tokens=64), "at most 63 with method 'eagle'"),
        (
            dict(method="draft", num_speculative_tokens=1, speculative_token_tree="[(0,)]"),
            "None with 'draft'",
        ),
        (dict(num_speculative_tokens=2, draft_sample_method="often"), "greedy or probabilistic"),
        (
            dict(method="draft", num_speculative_tokens=2, draft_sample_method="greedy"),
            "None or probabilistic with method 'draft'",
        ),
    ],
)
def test_a_tree_that_cannot_work_is_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as error:
        config_of(**given)
    assert said in str(error.value) and "\n" not in str(error.value), error.value


def test_a_tree_of_the_heads_own_measurement(model):
    heads = random_heads(model, "medusa")
    args = "medusa", heads, 3, dict(speculative_token_tree="auto")
    with pytest.raises(ValueError, match="has no 'acceptance'"):
        new_engine(model, *args)
    heads.acceptance = [[0.5, 0.3], [0.4]]
    # 0.5, then 0.3 for its sibling, then 0.2 for its child
    assert new_engine(model, *args).scheduler.tree == Tree((-1, 0, 0, 1))
    heads.acceptance = [[0.5], [0.4], [0.4], [0.4]]
    with pytest.raises(ValueError, match="at most 3 one behind the other, the heads of") as error:
        check_depth(config_of(num_speculative_tokens=4, speculative_token_tree="auto"), heads)
    assert "\n" not in str(error.value)
