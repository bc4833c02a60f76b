"""The table of reference/features/composition.py is true: two features that work together give the
tokens of the same model without the engine, and two that do not are refused in one line.
"""

import random
from itertools import combinations
from pathlib import Path

import pytest

from lessons.l17_tree_speculation.arguments import check_model
from lessons.l19_kv_quantization.kernels.latents import naive, pool
from lessons.toolbox.proof.planted import with_bug
from reference.engine.engine_args import EngineArgs
from reference.features import composition
from reference.features.composition import GROUP_OF, Apart, are_apart, why_apart
from reference.features.states.room import check_states
from reference.parallel.engine import config_for
from reference.speculation.speculative_config import METHODS
from tests.composition_cases import (
    ARGUMENTS,
    WEIGHTS,
    args_of,
    check,
    engine_of,
    family_of,
    model_of,
    stored_as,
)

ROOT = Path(__file__).resolve().parents[1]
PAIRS = list(combinations(GROUP_OF, 2))
PARALLEL = ("tensor parallel", "pipeline parallel", "data parallel", "decode context")
TRIPLES = 500


def ids(pairs) -> list[str]:
    return [" and ".join(pair) for pair in pairs]


def holds(pair) -> None:
    """Run what the table says of a pair. Raises AssertionError, or what the engine raises."""
    reason = why_apart(*pair)
    if reason is None:
        check(frozenset(pair))
    elif not reason.startswith("one of"):  # no arguments ask for two of one kind
        with pytest.raises(ValueError) as refused:
            asked(pair)
        said = str(refused.value)
        assert "\n" not in said and len(said) < 400 and reason in said, said


def asked(pair):
    """An engine with both, as far as it is made before the pair is refused."""
    if "pictures" in pair and set(pair) & set(PARALLEL):
        size = {key: 2 for name in pair for key in ARGUMENTS.get(name, ()) if "parallel" in key}
        return config_for(EngineArgs(str(ROOT / "models/tiny-vision"), **size))
    if why_apart(*pair) == why_apart("GGUF", "MLA"):  # none is written either
        with pytest.raises(AssertionError):
            stored_as("GGUF", family_of(pair))
        raise ValueError(why_apart(*pair))
    if why_apart(*pair) == why_apart("eagle", "MLA"):  # said when heads are loaded
        return check_model(model_of("plain", "MLA"))
    if "states" in pair and set(pair) & set(PARALLEL):  # said when the config is read
        return config_for(args_of(pair))
    if "states" in pair and set(pair) & set(METHODS):  # said before a draft is loaded
        return check_states(args_of(pair))
    return engine_of(frozenset(pair)) if not set(pair) & set(PARALLEL) else args_of(pair)


@pytest.mark.sample(6)
@pytest.mark.parametrize("pair", PAIRS, ids=ids(PAIRS))
def test_a_pair_of_features(pair):
    holds(pair)


def test_triples_of_features(request, seed):
    """Drawn from those of which no two are apart; 500 in the long form."""
    draw, found = random.Random(seed), 0
    while found < (TRIPLES if request.config.getoption("--all") else 3):
        triple = frozenset(draw.sample(list(GROUP_OF), 3))
        if not are_apart(triple):
            check(triple)
            found += 1


def test_a_false_cell_is_found(monkeypatch):
    """A pair that works and is said not to, and the other way round."""
    monkeypatch.setattr(composition, "APART", (Apart("LoRA", "prefix cache", "of a slip"),))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        holds(("LoRA", "prefix cache"))
    monkeypatch.setattr(composition, "APART", ())
    with pytest.raises(ValueError):
        holds(("int8", "batch invariant"))
    with pytest.raises(ValueError, match="such models store no latents"):
        holds(("fp8_ds_mla KV", "MoE"))


def test_rows_that_depend_on_the_step_are_found(tmp_path, monkeypatch):
    """Latents in FP8 whose scales are those of all tokens of a step."""
    wrong = with_bug(naive, tmp_path, "groups.abs().amax(-1)", "groups.abs().amax((0, -1))[None]")
    monkeypatch.setattr(pool, "rows_of", wrong.rows_of)
    with pytest.raises(AssertionError):
        holds(("fp8_ds_mla KV", "prefix cache"))


def test_every_feature_is_in_the_table():
    ways = {*METHODS, "parallel draft"}  # which is a draft model that was trained for it
    assert ways == set(composition.GROUPS["drafts"] + composition.GROUPS["heads"])
    assert composition.GROUPS["weights"] == WEIGHTS


def test_the_readme_holds_the_table():
    """`python -m reference.features.composition` prints it."""
    assert composition.table() in (ROOT / "reference/README.md").read_text(encoding="utf-8")
