"""Wrong answers to lesson 24's exercises: slips of published engines and libraries of structured
outputs, and the hint for each.
"""

from functools import partial

import numpy as np
import torch

from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 24.1 masks


def after(matcher, state, text, known=None):
    """The state after some bytes; known: of beginnings that were met before."""
    known = {} if known is None else known
    at = state
    for end in range(1, len(text) + 1):
        if text[:end] not in known:
            known[text[:end]] = matcher.step(at, text[end - 1])
        at = known[text[:end]]
        if at is None:
            return None
    return at


def in_words(allowed, *, size=32, reverse=False, words=None):
    count = -(-len(allowed) // size) if words is None else words
    numbers = [0] * count
    for token, is_allowed in enumerate(allowed):
        if is_allowed and token // size < count:
            bit = size - 1 - token % size if reverse else token % size
            numbers[token // size] |= 1 << bit
    numbers = [n - 2**32 if n >= 2**31 else n for n in numbers]
    return torch.tensor(numbers, dtype=torch.int32)


def slipped_mask(matcher, state, tokens, *, rule, empty=False, special=False, **words):
    """token_mask with one slip. rule: (matcher, state, token, known) -> whether it is allowed."""
    known = {}
    allowed = [
        special if token is None else empty if not token else rule(matcher, state, token, known)
        for token in tokens
    ]
    return in_words(allowed, **words)


def fits(matcher, state, token, known):
    return after(matcher, state, token, known) is not None


def first_byte(matcher, state, token, known):
    return after(matcher, state, token[:1], known) is not None


def last_byte(matcher, state, token, known):
    return after(matcher, state, token[-1:], known) is not None


def each_byte_alone(matcher, state, token, known):
    return all(after(matcher, state, bytes([byte]), known) is not None for byte in token)


def skips_what_does_not_fit(matcher, state, token, known):
    at, found = state, False
    for byte in token:
        target = matcher.step(at, byte)
        if target is not None:
            at, found = target, True
    return found


def must_go_on(matcher, state, token, known):
    """Only tokens after which some byte fits."""
    at = after(matcher, state, token, known)
    return at is not None and any(matcher.step(at, byte) is not None for byte in range(256))


def without_memory(matcher, state, token, known):
    return after(matcher, state, token) is not None


def dead_states_not_kept(matcher, state, token, known):
    """Remembers what fits, and asks again for what does not."""
    at = state
    for end in range(1, len(token) + 1):
        target = known.get(token[:end])
        if target is None:
            target = matcher.step(at, token[end - 1])
        if target is None:
            return False
        at = known[token[:end]] = target
    return True


def truth_of_a_state(matcher, state, token, known):
    """A state may be 0."""
    at = state
    for end in range(1, len(token) + 1):
        if token[:end] not in known:
            known[token[:end]] = matcher.step(at, token[end - 1])
        at = known[token[:end]]
        if not at:
            return False
    return True


def truth_of_a_state_on_the_way(matcher, state, token, known):
    """Asked in front of each byte: of the first state too, and not of the last."""
    if not state or not truth_of_a_state(matcher, state, token[:-1], known):
        return False
    return fits(matcher, state, token, known)


def memory_by_place(matcher, state, token, known):
    """Remembers a byte at its place, whatever came before it."""
    at = state
    for place in enumerate(token):
        if place not in known:
            known[place] = matcher.step(at, place[1])
        at = known[place]
        if at is None:
            return False
    return True


def memory_of_whole_tokens(matcher, state, token, known):
    if token not in known:
        known[token] = after(matcher, state, token)
    return known[token] is not None


for name, slip, hint in [
    ("first_byte_alone", dict(rule=first_byte), "All bytes of a token must fit, not the first."),
    ("last_byte_alone", dict(rule=last_byte), "All bytes of a token must fit, not the last."),
    (
        "every_byte_from_the_start",
        dict(rule=each_byte_alone),
        "A byte is read in the state after the byte before it, not in the first state.",
    ),
    (
        "skips_bytes",
        dict(rule=skips_what_does_not_fit),
        "A byte that does not fit ends the token: it must not be skipped.",
    ),
    (
        "must_go_on",
        dict(rule=must_go_on),
        "You ask for a byte that fits after the token; the text may well end there.",
    ),
    (
        "token_by_token",
        dict(rule=without_memory),
        "The mask is right, but each token is read from its first byte: share the beginnings.",
    ),
    (
        "dead_ends_forgotten",
        dict(rule=dead_states_not_kept),
        "Keep the beginnings that do not fit as well, or you ask for them again and again.",
    ),
    (
        "truth_of_a_state",
        dict(rule=truth_of_a_state),
        "A state may be 0, which is false in Python: ask `is None`.",
    ),
    (
        "truth_of_a_state_on_the_way",
        dict(rule=truth_of_a_state_on_the_way),
        "A state may be 0, which is false in Python: ask `is None`.",
    ),
    (
        "remembered_by_place",
        dict(rule=memory_by_place),
        "What follows depends on all bytes before it, not on the place: key the whole beginning.",
    ),
    (
        "whole_tokens_remembered",
        dict(rule=memory_of_whole_tokens),
        "Two tokens are rarely equal. It is their beginnings that they share.",
    ),
    (
        "empty_token_allowed",
        dict(rule=fits, empty=True),
        "A token without bytes adds nothing: with it the model could stand still for ever.",
    ),
    (
        "special_tokens_allowed",
        dict(rule=fits, special=True),
        "None is a token that is no text: it never fits a grammar.",
    ),
    (
        "highest_bit_first",
        dict(rule=fits, reverse=True),
        "Token 0 is the lowest bit of word 0, not the highest.",
    ),
    ("sixteen_bits", dict(rule=fits, size=16), "A word has 32 bits."),
]:
    answers.wrong("24.1", hint, name)(partial(slipped_mask, **slip))


@answers.wrong("24.1", "The last word is missing: V / 32 is rounded up.")
def last_word_missing(matcher, state, tokens):
    return slipped_mask(matcher, state, tokens, rule=fits, words=len(tokens) // 32)


@answers.wrong("24.1", "You allow what is forbidden: a bit of 1 allows its token.")
def turned_round(matcher, state, tokens):
    known = {}
    return in_words([not (t and fits(matcher, state, t, known)) for t in tokens])


@answers.wrong("24.1", "Bits of a word are 2⁰ to 2³¹: bit 31 got lost.")
def without_the_sign(matcher, state, tokens):
    return slipped_mask(matcher, state, tokens, rule=fits) & (2**31 - 1)


@answers.wrong("24.1", "Bits after the last token mean no token: they are 0.")
def padded_with_ones(matcher, state, tokens):
    mask = slipped_mask(matcher, state, tokens, rule=fits)
    if len(tokens) % 32:
        mask[-1] |= -1 << len(tokens) % 32
    return mask


@answers.wrong("24.1", "The words are int32: bit 31 makes them negative, not large.")
def words_of_64_bits(matcher, state, tokens):
    return slipped_mask(matcher, state, tokens, rule=fits).long() % 2**32


@answers.wrong(
    "24.1", "There is a word too many: V / 32 is rounded up, and 64 tokens are two words."
)
def always_one_word_more(matcher, state, tokens):
    return slipped_mask(matcher, state, tokens, rule=fits, words=len(tokens) // 32 + 1)


@answers.wrong(
    "24.1", "What you keep belongs to one state: from another one the same bytes differ."
)
def kept_from_call_to_call(matcher, state, tokens):
    known = vars(matcher).setdefault("known", {})
    return in_words([bool(t) and after(matcher, state, t, known) is not None for t in tokens])


@answers.wrong("24.1", "The mask is int32, 32 tokens in a word; yours are booleans.")
def booleans(matcher, state, tokens):
    known = {}
    return torch.tensor([bool(t) and fits(matcher, state, t, known) for t in tokens])


@answers.alternative("24.1")
def by_a_trie(matcher, state, tokens):
    """A trie of dictionaries, walked from its root."""
    root = {}
    for number, token in enumerate(tokens):
        node = root
        for byte in token or b"":
            node = node.setdefault(byte, {})
        if token:
            node.setdefault("tokens", []).append(number)
    bits = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
    stack = [(root, state)]
    while stack:
        node, at = stack.pop()
        bits[node.get("tokens", [])] = 1
        for byte, child in node.items():
            if byte != "tokens":
                target = matcher.step(at, byte)
                if target is not None:
                    stack.append((child, target))
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


@answers.alternative("24.1")
def sorted_with_a_stack(matcher, state, tokens):
    """Sorted tokens: what two neighbours share stays on a stack."""
    allowed, states, before = [False] * len(tokens), [state], b""
    for number in sorted((n for n, t in enumerate(tokens) if t), key=lambda n: tokens[n]):
        token, shared = tokens[number], 0
        while shared < min(len(token), len(before)) and token[shared] == before[shared]:
            shared += 1
        del states[shared + 1 :]
        for byte in token[len(states) - 1 :]:
            states.append(None if states[-1] is None else matcher.step(states[-1], byte))
        allowed[number] = states[-1] is not None
        before = token
    return in_words(allowed)


@answers.alternative("24.1")
def remembered_by_state_and_byte(matcher, state, tokens):
    """What a state does with a byte is the same wherever it comes up: fewer steps still."""
    known, allowed = {}, []
    for token in tokens:
        at = state
        for byte in token or b"":
            if (at, byte) not in known:
                known[at, byte] = matcher.step(at, byte)
            at = known[at, byte]
            if at is None:
                break
        allowed.append(bool(token) and at is not None)
    return in_words(allowed)


# ---------------------------------------------------------------- 24.2 probabilities


def walked(model, allowed, step, text=(), masked=1.0, free=1.0):
    """(text, with a mask, without one) of each text that has ended, not yet divided.

    step: (chances, allowed tokens, token, text so far) -> the factors of both.
    """
    tokens = allowed(text)
    if not tokens:
        yield text, masked, free
        return
    chances = model(text)
    for token in tokens:
        a, b = step(chances, tokens, token, text)
        yield from walked(model, allowed, step, (*text, token), masked * a, free * b)


def right_step(chances, tokens, token, text):
    return chances[token] / sum(chances[t] for t in tokens), chances[token]


def not_divided(chances, tokens, token, text):
    return chances[token], chances[token]


def evenly(chances, tokens, token, text):
    return 1 / len(tokens), chances[token]


def first_step_alone(chances, tokens, token, text):
    left = 1.0 if text else sum(chances[t] for t in tokens)
    return chances[token] / left, chances[token]


def largest_wins(chances, tokens, token, text):
    return float(token == max(tokens, key=lambda t: chances[t])), chances[token]


def allowed_only(chances, tokens, token, text):
    """The probability of what is allowed, in place of the token's own."""
    left = sum(chances[t] for t in tokens)
    return chances[token] / left, left


def shares(found):
    kept = sum(free for *_, free in found)
    return {text: (masked, free / kept) for text, masked, free in found}


def slipped_chances(model, allowed, *, step=right_step, change=shares):
    return change(list(walked(model, allowed, step)))


def with_shares_twice(found):
    return {text: (share, share) for text, (_, share) in shares(found).items()}


def with_masks_twice(found):
    return {text: (masked, masked) for text, masked, _ in found}


def swapped(found):
    return {text: (share, masked) for text, (masked, share) in shares(found).items()}


def never_thrown_away(found):
    return {text: (masked, free) for text, masked, free in found}


def per_text(found):
    return {text: (masked, free / len(found)) for text, masked, free in found}


for name, slip, hint in [
    (
        "not_divided_at_each_step",
        dict(step=not_divided),
        "After the mask the softmax is taken of what is left, so each step divides by its sum.",
    ),
    (
        "divided_once_at_the_end",
        dict(change=with_shares_twice),
        "You divide once, at the end, in both columns. A mask divides at each step.",
    ),
    (
        "divided_at_each_step_in_both",
        dict(change=with_masks_twice),
        "A model that samples freely knows no mask: divide once, at the end, by what fits.",
    ),
    ("columns_swapped", dict(change=swapped), "The chance with a mask comes first."),
    (
        "answers_that_do_not_fit_are_counted",
        dict(change=never_thrown_away),
        "Answers that do not fit are thrown away: divide by the sum over those that fit.",
    ),
    (
        "mean_over_the_texts",
        dict(change=per_text),
        "Divide by the probability of all texts that fit, not by their number.",
    ),
    (
        "allowed_tokens_equally_likely",
        dict(step=evenly),
        "A mask leaves the order of what is allowed: tokens do not become equally likely.",
    ),
    (
        "only_the_first_step_is_masked",
        dict(step=first_step_alone),
        "The mask is applied before every step, not before the first alone.",
    ),
    ("greedy", dict(step=largest_wins), "Sampling takes a less likely token now and then, too."),
    (
        "any_allowed_token_counts",
        dict(step=allowed_only),
        "A text needs its own token at each step, not any one that is allowed.",
    ),
]:
    answers.wrong("24.2", hint, name)(partial(slipped_chances, **slip))


@answers.wrong("24.2", "What comes next depends on the whole text so far, not on the last token.")
def last_token_alone(model, allowed):
    seen = {}

    def by_last(text):
        return seen.setdefault(text[-1:], model(text))

    return slipped_chances(by_last, allowed)


@answers.wrong(
    "24.2", "A text that could end has ended: texts that go on are not among the answers."
)
def beginnings_too(model, allowed):
    found, waiting = [], [((), 1.0, 1.0)]
    while waiting:
        text, masked, free = waiting.pop()
        found.append((text, masked, free))
        tokens = allowed(text)
        for token in tokens:
            a, b = right_step(model(text), tokens, token, text)
            waiting.append(((*text, token), masked * a, free * b))
    return shares(found)


@answers.wrong("24.2", "The empty text may be the only one that fits: it has ended at once.")
def empty_text_forgotten(model, allowed):
    return {text: both for text, both in slipped_chances(model, allowed).items() if text}


@answers.alternative("24.2")
def by_recursion(model, allowed):
    return slipped_chances(model, allowed)


@answers.alternative("24.2")
def level_by_level_in_logarithms(model, allowed):
    """Sums of logarithms; all texts of a length together."""
    level, ended = {(): (0.0, 0.0)}, {}
    while level:
        longer = {}
        for text, (masked, free) in level.items():
            tokens = list(allowed(text))
            if not tokens:
                ended[text] = masked, free
                continue
            logs = np.log(np.asarray(model(text))[tokens])
            total = np.logaddexp.reduce(logs)
            for token, log in zip(tokens, logs):
                longer[(*text, token)] = masked + log - total, free + log
        level = longer
    kept = np.logaddexp.reduce([free for _, free in ended.values()])
    return {t: (float(np.exp(a)), float(np.exp(b - kept))) for t, (a, b) in ended.items()}
