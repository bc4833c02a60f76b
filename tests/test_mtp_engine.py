"""MTP in the engine, with a checkpoint that has its own layer: latents and experts in the target
and in what drafts. No tokens change, and every guess is that of the layer over the whole text.
"""

import shutil
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.deepseek import load_decoder
from lessons.l12_paged_kv.runner import step_batch
from lessons.l17_tree_speculation.heads import mtp_files
from lessons.l17_tree_speculation.heads.heads import MTPDraft
from lessons.l17_tree_speculation.heads.mtp_files import load_mtp
from lessons.l17_tree_speculation.lab.mtp_checkpoint import LAYERS, write_checkpoint
from reference import LLM, SamplingParams
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.speculation import head_proposers
from reference.speculation.drafting import load_drafter
from reference.speculation.head_proposers import BlockDrafter, EagleProposer
from tests.engine_cases import LONGEST, greedy, random_prompts, run
from tests.test_speculative_engine import EVERY_WISH, HOUSES, wishes

pytestmark = pytest.mark.usefixtures("seed")
COUNT = 3  # drafted in a step, by one layer that is applied three times


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that says much the same after a token whatever was before, so that its own layer
    is often right.
    """
    tensors, file = write_checkpoint(tmp_path / "deepseek"), tmp_path / "deepseek/model.safetensors"
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.3
        if name.endswith("eh_proj.weight"):
            size = len(tensor)
            tensor.mul_(0.3)[:, :size] += torch.eye(size)  # the embedding, most of all
        if name.endswith(("enorm.weight", "model.norm.weight")):
            tensor.fill_(1)
    save_file(tensors, file)
    return tmp_path / "deepseek"


@pytest.fixture
def wild(tmp_path):
    """One whose guesses depend on the whole text, on where its tokens are, too, and are hardly ever
    right.
    """
    tensors, file = write_checkpoint(tmp_path / "wild"), tmp_path / "wild/model.safetensors"
    for name, tensor in tensors.items():
        if name.endswith("q_b_proj.weight"):
            tensor *= 4  # sharp attention, so that a wrong key is another guess
    save_file(tensors, file)
    return tmp_path / "wild"


def new_engine(folder, method="mtp", **house):
    """An engine in float64, where nothing ties. method: None drafts nothing."""
    config = dict(method=method, num_speculative_tokens=COUNT)
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=60, max_model_len=LONGEST)
    args = EngineArgs(str(folder), speculative_config=config if method else None, **small | house)
    model = load_decoder(folder, dtype=torch.float64)
    engine = engine_over(model, None, args, load_drafter(args.speculative_config, model, None))
    pools = [engine.runner.pool, *(engine.speculation.proposer.pools if method else ())]
    for pool in pools:
        for slots in pool.tensors:
            slots.fill_(torch.nan)  # no row may be read that was not written
    return engine


def asked_for():
    prompts = [prompt[: LONGEST - 16] for prompt in random_prompts(len(EVERY_WISH), shared=9)]
    return prompts, [wishes(index) for index in range(len(prompts))]


ARRIVALS = [0, 0, 1, 2, 2, 4]


@pytest.mark.parametrize("house", HOUSES)
def test_every_wish_is_served_as_without_speculation(folder, house):
    prompts, params = asked_for()
    want = run(new_engine(folder, None), prompts, params)
    engine = new_engine(folder, **house)
    assert run(engine, prompts, params, ARRIVALS) == want
    assert engine.speculation.counts.accepted


def wanted(model, draft, text: list[int], behind: list[int]) -> int:
    """The token that the layer guesses after a text and `behind`, over the whole text at once."""
    tokens, attend = torch.tensor(text[:-1]), whole_sequence(model, len(text) - 1)
    features = model(tokens, attend)
    for end in range(len(behind) + 1):
        pairs = model.embed_tokens(torch.tensor([*text, *behind[:end]][1:]))
        made = draft(pairs, features, partial(whole_sequence(model, len(pairs)), 0))
        features = torch.cat([features, made[-1:]])
    return int(model.logits(features[-1]).argmax())


@torch.inference_mode()
def wrong_guesses(folder, **house) -> int:
    """How many guesses of an engine's run are not those of the layer over the whole text."""
    model = load_decoder(folder, dtype=torch.float64)
    draft, wrong, seen = load_mtp(folder, model), 0, 0
    # No prefix cache, because it may hand out the pair of another continuation.
    engine = new_engine(folder, enable_prefix_caching=False, **house)
    for sequence, found in watched(engine):
        text = [*sequence.prompt, *sequence.output]
        for at, token in enumerate(found):
            wrong += wanted(model, draft, text, found[:at]) != token
            seen += 1
    assert seen >= 18, "two full drafts for each request, at least"
    return wrong


def watched(engine):
    """Run some requests; yields (sequence, its draft), before the target has seen the draft."""
    propose, drafts = engine.speculation.proposer.propose, []

    def noted(sequences, counts, tables):
        found = propose(sequences, counts, tables)
        for sequence, draft in zip(sequences, found):
            drafts.append((Seen(sequence.prompt, list(sequence.output)), draft.tokens))
        return found

    engine.speculation.proposer.propose = noted
    run(engine, random_prompts(3), [replace(greedy(9), ignore_eos=True)] * 3, [0, 0, 1])
    return drafts


class Seen(NamedTuple):
    """A sequence as it was when something was drafted for it."""

    prompt: list[int]
    output: list[int]


@pytest.mark.parametrize("house", HOUSES[:3])
@pytest.mark.parametrize("which", ["folder", "wild"])
def test_every_guess_is_that_of_the_layer_over_the_whole_text(which, house, request):
    """Of a layer that is often right, and of one that is hardly ever."""
    assert wrong_guesses(request.getfixturevalue(which), **house) == 0


# ---------------------------------------------------------------- planted slips


RUN, OBSERVE = BlockDrafter.run, EagleProposer.observe


def test_an_embedding_of_the_wrong_token_is_found(wild, monkeypatch):
    """A hidden state with its own token's embedding, in place of the next one's."""

    def this_token(self, chunks, *arguments):
        chunks = [([*tokens[:1], *tokens[:-1]], held) for tokens, held in chunks]
        return RUN(self, chunks, *arguments)

    monkeypatch.setattr(BlockDrafter, "run", this_token)
    assert wrong_guesses(wild)


def test_positions_that_are_off_by_one_are_found(wild, monkeypatch):
    """Of guesses alone. If all positions of a text move together, RoPE does not change."""

    def off_by_one(pool, chunks, tables):
        batch = step_batch(pool, chunks, tables)
        is_guess = all(len(tokens) == 1 for tokens, _ in chunks)
        return replace(batch, positions=batch.positions + is_guess)

    monkeypatch.setattr(head_proposers, "step_batch", off_by_one)
    assert wrong_guesses(wild)


def test_keys_of_rejected_guesses_that_stay_are_found(wild, monkeypatch):
    """What the target has run is not written over the guesses that ran before it."""

    def not_rewound(self, ran, features, tables):
        (pool,) = self.pools
        before = pool.k_slots.clone()
        OBSERVE(self, ran, features, tables)
        pool.k_slots.copy_(torch.where(before.isnan(), pool.k_slots, before))

    monkeypatch.setattr(EagleProposer, "observe", not_rewound)
    assert wrong_guesses(wild)


class NoFinalNorm(MTPDraft):
    """EAGLE's end."""

    def forward(self, embeddings, features, attend):
        both = [self.enorm(embeddings), self.hnorm(features)]
        return self.layer(self.eh_proj(torch.cat(both, dim=-1)), attend)


class Swapped(MTPDraft):
    """The halves in the order that the report prints."""

    def forward(self, embeddings, features, attend):
        both = [self.hnorm(features), self.enorm(embeddings)]
        return self.norm(self.layer(self.eh_proj(torch.cat(both, dim=-1)), attend))


@pytest.mark.parametrize("slip", [NoFinalNorm, Swapped])
def test_a_slip_in_the_module_changes_guesses_and_no_token(folder, slip, monkeypatch):
    """So only a test of the guesses finds it."""
    prompts, params = random_prompts(4), [greedy(12)] * 4
    want, right = run(new_engine(folder, None), prompts, params), watched(new_engine(folder))
    monkeypatch.setattr(mtp_files, "MTPDraft", slip)
    assert run(new_engine(folder), prompts, params) == want
    assert watched(new_engine(folder)) != right


# ---------------------------------------------------------------- from a folder


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp"])
def test_a_target_drafts_with_its_own_layer(tmp_path, method):
    """`model` may be left out, and vLLM's older name of the method is the same."""
    folder = tmp_path / "deepseek"
    write_checkpoint(folder, vocab_size=4096, eos_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"models/tiny/{name}", folder)
    options = dict(dtype="float32", device="cpu", max_model_len=64, num_gpu_blocks_override=20)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for config in (None, dict(method=method, num_speculative_tokens=2)):
        llm = LLM(str(folder), speculative_config=config, **options)
        (output,) = llm.generate(["def f(x):"], params, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1] and llm.engine.speculation.counts.drafted


def test_what_cannot_work_with_latents_is_refused_in_one_line(folder):
    tree = dict(method="mtp", speculative_token_tree="[(0,), (1,)]")
    for config, said in (
        (tree, "because their attention knows no trees here"),
        (dict(method="eagle", model="models/tiny-eagle", num_speculative_tokens=1), "no trees"),
        (dict(method="mtp", model="models/tiny", num_speculative_tokens=1), "another shape"),
    ):
        args = EngineArgs(str(folder), speculative_config=config)
        with pytest.raises(ValueError, match=said) as error:
            load_drafter(args.speculative_config, load_decoder(folder), None)
        assert "\n" not in str(error.value)


def test_a_checkpoint_without_the_layer_says_so(folder):
    tensors = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if f"layers.{LAYERS}." not in name}
    save_file(kept, folder / "model.safetensors")
    args = EngineArgs(str(folder), speculative_config=dict(method="mtp", num_speculative_tokens=1))
    with pytest.raises(ValueError, match=r"enorm\.weight of the MTP layer is missing"):
        load_drafter(args.speculative_config, load_decoder(folder), None)
