"""Train the tokenizer that both embedded models share: byte-level BPE on the corpus, seconds.

`python -m models.train tokenizer` runs it.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lessons.toolbox.model.corpus import END, corpus

HERE = Path(__file__).resolve().parent
FOLDERS = {"tiny": HERE / "tiny", "draft": HERE / "tiny-draft"}
VOCAB_SIZE = 4096

# Digits one by one, and one token for "go to column 8": a newline stays with the indentation
# after it.
PIECES = r"\d|\n+[ \t]*| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|[ \t]+(?!\S)|\s+"


def begins_every_text(end: int) -> processors.TemplateProcessing:
    """Puts END, whose id is `end`, before every text, as before every document of the training. It
    is saved in tokenizer.json, so every engine that reads the folder gives a text the same tokens.
    """
    return processors.TemplateProcessing(
        single=[END, "$A"], pair=[END, "$A", f"{END}:1", "$B:1"], special_tokens=[(END, end)]
    )


def train_tokenizer() -> None:
    """Train it on the corpus and write its files into both models' folders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus()[0], trainer)
    tokenizer.post_processor = begins_every_text(tokenizer.token_to_id(END))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    for folder in FOLDERS.values():
        fast.save_pretrained(folder)
