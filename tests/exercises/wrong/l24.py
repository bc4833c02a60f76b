"""Wrong answers to lesson 24's exercises: slips of published engines and libraries of structured
outputs, and the hint for each.
"""

import numpy as np
import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

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

    remembered_by_the_end: What follows depends on all bytes before it, not on the last two: key the
        whole beginning.
    - text = token[:end]
    + text = token[:end][-2:]
    - before == token and
    + before == token[-2:] and

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

    lists_for_tuples: Each text has a tuple: (with a mask, without one).
    - {text: (masked, free / kept) for text
    + {text: [masked, free / kept] for text

    probabilities_set_to_zero: The list is the model's own. Work on a copy, or sum over what is
        allowed.
    - chances = model(text)
    + chances = model(text)
    + for other in set(range(len(chances))) - set(tokens):
    +     chances[other] = 0.0

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


# ---------------------------------------------------------------- 24.3 kernel and wrapper

answers.slips(
    "24.3",
    """
    allowed_forbidden: A bit of 1 is an allowed token. You forbid these.
    - & 1) == 0
    + & 1) == 1

    bits_from_the_left: Bit t % 32 counts from the lowest: shift right by t % 32.
    - (word >> (token % 32))
    + (word >> (31 - token % 32))

    sign_kept: The shift keeps the sign of the word: take one bit of it with & 1.
    - ((word >> (token % 32)) & 1) == 0
    + (word >> (token % 32)) == 0

    byte_words: A word has 32 tokens, not 8.
    - token // 32 * stride_word
    + token // 8 * stride_word

    stores_all_of_the_block: The last block has lanes that are no token: mask the store by V.
    - mask=is_token & is_forbidden
    + mask=is_forbidden

    no_mask_of_the_words: The last block asks for words that do not exist: mask the load by V.
    - token // 32 * stride_word, mask=is_token)
    + token // 32 * stride_word)

    first_block_alone: Tokens after the first block stay allowed: a program begins at
        program_id(1) · BLOCK.
    - token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    + token = tl.arange(0, BLOCK)

    one_block_a_row: One program takes BLOCK tokens, so a row needs ceil(V / BLOCK) programs.
    - triton.cdiv(vocab_size, block)](
    + 1](

    first_row_alone: Each row has words of its own: row · stride_words.
    - words_ptr + row * stride_words
    + words_ptr

    dense_rows: A row of logits need not begin V after the one before: use its stride.
    - logits_ptr + row * stride_row
    + logits_ptr + row * vocab_size

    dense_tokens: Two tokens of a row may be apart: use the stride between tokens.
    - token.to(tl.int64) * stride_token
    + token.to(tl.int64)

    dense_words: Two words of a row may be apart: use the stride between words.
    - token // 32 * stride_word, mask
    + token // 32, mask

    strides_of_logits: You read the words with the strides of the logits.
    - *words.stride(),
    + *logits.stride(),

    copied: contiguous() makes a copy, and the logits that were given stay as they were.
    - batch, vocab_size = logits.shape
    + batch, vocab_size = logits.shape
    + logits = logits.contiguous()

    copied_words: contiguous() copies the words. Read them by their strides.
    - batch, vocab_size = logits.shape
    + batch, vocab_size = logits.shape
    + words = words.contiguous()

    large_number: A large negative number is no −inf, and float16 does not have it.
    - float("-inf")
    + -60000.0

    reads_the_logits: An allowed logit need not be loaded and stored again: mask the store.
    - lowest = tl.full((BLOCK,), float("-inf"), logits_ptr.dtype.element_ty)
    - tl.store(place, lowest, mask=is_token & is_forbidden)
    + old = tl.load(place, mask=is_token)
    + tl.store(place, tl.where(is_forbidden, float("-inf"), old), mask=is_token)

    rows_in_32_bits: Row · stride may be more than 2³¹: make the row int64 before you multiply.
    - tl.program_id(0).to(tl.int64)
    + tl.program_id(0)

    words_in_32_bits: Row · stride_words may be more than 2³¹, too: keep the row in 64 bits.
    - words_ptr + row * stride_words
    + words_ptr + row.to(tl.int32) * stride_words

    tokens_in_32_bits: Token · stride may be more than 2³¹: make the token int64 before you
        multiply.
    - token.to(tl.int64) * stride_token
    + token * stride_token

    only_the_sign_is_negative: Bit 31 makes the word negative: ask whether the bit is 0, not whether
        the number is above it.
    - ((word >> (token % 32)) & 1) == 0
    + (word & (1 << (token % 32))) <= 0

    words_of_a_larger_batch: Words of another shape are those of other logits: refuse more of them
        as well.
    - words.shape != shape
    + words.dim() != 2 or words.shape[0] < batch or words.shape[1] < shape[1]

    float64_too: The docstring names three dtypes. Refuse float64.
    - logits.dtype not in (torch.float32, torch.float16, torch.bfloat16)
    + not logits.is_floating_point()

    as_many_words_pass: As many words in another shape are other tokens' words: compare the shape.
    - words.shape != shape
    + words.numel() != shape[0] * shape[1]

    not_looked_at_when_empty: Refuse what does not fit also where nothing is to be done: look at the
        arguments first.
    - if logits.dim() != 2
    + if logits.numel() == 0:
    +     return
    + if logits.dim() != 2

    returned_when_empty: The logits are changed in place. Return None, also if there are none.
    - if batch and vocab_size:
    + if not batch or not vocab_size:
    +     return logits
    + if batch and vocab_size:

    launches_for_nothing: A grid of size 0 is an error on a GPU: return before it.
    - if batch and vocab_size:
    + if True:

    rows_in_the_second_size: The second size of a grid ends at 65535: put the rows into the first.
    - row = tl.program_id(0).to(tl.int64)
    - token = tl.program_id(1) * BLOCK
    + row = tl.program_id(1).to(tl.int64)
    + token = tl.program_id(0) * BLOCK
    - forbid_kernel[batch, triton.cdiv(vocab_size, block)](
    + forbid_kernel[triton.cdiv(vocab_size, block), batch](

    a_row_is_a_block: A block of the whole vocabulary does not fit the registers: take at most 4096.
    - block = 1024
    + block = max(128, triton.next_power_of_2(vocab_size))
    - num_warps=4,
    + num_warps=max(1, min(32, block // 256)),

    launches_row_by_row: One launch does all rows: the row is program_id(0).
    - forbid_kernel[batch, triton.cdiv(vocab_size, block)](
    -     logits,
    -     words,
    -     vocab_size,
    -     *logits.stride(),
    -     *words.stride(),
    -     BLOCK=block,
    -     num_warps=4,
    - )
    + for own, word in zip(logits[:3, None], words[:, None]):
    +     forbid_kernel[1, triton.cdiv(vocab_size, block)](
    +         own, word, vocab_size, *own.stride(), *word.stride(), BLOCK=block, num_warps=4
    +     )

    warps_left_out: Without num_warps the launch takes 4, whatever the block is. Say it.
    - BLOCK=block,
    - num_warps=4,
    + BLOCK=block,

    too_many_warps: With 32 warps each lane has one token of 1024. Fewer warps, more for each lane.
    - num_warps=4,
    + num_warps=32,

    any_dtype: Logits of integers have no −inf: refuse them.
    - or logits.dtype not in (torch.float32, torch.float16, torch.bfloat16)
    +

    any_dimensions: Logits that are no [B, V] have to be refused with a message of yours.
    - if logits.dim() != 2 or logits.dtype
    + if logits.dtype

    any_words: Words of another dtype are other bits: refuse them.
    - if words.dtype != torch.int32 or words.shape != shape:
    + if words.shape != shape:

    any_number_of_words: If a row has too few words, the kernel reads the next row's: refuse it.
    - or words.shape != shape:
    + or words.shape[0] != batch:

    any_number_of_rows: If there are fewer rows of words than of logits, the kernel reads what comes
        after them: refuse it.
    - or words.shape != shape:
    + or words.shape[1] != shape[1]:

    nameless: The message has to name the argument and what was given.
    - f"words: got {words.dtype} {list(words.shape)}; accepted: torch.int32 {list(shape)}"
    + "wrong words"

    refuses_too_late: Check before you launch: what is refused has to be as it was.
    - if words.dtype != torch.int32 or words.shape != shape:
    + logits[0] = 0
    + if words.dtype != torch.int32 or words.shape != shape:
    """,
)


def in_pytorch(logits, words):
    vocab_size = logits.shape[1]
    token = torch.arange(vocab_size)
    logits.masked_fill_((words[:, token // 32] >> (token % 32)) & 1 == 0, -torch.inf)


attacks(answers, "24.3", in_pytorch)


@triton.jit
def by_words_kernel(
    logits_ptr, words_ptr, V, row_step, step, words_step, word_step, BLOCK: tl.constexpr
):
    """A tile [BLOCK / 32 words, 32 bits]; each word is loaded once."""
    row = (tl.program_id(0) // tl.cdiv(V, BLOCK)).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) % tl.cdiv(V, BLOCK) * (BLOCK // 32)
    word, bit = first + tl.arange(0, BLOCK // 32), tl.arange(0, 32)
    bits = tl.load(words_ptr + row * words_step + word * word_step, mask=word * 32 < V, other=-1)
    token = word[:, None] * 32 + bits_of(bit)
    lowest = tl.zeros((BLOCK // 32, 32), tl.float32) - float("inf")
    tl.store(
        logits_ptr + row * row_step + token * step,
        lowest,
        mask=(token < V) & ((bits[:, None] & (1 << bits_of(bit))) == 0),
    )


@triton.jit
def bits_of(bit):
    return bit[None, :]


@answers.alternative("24.3")
def word_by_word(logits, words):
    """A grid of one dimension, a block as long as the row is, up to 2048."""
    if logits.ndim != 2 or logits.dtype not in (torch.float32, torch.half, torch.bfloat16):
        raise ValueError(f"logits must be [B, V] floats, not {tuple(logits.shape)}, {logits.dtype}")
    batch, size = logits.shape
    if words.shape != (batch, -(-size // 32)) or words.dtype is not torch.int32:
        raise ValueError(f"words must fit {batch, size}: {tuple(words.shape)}, {words.dtype}")
    block = min(2048, max(128, triton.next_power_of_2(size)))
    steps = *logits.stride(), *words.stride()
    if logits.numel() > 0:
        by_words_kernel[(batch * triton.cdiv(size, block),)](
            logits, words, size, *steps, BLOCK=block, num_warps=max(1, block // 256)
        )


@answers.alternative("24.3")
def tokens_first(logits, words):
    """Programs of a row one after the other, and a launch that computes its grid."""
    if logits.dtype not in {torch.float16, torch.bfloat16, torch.float32} or logits.dim() != 2:
        raise ValueError(f"logits: {logits.dtype}, {list(logits.shape)}")
    if words.dtype != torch.int32 or list(words.shape) != [
        len(logits),
        (logits.shape[1] + 31) // 32,
    ]:
        raise ValueError(f"words: {words.dtype}, {list(words.shape)}")
    if 0 in logits.shape:
        return
    by_words_kernel[lambda meta: (len(logits) * triton.cdiv(meta["V"], meta["BLOCK"]),)](
        logits,
        words,
        V=logits.shape[1],
        row_step=logits.stride(0),
        step=logits.stride(1),
        words_step=words.stride(0),
        word_step=words.stride(1),
        BLOCK=512,
        num_warps=2,
    )


@answers.wrong("24.3", "The logits are changed in place. Return None.")
def returned(logits, words):
    word_by_word(logits, words)
    return logits
