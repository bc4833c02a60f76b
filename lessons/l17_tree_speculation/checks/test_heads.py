"""Proves that heads read what they should, draft what their layers say, and belong to one
target.
"""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.request import read_requests
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l12_paged_kv.lab.testing import CONFIG, new_model, new_prompts
from lessons.l17_tree_speculation.generate import Counts, generate
from lessons.l17_tree_speculation.heads.drafts import new_drafter
from lessons.l17_tree_speculation.heads.heads import KINDS, MedusaHeads, tapped_features
from lessons.l17_tree_speculation.heads.heads_files import fingerprint, load_heads, save_heads
from lessons.l17_tree_speculation.heads.small_head import SmallHead
from lessons.l17_tree_speculation.lab.testing import random_heads
from lessons.l17_tree_speculation.lab.workload import embedded_heads, is_there
from lessons.l17_tree_speculation.runner import TreeRunner
from lessons.l17_tree_speculation.trees.guesses import Ranked
from lessons.l17_tree_speculation.trees.tree import chain, full_tree
from lessons.toolbox.model.checkpoint import REPOSITORY
from lessons.toolbox.model.config_json import CheckpointError

TREE = full_tree([3, 2, 1])


def test_heads_do_not_share_a_module():
    heads = MedusaHeads(8, 3)
    assert len({id(head) for head in heads.heads}) == 3
    assert sum(p.numel() for p in heads.parameters()) == 3 * (8 * 8 + 8)


def test_new_heads_say_what_the_target_says(seed):
    model = new_model()
    hidden = torch.randn(2, CONFIG.hidden_size).double()
    later = MedusaHeads(CONFIG.hidden_size, 3).double()(hidden)
    assert later.shape == (3, 2, CONFIG.hidden_size)
    for each in later:
        torch.testing.assert_close(model.logits(each), model.logits(hidden))


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_head_guesses_its_own_tokens_alone(kind, seed):
    """Their logits are the target's, and in a tree that asks for more tokens than it has, the
    others are not read as tokens with a small probability.
    """
    model, guessed = new_model(), random.sample(range(CONFIG.vocab_size), 12)
    heads = random_heads(model, kind, guessed=guessed)
    hidden = torch.randn(3, CONFIG.hidden_size).double()
    logits, want = heads.lm_head(hidden), model.logits(hidden)
    torch.testing.assert_close(logits[:, guessed], want[:, guessed])
    p = logits.softmax(-1)
    assert p[:, guessed].sum(-1) == pytest.approx(1) and (p > 0).sum() == 3 * len(guessed)

    drafted = set()
    drafter = new_drafter(model, heads, Ranked(), 20, 4, 40)
    (asked,) = read_requests(model.config, new_prompts(5), 9)
    features = TreeRunner.for_trees(model, 20, 4, 40, heads.taps).run_trees({0: asked.prompt}, {})
    asked.output.append(7)
    drafter.observe(asked, features.features)
    ((_, *drafted),) = drafter.propose([asked], {0: TREE}).tokens
    assert len(drafted) == len(TREE) - 1 and set(drafted) <= set(guessed)


def test_a_small_head_is_not_nan_where_all_of_its_tokens_are_forbidden():
    head = SmallHead(9, 4, 3)
    allowed = head(torch.randn(1, 4))[:, 3:]
    assert torch.equal(allowed.softmax(-1), torch.full((1, 6), 1 / 6))


def test_features_of_several_depths(seed):
    """Read on the way, and the hidden state is the same."""
    model = new_model()
    tokens = torch.tensor([3, 1, 4, 1, 5])
    for twin in (model, fused(model)):
        attend = whole_sequence(model, 5)
        hidden, features = tapped_features(twin, tokens, attend, (1, 2))
        torch.testing.assert_close(hidden, model(tokens, attend))
        low, high = features.chunk(2, dim=-1)
        x = model.embed_tokens(tokens)
        torch.testing.assert_close(low, model.run_layers(x, attend, range(1)))
        torch.testing.assert_close(high, model.run_layers(x, attend, range(2)))


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_eagle_drafts_what_its_layer_says(kind, seed):
    """Level by level over its own pages against one whole sequence of pairs, for a chain."""
    model, (prompt,) = new_model(), new_prompts(5)
    heads = random_heads(model, kind)
    runner = TreeRunner.for_trees(model, 20, 4, 40)
    run = runner.run_trees({0: prompt}, {})
    (asked,) = read_requests(model.config, [prompt], 9)
    asked.output.append(7)
    drafter = new_drafter(model, heads, Ranked(), 20, 4, 40)
    drafter.observe(asked, run.features)
    (tokens,) = drafter.propose([asked], {0: chain(3)}).tokens

    text, features, guesses = [*prompt, 7], run.features, []
    for _ in range(3):
        attend = whole_sequence(model, len(text) - 1)
        pairs = model.embed_tokens(torch.tensor(text[1:]))
        out = heads(pairs, features, lambda q, k, v, attend=attend: attend(0, q, k, v))
        guesses.append(int(model.logits(out[-1:]).argmax()))
        text.append(guesses[-1])
        # The target's features where it has been, then the draft's own.
        features = torch.cat([features, out[-1:]])
    assert tokens == [7, *guesses]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_belong_to_their_target(kind, seed, tmp_path):
    model = new_model(torch.float32)
    heads = random_heads(model, kind)
    save_heads(tmp_path, heads, dict(target_fingerprint=fingerprint(model)))
    again = load_heads(tmp_path, model)
    assert again.sizes == heads.sizes
    for ours, theirs in zip(again.parameters(), heads.parameters()):
        torch.testing.assert_close(ours, theirs.bfloat16().float())
    with pytest.raises(CheckpointError, match="accepted: heads of these very weights"):
        load_heads(tmp_path, new_model(torch.float32))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(kind="hydra")))
    with pytest.raises(CheckpointError, match=r"kind in .*: got 'hydra'; accepted: medusa"):
        load_heads(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"heads: got .*accepted: a folder"):
        load_heads(tmp_path / "nowhere", model)
    with pytest.raises(ValueError, match="facts: got"):
        save_heads(tmp_path, heads, {})


@pytest.mark.parametrize("ids", [[3, 5, 5], [3, 5, 10_000], [3, -1, 5], [3.0, 5.0, 300.5]])
def test_a_small_head_of_no_tokens_is_refused(ids, seed, tmp_path):
    model = new_model(torch.float32)
    heads = random_heads(model, "eagle", guessed=[3, 5, 8])
    save_heads(tmp_path, heads, dict(target_fingerprint=fingerprint(model)))
    again = load_heads(tmp_path, model)
    assert again.sizes == heads.sizes and again.lm_head.ids.tolist() == [3, 5, 8]
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {"lm_head.ids": torch.tensor(ids)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.ids"):
        load_heads(tmp_path, model)


@pytest.mark.parametrize(
    "file, content, said",
    [
        ("config.json", "{", "is not readable JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", dict(kind=["eagle"]), "accepted: medusa, eagle, mtp, eagle3"),
        ("config.json", dict(sizes=None), "sizes in .*config.json"),
        ("config.json", dict(sizes=dict(hidden_size=48, count=-1)), "count: got -1"),
        ("config.json", dict(sizes=dict(width=48)), "sizes in .*width"),
        ("config.json", dict(sizes=dict(hidden_size=48, count=9)), "tensors are not those"),
        ("config.json", dict(sizes=dict(draft_vocab_size=0)), "sizes in .*config.json"),
        ("model.safetensors", "no header", "not a complete safetensors file"),
        ("model.safetensors", None, "not a complete safetensors file"),
    ],
)
def test_damaged_files_are_refused_in_one_line(file, content, said, seed, tmp_path):
    model = new_model(torch.float32)
    save_heads(tmp_path, random_heads(model, "medusa"), dict(target_fingerprint=fingerprint(model)))
    if isinstance(content, dict):
        content = json.dumps(json.loads((tmp_path / file).read_text()) | content)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=said) as error:
        load_heads(tmp_path, model)
    assert "\n" not in str(error.value)


def test_the_fingerprint_follows_the_weights_and_not_the_dtype(seed):
    model = new_model(torch.float32)
    before = fingerprint(model)
    assert fingerprint(model.double()) == before
    model.norm.weight[0] += 1
    assert fingerprint(model) != before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_the_embedded_heads(kind):
    """Real weights, real prompts: the same tokens, and more than one a pass."""
    if not is_there(kind):
        pytest.skip(f"NOT RUN: models/tiny-{kind} is not there")
    target, heads, tokenizer = embedded_heads(kind)
    requests = json.loads((REPOSITORY / "models/prompts.json").read_text())[:3]
    prompts = [tokenizer(request["prompt"])["input_ids"][:60] for request in requests]
    counts = Counts()
    expected = one_at_a_time.generate(target, prompts, [14, 9, 1])
    assert generate(target, prompts, [14, 9, 1], heads=heads, tree=TREE, counts=counts) == expected
    assert counts.tokens_a_pass > 1
