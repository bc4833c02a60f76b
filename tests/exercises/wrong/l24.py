"""Wrong answers to lesson 24's exercises: slips of published engines and libraries of structured
outputs, and the hint for each.
"""

import numpy as np
import torch

from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 24.1 masks

answers.slips(
    "24.1",
    """
    first_byte_alone: All bytes of a token must fit, not the first.
    - before = b""
    + token, before = (token or b"")[:1], b""

    last_byte_alone: All bytes of a token must fit, not the last.
    - before = b""
    + token, before = (token or b"")[-1:], b""

    every_byte_from_the_start: A byte is read in the state after the byte before it, not in the
        first state.
    - matcher.step(found[before]
    + matcher.step(state

    skips_bytes: A byte that does not fit ends the token: it must not be skipped.
    - found[text] = matcher.step(found[before], token[end - 1])
    + target = matcher.step(found[before], token[end - 1])
    + found[text] = found[before] if target is None else target

    must_go_on: You ask for a byte that fits after the token; the text may well end there.
    - allowed.append(bool(token) and before == token and found[before] is not None)
    + at = found[before]
    + goes_on = at is not None and any(matcher.step(at, byte) is not None for byte in range(256))
    + allowed.append(bool(token) and before == token and goes_on)

    token_by_token: The mask is right, but each token is read from its first byte: share the
        beginnings.
    - if text not in found:
    -     found[text] = matcher
    + found[text] = matcher

    dead_ends_forgotten: Keep the beginnings that do not fit as well, or you ask for them again and
        again.
    - if text not in found:
    + if found.get(text) is None:

    truth_of_a_state: A state may be 0, which is false in Python: ask `is None`.
    - and found[before] is not None
    + and bool(found[before])

    truth_of_a_state_on_the_way: A state may be 0, which is false in Python: ask `is None`.
    - if found[before] is None:
    + if not found[before]:

    remembered_by_place: What follows depends on all bytes before it, not on the place: key the
        whole beginning.
    - text = token[:end]
    + text = end, token[end - 1]
    - before == token and

    whole_tokens_remembered: Two tokens are rarely equal. It is their beginnings that they share.
    - text = token[:end]
    + text = token, end
    - before == token and

    empty_token_allowed: A token without bytes adds nothing: with it the model could stand still for
        ever.
    - bool(token) and
    + token is not None and

    special_tokens_allowed: None is a token that is no text: it never fits a grammar.
    - bool(token) and before == token
    + token != b"" and before == (token or b"")

    highest_bit_first: Token 0 is the lowest bit of word 0, not the highest.
    - np.uint32(token % 32)
    + np.uint32(31 - token % 32)

    sixteen_bits: A word has 32 bits.
    - -(-len(tokens) // 32)
    + -(-len(tokens) // 16)
    - words[token // 32] |= np.uint32(is_allowed) << np.uint32(token % 32)
    + words[token // 16] |= np.uint32(is_allowed) << np.uint32(token % 16)

    last_word_missing: The last word is missing: V / 32 is rounded up.
    - return torch.from_numpy(words.view(np.int32))
    + return torch.from_numpy(words.view(np.int32))[: len(tokens) // 32]

    turned_round: You allow what is forbidden: a bit of 1 allows its token.
    - np.uint32(is_allowed)
    + np.uint32(not is_allowed)

    without_the_sign: Bits of a word are 2⁰ to 2³¹: bit 31 got lost.
    - return torch.from_numpy(words.view(np.int32))
    + return torch.from_numpy(words.view(np.int32)) & (2**31 - 1)

    padded_with_ones: Bits after the last token mean no token: they are 0.
    - return torch
    + if len(tokens) % 32:
    +     words[-1] |= np.uint32(2**32 - 2 ** (len(tokens) % 32))
    + return torch

    words_of_64_bits: The words are int32: bit 31 makes them negative, not large.
    - words.view(np.int32)
    + words.astype(np.int64)

    always_one_word_more: There is a word too many: V / 32 is rounded up, and 64 tokens are two
        words.
    - -(-len(tokens) // 32)
    + len(tokens) // 32 + 1

    kept_from_call_to_call: What you keep belongs to one state: from another one the same bytes
        differ.
    - found: dict[bytes, State | None] = {b"": state}
    + found = vars(matcher).setdefault("found", {})
    + found[b""] = state

    booleans: The mask is int32, 32 tokens in a word; yours are booleans.
    - return torch.from_numpy(words.view(np.int32))
    + return torch.tensor(allowed)
    """,
)


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


def in_words(allowed):
    """int32 words of 32 tokens each."""
    numbers = [0] * -(-len(allowed) // 32)
    for token, is_allowed in enumerate(allowed):
        numbers[token // 32] |= is_allowed << token % 32
    signed = [n - 2**32 if n >= 2**31 else n for n in numbers]
    return torch.tensor(signed, dtype=torch.int32)


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

answers.slips(
    "24.2",
    """
    not_divided_at_each_step: After the mask the softmax is taken of what is left, so each step
        divides by its sum.
    - masked * chance / left
    + masked * chance

    divided_once_at_the_end: You divide once, at the end, in both columns. A mask divides at each
        step.
    - (masked, free / kept)
    + (free / kept, free / kept)

    divided_at_each_step_in_both: A model that samples freely knows no mask: divide once, at the
        end, by what fits.
    - (masked, free / kept)
    + (masked, masked)

    columns_swapped: The chance with a mask comes first.
    - (masked, free / kept)
    + (free / kept, masked)

    answers_that_do_not_fit_are_counted: Answers that do not fit are thrown away: divide by the sum
        over those that fit.
    - (masked, free / kept)
    + (masked, free)

    mean_over_the_texts: Divide by the probability of all texts that fit, not by their number.
    - free / kept
    + free / len(ended)

    allowed_tokens_equally_likely: A mask leaves the order of what is allowed: tokens do not become
        equally likely.
    - masked * chance / left
    + masked / len(tokens)

    only_the_first_step_is_masked: The mask is applied before every step, not before the first
        alone.
    - left = sum(chances[token] for token in tokens)
    + left = 1.0 if text else sum(chances[token] for token in tokens)

    greedy: Sampling takes a less likely token now and then, too.
    - masked * chance / left
    + masked * (token == max(tokens, key=lambda other: chances[other]))

    any_allowed_token_counts: A text needs its own token at each step, not any one that is allowed.
    - free * chance)
    + free * left)

    last_token_alone: What comes next depends on the whole text so far, not on the last token.
    - ended: dict[Text, tuple[float, float]] = {}
    + ended, seen = {}, {}
    - chances = model(text)
    + chances = seen.setdefault(text[-1:], model(text))

    beginnings_too: A text that could end has ended: texts that go on are not among the answers.
    - if not tokens:
    -     ended[text] = masked, free
    -     continue
    + ended[text] = masked, free
    + if not tokens:
    +     continue

    empty_text_forgotten: The empty text may be the only one that fits: it has ended at once.
    - in ended.items()
    + in ended.items() if text
    """,
)


@answers.alternative("24.2")
def by_recursion(model, allowed):
    def longer(text, masked, free):
        tokens = allowed(text)
        if not tokens:
            return {text: (masked, free)}
        chances, found = model(text), {}
        left = sum(chances[token] for token in tokens)
        for token in tokens:
            chance = chances[token]
            found |= longer((*text, token), masked * chance / left, free * chance)
        return found

    found = longer((), 1.0, 1.0)
    kept = sum(free for _, free in found.values())
    return {text: (masked, free / kept) for text, (masked, free) in found.items()}


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
