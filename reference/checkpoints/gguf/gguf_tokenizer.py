"""The tokenizer that a GGUF file carries, as transformers' fast tokenizer, and back.

    tokenizer = tokenizer_of(read_gguf("model.gguf"))
    metadata = tokenizer_metadata(tokenizer, vocab_size)

A file lists its tokens by id, their types, and what joins them: merges (byte-level BPE, as in Llama
3 and Qwen) or scores (SentencePiece, as in Llama 2). How text is cut into words before that is only
named: "qwen2" stands for a regular expression that llama.cpp knows. RULES has the names that are
known here, and another one is refused, because a wrong cut gives other tokens and no error.

The key tokenizer.huggingface.json may hold the whole tokenizer.json, and then nothing is left to a
name. What this course writes has it, because the embedded models cut text by a rule of their own.

Source: ggml/docs/gguf.md; llama-vocab.cpp and convert_hf_to_gguf.py of llama.cpp.
"""

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers import pre_tokenizers as cut
from tokenizers.models import BPE

from lessons.toolbox.model.arguments import is_whole, shown
from lessons.toolbox.model.config_json import CheckpointError
from reference.checkpoints.gguf.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
)
WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
RULES = {
    "llama-bpe": [cut.Split(Regex(WORDS.replace("DIGITS", "{1,3}")), "isolated")],
    "qwen2": [cut.Split(Regex(WORDS.replace("DIGITS", "")), "isolated")],
    "smollm": [cut.Digits(individual_digits=True)],
    "gpt-2": [],
}
SAME_RULES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
# Of the rules that llama.cpp knows, the nearest to the embedded models': it differs at line breaks.
NEAREST = "smollm"
WHOLE = "tokenizer.huggingface.json"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


# ---------------------------------------------------------------- reading


def tokenizer_of(file: GgufFile):
    """The file's tokenizer, as transformers' PreTrainedTokenizerFast. Raises CheckpointError, one
    line, for a file without one, of another kind, or broken.
    """
    from transformers import PreTrainedTokenizerFast  # here, because importing it takes seconds

    try:
        tokens, types = _tokens_of(file.metadata)
        backend = _backend_of(file.metadata, tokens, types)
        special = _special_tokens(file.metadata, tokens)
        # some wrong values show only in use
        backend.decode(backend.encode("def f(a):\n\treturn 0  # é 中 😀").ids)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    except Exception as error:  # because the tokenizer library raises plain Exception
        raise CheckpointError(f"the tokenizer in {file.path} cannot be read: {error}") from error
    template = file.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **special | ({"chat_template": template} if isinstance(template, str) else {}),
    )


def _tokens_of(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The tokens by id, and their types."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not _is_list_of(str, tokens) or not tokens or len(set(tokens)) < len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens must list different strings")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not _is_list_of(int, types) or len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type must list {len(tokens)} whole numbers")
    return tokens, types


def _backend_of(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    whole = metadata.get(WHOLE)
    if isinstance(whole, str):
        backend = Tokenizer.from_str(whole)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if any(
            vocabulary.get(token) != id for id, token in enumerate(tokens) if types[id] != UNUSED
        ):
            raise CheckpointError(f"{WHOLE} and tokenizer.ggml.tokens have different tokens")
        return backend
    kind = metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in makers:
        raise CheckpointError(f"tokenizer.ggml.model is {shown(kind)}; supported: gpt2, llama")
    backend = makers[kind](metadata, tokens)
    backend.add_special_tokens(_added(tokens, types, CONTROL))
    backend.add_tokens(_added(tokens, types, USER_DEFINED))
    return backend


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """Byte-level BPE: each byte is a letter, and merges join them."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not _is_list_of(str, merges) or any(merge.count(" ") != 1 for merge in merges):
        raise CheckpointError(
            "tokenizer.ggml.merges must list pairs of tokens, a blank between them"
        )
    named = metadata.get("tokenizer.ggml.pre")
    rule = SAME_RULES.get(named, named) if isinstance(named, str) else None
    if rule not in RULES:
        supported = ", ".join([*RULES, *SAME_RULES])
        raise CheckpointError(f"tokenizer.ggml.pre is {shown(named)}; supported: {supported}")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = Tokenizer(BPE(vocabulary, pairs, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    # a rule with its own regular expression replaces GPT-2's
    own_words = any(isinstance(step, cut.Split) for step in RULES[rule])
    in_bytes = cut.ByteLevel(add_prefix_space=False, use_regex=not own_words)
    backend.pre_tokenizer = cut.Sequence([*RULES[rule], in_bytes])
    backend.decoder = decoders.ByteLevel()
    _put_around(backend, metadata, tokens, begins=rule == "llama-bpe")
    return backend


def _sentence_piece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE: the neighbours whose union has the highest score join first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not _is_list_of(float, scores) or len(scores) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores must list {len(tokens)} numbers")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    pairs = [
        (scores[id], token[:at], token[at:])
        for id, token in enumerate(tokens)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    pairs.sort(key=lambda pair: -pair[0])
    unknown = _id_in(metadata, "unknown", tokens)
    backend = Tokenizer(
        BPE(
            vocabulary,
            [pair[1:] for pair in pairs],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    blank = normalizers.Replace(" ", "▁")
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, blank])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if prefixed else steps
    )
    _put_around(backend, metadata, tokens, begins=True)
    return backend


def _put_around(
    backend: Tokenizer, metadata: dict[str, Any], tokens: list[str], begins: bool
) -> None:
    """Make the backend begin and end every text as add_bos_token and add_eos_token say. begins:
    what llama.cpp assumes of this vocabulary where a file has no add_bos_token; it never assumes
    that a text ends with a token.
    """
    found = {}
    for key, default in (("bos", begins), ("eos", False)):
        found[key] = []
        if metadata.get(f"tokenizer.ggml.add_{key}_token", default):
            id = _id_in(metadata, key, tokens)
            if id is None:
                said = f"tokenizer.ggml.add_{key}_token is true, but there is no {key}_token_id"
                raise CheckpointError(said)
            found[key] = [(tokens[id], id)]
    first, last = ([name for name, _ in found[key]] for key in ("bos", "eos"))
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B:1", *last],
        special_tokens=list(dict.fromkeys(found["bos"] + found["eos"])),
    )


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    found = [token for token, its in zip(tokens, types) if its == kind]
    return [AddedToken(token, normalized=False, special=kind == CONTROL) for token in found]


def _special_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    ids = {name: _id_in(metadata, key, tokens) for name, key in SPECIAL.items()}
    return {name: tokens[id] for name, id in ids.items() if id is not None}


def _id_in(metadata: dict[str, Any], key: str, tokens: list[str]) -> int | None:
    id = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if id is not None and not is_whole(id, 0, len(tokens) - 1):
        accepted = f"0 to {len(tokens) - 1}"
        raise CheckpointError(f"tokenizer.ggml.{key}_token_id is {shown(id)}; accepted: {accepted}")
    return id


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


# ---------------------------------------------------------------- writing


def tokenizer_metadata(tokenizer, vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer of transformers under llama.cpp's keys. vocab_size: of the model;
    ids without a token become unused ones. Raises ValueError for another kind of tokenizer.
    """
    whole = tokenizer.backend_tokenizer.to_str()
    content = json.loads(whole)
    model = content["model"]
    if model["type"] != "BPE" or "ByteLevel" not in json.dumps(content["pre_tokenizer"]):
        raise ValueError(f"tokenizer: got {model['type']}; accepted: byte-level BPE")
    tokens, types = [f"[PAD{id}]" for id in range(vocab_size)], [UNUSED] * vocab_size
    for token, id in model["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    rule = content["pre_tokenizer"]
    named = {json.dumps(_rule_content(name)): name for name in RULES}.get(json.dumps(rule), NEAREST)
    before, after = _tokens_around(tokenizer)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": named,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": before == [tokenizer.bos_token_id],
        "tokenizer.ggml.add_eos_token": after == [tokenizer.eos_token_id],
        WHOLE: whole,
    }
    for name, key in SPECIAL.items():
        id = getattr(tokenizer, f"{name}_id")
        if id is not None:
            metadata[f"tokenizer.ggml.{key}_token_id"] = id
    if tokenizer.chat_template:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _tokens_around(tokenizer) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after every text."""
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = (at for at in range(len(whole)) if whole[at : at + len(text)] == text)
    start = next(starts)
    return whole[:start], whole[start + len(text) :]


def _rule_content(name: str) -> dict[str, Any]:
    """A rule as tokenizer.json holds it."""
    backend = Tokenizer(BPE())
    own_words = any(isinstance(step, cut.Split) for step in RULES[name])
    in_bytes = cut.ByteLevel(add_prefix_space=False, use_regex=not own_words)
    backend.pre_tokenizer = cut.Sequence([*RULES[name], in_bytes])
    return json.loads(backend.to_str())["pre_tokenizer"]
