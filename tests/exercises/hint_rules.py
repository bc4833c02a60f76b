"""Hints by what a message says: for the rules of checking.py and for exceptions of Python, PyTorch
and Triton.

Each rule is a pattern and a sentence. The sentence says what the message means and what to look at;
{1}, {2} are what the pattern found. The first that fits counts.
"""

import re

# what a check says when a rule is broken
BROKEN_RULES = (
    (
        r"changed its argument `(\w+)`",
        "`+=`, `{1}[...] =`, `append` and names that end in _ change what the caller holds: put "
        "the result into a new tensor or list, or work on a copy",
    ),
    (
        r"changed its argument|changed an argument",
        "the caller still needs what it gave: work on a copy",
    ),
    (
        r"created a tensor of \d+ elements, (\[[^\]]*\])",
        "which line makes {1}? Views cost nothing (slices, view, expand); repeat, cat, contiguous "
        "and an index that is a tensor copy",
    ),
    (
        r"is there a Python loop|is there a loop over",
        "let one operation do all of them: broadcast, gather, a cumulative sum, or a formula",
    ),
    (
        r"uses `(?:import )?(np|numpy|torch|math)\b.*no compiler knows",
        "`{1}` is Python's: a kernel computes with `tl`, as in tl.sum, tl.exp and tl.dot",
    ),
    (
        r"uses `\.(\w+)`, which no compiler knows",
        "`.{1}` is there in the interpreter alone: use tl.load, tl.store and what tl computes",
    ),
    (
        r"uses `(.+)`, which no compiler knows",
        "if `{1}` is a number, give it as an argument or make it tl.constexpr; if it is a "
        "function, it needs @triton.jit",
    ),
    (
        r"leaves out \d+ of \d+ elements of",
        "which program is to load these, and does the mask let them through?",
    ),
    (
        r"loads elements of `?(\w+)`? 0 times",
        "nothing of `{1}` is loaded by a kernel: in the wrapper only allocate, view and launch",
    ),
    (
        r"no kernel stored|the kernel has to compute (?:it|them)|were changed after the kernel's "
        r"launch|no kernel loads",
        "in the wrapper only allocate, view and launch; the numbers are for the kernel to compute",
    ),
    (
        r"your ValueError says",
        "put what you were given into the message: an f-string with the argument's shape and dtype",
    ),
    (
        r"your test rejects an implementation that is right",
        "print the error and the limit it breaks: is the limit a part of the largest element?",
    ),
    (
        r"you choose worker \d+ for",
        "print what you compare for both workers: is it that number, and which of two equal ones "
        "do you take?",
    ),
    (
        r"depends on the order in which",
        "which lanes of a program are not its own? The mask of the store has to leave them out",
    ),
    (
        r"with \d+ warps gives each lane",
        "a lane has BLOCK / (32 · num_warps) tokens: which of the two do you change?",
    ),
    (
        r"your function steps \d+ times",
        "print the text of each step: which is there twice, and which does no token reach?",
    ),
    (
        r"your function finds no race",
        "which sentence of the docstring does this event break, and where do you test it?",
    ),
    (
        r"your function finds a race in event",
        "say in words which rule this event breaks: does the docstring say so?",
    ),
    (
        r"canary: \d+ elements outside the tensor",
        "a store without the right mask: which lanes of the tile are padding, in each dimension?",
    ),
    (
        r"kernel \w+ out of bounds: .* \d{10,} bytes (?:before|after)",
        "nothing is so far away: either the index was never written, or its product with a stride "
        "does not fit into 32 bits (then make the index int64 before you multiply)",
    ),
    (
        r"kernel \w+ out of bounds",
        "compare each index of that line with the size of its dimension: which lanes does the mask "
        "let through?",
    ),
    (
        r"(?:DID NOT RAISE|did not raise)\W+(?:<class '[\w.]*?)?(\w+)(?:'>)?",
        "what the check gave here must be refused with {1}: which limit does it break, and do you "
        "test it before you change anything?",
    ),
    (
        r"stores \d+ elements? outside",
        "compare each part of the store's index with the size of its dimension: is a mask missing, "
        "a sign or a stride wrong?",
    ),
    (
        r"(loads|changes) \d+ elements? outside",
        "compare each part of that line's index with the size of its dimension: which rows and "
        "columns are not there? Its mask has to leave them out",
    ),
    (
        r"loads elements of `?(\w+)`? \d+ times",
        "which line, or which two programs, load the same place of `{1}`? Each program has a part "
        "of its own",
    ),
    (
        r"sorts: find the threshold by its bits",
        "to sort is to know more than is asked for: how many scores are at or above a number?",
    ),
    (
        r"launches \d+ kernels, and one is enough",
        "a dimension of the grid can count what you loop over: tl.program_id is the number in it",
    ),
    (
        r"stores nothing|no program stores",
        "which program is to write these, and does its mask let them through?",
    ),
    (
        r"your (\w+) says .*; name (\w+)",
        "the message of a refusal names the argument: write `{2}` into it, with what it got and "
        "what is accepted",
    ),
    (
        r"[^:]*: your function [^:]*; raise (\w+) that names (\w+)",
        "test the arguments first, and raise {1} with `{2}` in its message before you compute",
    ),
    (
        r"^calls_are_few_and_small|\d+ calls, expected \d+ at most",
        "which cases find nothing that another one does not find? Small sizes show the same",
    ),
    (
        r"your function raises \w+: .*; raise (\w+)",
        "a caller catches {1}, so that is what has to be raised",
    ),
    (
        r"your ranks together compute",
        "cut the weights before the product, because a product whose result is cut has been "
        "computed whole; and what several heads read is computed once for all of them",
    ),
    (
        r"came through no collective|A rank may use its own entries only",
        "which line reads what another rank holds? Put it into a collective of `ranks`, and take "
        "what that returns",
    ),
    (
        r"the layer keeps \d+ bytes",
        "what of these follows from the rest? Compute it where it is needed, and do not keep it",
    ),
    (
        r"your stream yields an exception",
        "`raise` it inside of the generator: the reader's loop then ends with it",
    ),
    (
        r"a NaN becomes a code",
        "0 / 0 is NaN: where all values are 0, divide by 1",
    ),
    (
        r"pages\.(\w+) is another tensor now",
        "`pages.{1}[...] = ` writes into the tensor, `pages.{1} = ` takes another one",
    ),
    (
        r"is a `return` missing|returned NoneType",
        "None came back: does a path through your function end without `return`, or is there an "
        "answer where you say that there is none?",
    ),
    (
        r"\(\w+, expected NoneType\)",
        "None is expected here, and yours has found something: what did it take for it?",
    ),
    (
        r"is an? (\w+), expected an? (\w+)",
        "yours returns a {1}: the docstring says what the {2} holds, in which order",
    ),
    (
        r"\((\w+), expected (\w+)\)",
        "the value has the type {1}, and the docstring promises {2}: convert it before returning",
    ),
)

WRONG_DTYPE = (
    (
        r"\((list|tuple), expected (list|tuple)\)",
        "the docstring promises a {2}: convert it before returning, as in {2}(…)",
    ),
    (
        r"is (float\d+|bfloat16|int\d+|uint8|bool), expected (\w+)",
        "which input sets the dtype {1}? Convert the result at the end: .to(torch.{2})",
    ),
)

# a line of the learner's file, as running.describe's whole message names it
OWN_REFUSAL = (
    (
        r"(?:l\d\d_\w+\.py|<slip [^>]*>), line \d+: (\w+): .*: `raise ",
        "your own line raises this {1}: does the docstring say that what was given is an error?",
    ),
)

# what Python, PyTorch, NumPy and Triton say; the class of the exception comes first
EXCEPTIONS = (
    (
        r"IndexError: index -?\d+ is out of bounds for dimension \d+ with size 0",
        "something is empty there: is everything 0, or masked away?",
    ),
    (
        r"IndexError: index (-?\d+) is out of bounds for dimension \d+ with size (\d+)|"
        r"IndexError: index (-?\d+) is out of bounds for axis \d+ with size (\d+)|"
        r"RuntimeError: index (-?\d+) is out of bounds for dimension \d+ with size (\d+)",
        "{2} entries have the indices 0 to {2} - 1: is the index one too large, or of another "
        "dimension?",
    ),
    (
        r"IndexError: Dimension out of range",
        "the tensor has fewer dimensions than that line believes: see its shape",
    ),
    (
        r"IndexError: too many indices for tensor of dimension (\d+)",
        "the tensor has {1} dimensions: which of them was summed or indexed away before?",
    ),
    (
        r"IndexError: (?:list|tuple|deque|string) (?:assignment )?index out of range|"
        r"IndexError: pop from|IndexError: deque",
        "the list is shorter than that line believes: is it empty at the start or at the end, or "
        "does the index begin at 1?",
    ),
    (
        r"IndexError: The shape of the mask (\[.*?\]).*?indexed tensor (\[.*?\])",
        "a mask {1} chooses from {2}: both need the same dimensions",
    ),
    (
        r"RuntimeError: The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) "
        r"at non-singleton dimension (\d+)",
        "two tensors of that line have {1} and {2} entries in dimension {3}: compare their shapes; "
        "does one need unsqueeze, a transpose, or another slice?",
    ),
    (
        r"RuntimeError: (?:mat1 and mat2 shapes cannot be multiplied|size mismatch|"
        r"Expected size for first two dimensions|inconsistent tensor size|einsum\(\))",
        "the dimension that is summed over has to be equal in both: compare the shapes; is a "
        "transpose missing?",
    ),
    (
        r"RuntimeError: shape '(\[.*?\])' is invalid for input of size (\d+)",
        "a view keeps the number of elements: {1} would need their product, and there are {2}",
    ),
    (
        r"RuntimeError: view size is not compatible",
        "the tensor is not contiguous, as after a transpose or a slice: reshape copies it, view "
        "cannot",
    ),
    (
        r"RuntimeError: (?:expected (?:scalar type|m1 and m2)|Expected .*dtype|.*same dtype|"
        r"Index put requires|self and mat2)",
        "two dtypes meet in that line: convert one with .to(other.dtype)",
    ),
    (
        r"RuntimeError: shape mismatch|RuntimeError: The expanded size|RuntimeError: expand\(",
        "the value that is written has another shape than its place: count both sides of the `=`",
    ),
    (
        r"RuntimeError: (?:Sizes of tensors must match|stack expects each tensor|Tensors must have "
        r"same number of dimensions|torch\.cat)",
        "all tensors that are joined need the same shape, but for the dimension they are joined in",
    ),
    (
        r"RuntimeError: Boolean value of Tensor|ValueError: The truth value of an array",
        "`if`, `and`, `or` need one truth value: use torch.where, & and |, or .any() and .all()",
    ),
    (
        r"RuntimeError: (?:a Tensor with \d+ elements cannot be|only one element)|"
        r"ValueError: only one element|TypeError: only (?:length-1|integer tensors)",
        "that line needs one number and has a tensor: which element of it is meant?",
    ),
    (
        r"RuntimeError: probability tensor contains|RuntimeError: invalid multinomial",
        "probabilities have to be at least 0, no NaN, and not all 0: print their sum before",
    ),
    (
        r"(?:RuntimeError|IndexError): (?:max|amax|min|amin|argmax|argmin)\(\).*|"
        r"ValueError: (?:max|min)\(\) (?:arg|iterable)",
        "an empty tensor or list has no maximum: what should happen if there is none?",
    ),
    (
        r"(?:RuntimeError|ValueError|IndexError): .*(?:empty|zero-size|no elements)",
        "something is empty there: what should happen then?",
    ),
    (
        r"ZeroDivisionError",
        "which count can be 0 there, and what is the answer then?",
    ),
    (
        r"KeyError: (.*?)(?:: `|$)",
        "{1} is not in the dictionary: was it never put in, already taken out, or is another key "
        "meant?",
    ),
    (
        r"ValueError: (?:too many|not enough) values to unpack \(expected (?:at least )?(\d+)",
        "the left side has {1} names: how many entries has the right side?",
    ),
    (
        r"AttributeError: 'NoneType' object has no attribute '(\w+)'|"
        r"TypeError: '?NoneType'? object is not|TypeError: unsupported operand type.*NoneType",
        "a value in that line is None: a function without `return`, a `get` that found nothing, or "
        "a default that was not replaced",
    ),
    (
        r"AttributeError: '(\w+)' object has no attribute '(\w+)'",
        "{1} has no `{2}`: is it the object that you think, and does it have that name?",
    ),
    (
        r"TypeError: (\w+) indices must be integers",
        "a {1} takes one integer or a slice as an index: is it a tensor or an array that you mean?",
    ),
    (
        r"TypeError: .*(?:positional argument|keyword argument|unexpected keyword|takes \d+|takes "
        r"no)",
        "compare that call with the signature of the function that it calls; an exercise's own "
        "arguments have to stay as in its stub",
    ),
    (
        r"TypeError: '(\w+)' object is not (\w+)",
        "a value in that line is of type {1}, which is not {2}: print it",
    ),
    (
        r"TypeError: (?:unsupported operand|can only concatenate)",
        "two types meet that do not fit: print the types of what stands in that line",
    ),
    (
        r"(?:NameError|UnboundLocalError): .*?'(\w+)'",
        "`{1}` has no value there: is it spelled so, and is it set on each path that leads there?",
    ),
    (
        r"OverflowError|math range error|math domain error",
        "exp of a large number or log of one that is not positive: what is subtracted first?",
    ),
    (r"RecursionError", "your function calls itself without an end: which case stops it?"),
    (
        r"StopIteration",
        "`next` found nothing: what should happen if no entry fits?",
    ),
    (
        r"stopped after [\d.]+ s",
        "print what the loop's condition looks at: does each round bring it nearer to its end?",
    ),
    (
        r"Mask argument cannot be block type",
        "the pointer is one address and the mask a whole block: the index has to be added to the "
        "pointer",
    ),
    (
        r"Mask must have boolean",
        "a mask is a comparison, as `at < size`, and no number",
    ),
    (
        r"invalid operands of type pointer",
        "a pointer is followed by integers only: which part of the index holds values?",
    ),
    (
        r"Unsupported ptr type",
        "the first argument of tl.load and tl.store is an address: a pointer plus an index",
    ),
    (
        r"Expected pointer argument to have shape|must have equal ranks",
        "two tiles of that line have other shapes: write down both; [:, None] and [None, :] turn a "
        "vector into a column or a row",
    ),
    (
        r"arange's range must be a power of 2",
        "tl.arange needs a power of two: take triton.next_power_of_2 of the size, and mask the "
        "rest",
    ),
    (
        r"[Cc]annot broadcast|incompatible dimensions|could not be broadcast|"
        r"shape mismatch: objects",
        "two tiles of that line have other shapes: write down both; [:, None] and [None, :] turn a "
        "vector into a column or a row",
    ),
    (
        r"Did you forget to add @triton\.jit|Cannot call @triton\.jit'd outside",
        "a kernel is launched as kernel[grid](arguments), and what it calls is @triton.jit too",
    ),
    (
        r"only works on|takes tl\.constexpr|must be a constexpr|not a constexpr",
        "that argument has to be known when the kernel is compiled: declare it as tl.constexpr",
    ),
    (
        r"not supported between instances|cannot be interpreted as an integer|has no len\(\)",
        "a value in that line has another type than it takes: print the types of what stands there",
    ),
    (
        r"split_with_sizes|unflatten: Provided sizes",
        "the parts have to add up, or multiply, to the size of the dimension that is cut: is it "
        "another dimension?",
    ),
    (
        r"(?:RuntimeError|TypeError): (?:torch\.)?(\w+)\(\)",
        "PyTorch refuses what `{1}` is given in that line: compare the values with what it takes",
    ),
    (
        r"ValueError: .*accepted:",
        "a function of the course refuses what it was given: its message names the argument, the "
        "value, and what it accepts",
    ),
)


def hint_of_message(message: str) -> str | None:
    return _first(BROKEN_RULES, message)


def hint_of_dtype(message: str) -> str | None:
    return _first(WRONG_DTYPE, message)


def hint_of_refusal(message: str) -> str | None:
    """Of an exception that the learner's own `raise` made."""
    return _first(OWN_REFUSAL, message)


def hint_of_exception(message: str) -> str | None:
    """By a message like running.describe's: `IndexError: list index out of range`, in a line."""
    return _first((*EXCEPTIONS, *BROKEN_RULES), message)


def _first(rules: tuple[tuple[str, str], ...], message: str) -> str | None:
    for pattern, hint in rules:
        if found := re.search(pattern, message):
            # of alternatives in a pattern, the groups of the one that fits
            parts = [part for part in found.groups() if part is not None]
            for number, part in enumerate(parts, 1):
                hint = hint.replace(f"{{{number}}}", part)
            return hint
    return None
