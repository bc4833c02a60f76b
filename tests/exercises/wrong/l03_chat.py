"""Wrong answers to exercise 3.4, a chat that keeps its cache; l03.py registers them."""

from functools import partial

from lessons.l03_kv_cache.batch import new_batch


def slipped_chat(
    model,
    cache,
    turns,
    max_new_tokens,
    stop_token_ids,
    *,
    restart=False,
    forget=False,
    again=False,
    everything=False,
    from_0=False,
    late=0,
    twice=False,
    drop_stop=False,
    never_stops=False,
    stops_at="any",
    flat=False,
    one_more=False,
    first_row=False,
    flush=False,
):
    """The chat loop with some slips, spelled by switches."""
    answers, left_over, told, held = [], [], [], 0
    for turn in turns:
        answer = []
        new = (told if everything else [] if forget else left_over) + turn
        if restart or from_0:
            held = 0
        told = told + turn
        while len(answer) < max_new_tokens + one_more:
            batch = new_batch([(new, held + late)], cache.block_size)
            hidden = model(batch.tokens, cache.attending(batch))
            held += len(new)
            row = hidden if flat else hidden[:1] if first_row else hidden[-1:]
            token = int(model.logits(row).argmax())
            if drop_stop and token in stop_token_ids:
                break
            answer.append(token)
            new = list(answer) if again else [new[-1], token] if twice else [token]
            stop = stop_token_ids if stops_at == "any" else sorted(stop_token_ids)[:1]
            if token in stop and not never_stops:
                break
        if flush:
            batch = new_batch([(new, held)], cache.block_size)
            model(batch.tokens, cache.attending(batch))
            held += len(new)
        answers.append(answer)
        left_over, told = ([] if flush else answer[-1:]), told + answer
    return answers


# One slip before several, because a hint for several would be wrong where only one shows.
SLIPS = [
    (
        "first_stop_token",
        dict(stops_at="first"),
        "Only one of stop_token_ids ends your answer. Any of them does.",
    ),
    (
        "argmax_of_all_rows",
        dict(flat=True),
        "argmax over all rows at once. Which row predicts the next token?",
    ),
    (
        "positions_restart",
        dict(restart=True),
        "The second turn starts at position 0 again. How many does the cache hold?",
    ),
    (
        "last_token_forgotten",
        dict(forget=True),
        "An answer's last token never enters the cache. The next turn has to bring it.",
    ),
    (
        "whole_answer_again",
        dict(again=True),
        "Each pass feeds the whole answer so far: its older tokens are in the cache.",
    ),
    (
        "whole_chat_again",
        dict(everything=True),
        "Each turn feeds the whole conversation again, on top of what the cache holds.",
    ),
    (
        "runs_the_chat_again",
        dict(everything=True, from_0=True),
        "Your answers are right, and each turn runs the whole conversation again.",
    ),
    (
        "positions_off_by_one",
        dict(late=1),
        "Your positions are one too high: the next token comes after those held.",
    ),
    (
        "last_token_twice",
        dict(twice=True),
        "Each pass feeds the token before the new one again: it is in the cache already.",
    ),
    (
        "drops_stop_token",
        dict(drop_stop=True),
        "The stop token belongs to the answer: append it, then break.",
    ),
    ("never_stops", dict(never_stops=True), "A stop token does not end your answers."),
    ("one_too_many", dict(one_more=True), "Your answers have one token more than max_new_tokens."),
    (
        "first_row",
        dict(first_row=True),
        "You read the first row's logits. Which row predicts the next token?",
    ),
    (
        "runs_the_last_token",
        dict(flush=True),
        "You run every answer's last token at once: the very last one for nothing.",
    ),
    (
        "two_bugs_left_token",
        dict(restart=True, again=True),
        "Two bugs are left: the positions, and what each pass feeds.",
    ),
    (
        "two_bugs_left_positions",
        dict(forget=True, again=True),
        "Two bugs are left: a token forgotten, and one fed again.",
    ),
    (
        "two_bugs_left_answer",
        dict(restart=True, forget=True),
        "Two bugs are left, both where a new turn begins.",
    ),
    (
        "as_given",
        dict(restart=True, forget=True, again=True),
        "All three bugs are there. Write down the passes of the example.",
    ),
]


def add_to(answers):
    """Register the wrong answers and another right one."""
    for name, slip, hint in SLIPS:
        answers.wrong("3.4", hint, name)(partial(slipped_chat, **slip))
    answers.alternative("3.4")(by_what_the_cache_lacks)


def by_what_the_cache_lacks(model, cache, turns, max_new_tokens, stop_token_ids):
    told, held, answers = [], 0, []
    for turn in turns:
        told, answers = told + turn, [*answers, []]
        while len(answers[-1]) < max_new_tokens and not set(answers[-1]) & stop_token_ids:
            batch = new_batch([(told[held:], held)], cache.block_size)
            hidden = model(batch.tokens, cache.attending(batch))
            held = len(told)
            told = [*told, int(model.logits(hidden)[-1].argmax())]
            answers[-1].append(told[-1])
    return answers
