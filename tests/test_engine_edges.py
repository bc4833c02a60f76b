"""Where two rules of the engine meet: a stop string and min_tokens, a step that raises after a
last token, a drafted place at which nothing could be drawn.
"""

from types import SimpleNamespace

import pytest
import torch

from lessons.l17_tree_speculation.heads.heads import EagleDraft
from lessons.l24_structured_outputs import matcher as matcher_module
from reference import LLM, SamplingParams, StructuredOutputsParams
from reference.engine.request import EngineSequence
from reference.features.decode_graphs import DecodeGraphs
from tests.engine_cases import CONFIG, LONGEST, new_model
from tests.test_speculative_engine import new_engine as speculative_engine

pytestmark = pytest.mark.usefixtures("seed")
PROMPT = "def quicksort("


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("models/tiny", max_num_seqs=4, kv_cache_memory_bytes=20_000_000, dtype="float32")


def answer(llm, prompt=PROMPT, **wish):
    params = SamplingParams(**dict(temperature=0, max_tokens=24) | wish)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


def test_a_stop_string_is_text_like_any_other_before_min_tokens(llm):
    plain = answer(llm)
    pieces = [llm.get_tokenizer().decode(plain.token_ids[:count]) for count in range(25)]
    stop = plain.text[2:4]
    early = answer(llm, stop=[stop], min_tokens=24)
    assert early.text == plain.text and early.finish_reason == "length"
    # From the first token on that may end it, it ends at a stop string that is complete there.
    least = 8
    late = answer(llm, stop=[plain.text[len(pieces[least]) :][:2]], min_tokens=least)
    assert late.finish_reason == "stop" and len(late.token_ids) > least
    assert late.text.startswith(pieces[least][: -len(late.stop_reason)])
    assert plain.text.startswith(late.text)


def test_the_text_of_a_stop_token_is_kept_if_it_is_asked_for(llm):
    plain = answer(llm)
    at = next(
        at
        for at, token in enumerate(plain.token_ids)
        if at > 3 and token not in plain.token_ids[:at]
    )
    decode, stop = llm.get_tokenizer().decode, plain.token_ids[at]
    cut = answer(llm, stop_token_ids=[stop])
    whole = answer(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert cut.text == decode(plain.token_ids[:at]) != whole.text
    assert whole.text == decode(plain.token_ids[: at + 1])
    assert whole.token_ids == cut.token_ids and whole.stop_reason == cut.stop_reason == stop


def test_bytes_that_became_no_character_show_also_at_a_stop_token(llm):
    tokenizer = llm.get_tokenizer()
    first = tokenizer.encode("é", add_special_tokens=False)[0]
    assert tokenizer.decode([first]) == "\ufffd", "é is two tokens"
    wish = dict(logit_bias={first: 100.0}, stop_token_ids=[first], include_stop_str_in_output=True)
    stopped = answer(llm, **wish)
    assert stopped.token_ids == [first] and stopped.text == "\ufffd"


def test_a_step_that_raises_after_a_last_token_leaves_nothing(llm, monkeypatch):
    """The first answer of three has ended when the step is interrupted."""
    take, calls = EngineSequence.take, []

    def interrupted(sequence, *token):
        calls.append(sequence)
        if len(calls) == 8:
            raise KeyboardInterrupt
        take(sequence, *token)

    monkeypatch.setattr(EngineSequence, "take", interrupted)
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (3, 9, 9)]
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "abort", "abort"]
    monkeypatch.undo()
    scheduler = llm.engine.scheduler
    assert not scheduler.running and not scheduler.blocks.tables
    assert answer(llm).finish_reason == "length", "and it goes on answering"


def test_only_guesses_that_were_drawn_count_as_drafted():
    model = new_model()
    eagle = EagleDraft(CONFIG, 32).to(model.device).eval().requires_grad_(False)
    tree = dict(speculative_token_tree="[(0,),(1,),(2,),(3,)]", draft_sample_method="probabilistic")
    engine = speculative_engine(model, "eagle", eagle, 4, tree)
    drawn, propose = [], engine.speculation.proposer.propose

    def noted(*arguments):
        drafts = propose(*arguments)
        drawn.extend(token for draft in drafts for token in draft.tokens if token >= 0)
        return drafts

    engine.speculation.proposer.propose = noted
    wish = SamplingParams(max_tokens=20, temperature=1.0, top_k=1, seed=1, detokenize=False)
    engine.add_request("a", [1, 2, 3, 4], wish)
    while engine.has_unfinished_requests:
        [output] = engine.step()
    assert engine.speculation.counts.drafted == output.metrics.speculation.drafted == len(drawn) > 0


def test_a_draft_with_a_shorter_context_reads_as_much_of_a_table_as_it_may():
    graphs = SimpleNamespace(max_model_len=LONGEST, pool=SimpleNamespace(block_size=4))
    longer, shorter = list(range(1, LONGEST // 4 + 2)), [7, 8]
    table = DecodeGraphs.table_of(graphs, [longer, shorter], 3)
    assert table.dtype == torch.int32 and table.shape == (3, LONGEST // 4)
    assert table[0].tolist() == longer[:-1]
    assert table[1].tolist() == [7, 8, *[0] * (LONGEST // 4 - 2)] and not table[2].any()


@pytest.mark.parametrize("method", [None, "ngram", "draft"])
def test_a_grammar_that_fails_is_said_whichever_asked_for_the_mask_first(method, monkeypatch):
    monkeypatch.setattr(matcher_module, "MOST_ITEMS", 200)
    drafts = dict(method=method, num_speculative_tokens=3)
    if method == "draft":
        drafts["model"] = "models/tiny-draft"
    arguments = dict(speculative_config=drafts) if method else {}
    small = LLM("models/tiny", max_num_seqs=2, num_gpu_blocks_override=20, **arguments)
    grammar = StructuredOutputsParams(grammar='root ::= x "b"\nx ::= x x x | "a" | ""')
    wish = dict(max_tokens=40, min_tokens=30, structured_outputs=grammar)
    failed = answer(small, "a" * 40, **wish)
    assert failed.finish_reason == "abort" and "too ambiguous" in failed.stop_reason
