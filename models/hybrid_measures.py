"""What is measured of models/tiny-hybrid and of what it is held against; hybrid_card.py writes it
down.

copied, digits_read      what a model still knows of tokens that it has seen before
kept_shares              how fast its states fade
sequence_bytes           what a sequence keeps
tokens_a_second          answers in our engine, in CPU time
"""

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lessons.l06_mla.deepseek import load_decoder
from lessons.toolbox.model.checkpoint import load_config, load_tokenizer
from lessons.toolbox.model.corpus import corpus, token_stream
from models.tokenizer import FOLDERS
from reference.engine.llm import LLM
from reference.engine.sampling_params import SamplingParams
from reference.features.states.generate import whole_sequence

COPIED, BEGINNING = 24, 4  # tokens of a copy, and those of which the loss is not counted
DIGITS = 5
TRIALS = 32
SEQUENCES, NEW_TOKENS = 8, 64
FADING = 512  # tokens over which decays are looked at


def stream() -> np.ndarray:
    """Held-out text: [tokens]."""
    return token_stream(corpus()[1])


# ---------------------------------------------------------------- what a model still knows


def fillers(text: np.ndarray, distance: int) -> list[np.ndarray]:
    """TRIALS pieces of held-out text, spread evenly: [distance] each."""
    starts = np.linspace(0, len(text) - distance - 1, TRIALS).astype(int)
    return [text[start : start + distance] for start in starts]


def needles() -> np.ndarray:
    """Tokens in no order, the same for each distance: [TRIALS, COPIED]. Nothing but the first copy
    says what the second one will be.
    """
    return np.random.default_rng(0).integers(1, 4096, (TRIALS, COPIED))


@torch.no_grad()
def rows_of(model: PreTrainedModel, windows: list[np.ndarray], last: int) -> Tensor:
    """Log-probabilities of the next token after the last tokens of each window: [windows, last,
    V].
    """
    found = []
    for window in windows:
        ids = torch.from_numpy(np.array(window, dtype=np.int64))[None]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, -last:]
        found.append(model.lm_head(hidden).float().log_softmax(-1))
    return torch.stack(found)


def copied(model: PreTrainedModel, text: np.ndarray, distance: int) -> dict[str, float]:
    """How well the second copy of a needle is known: the share of its tokens that are the likeliest
    ones, and their loss in nats. ln 4096 = 8.3 is the loss of a model that knows nothing.
    """
    chosen = needles()
    windows = [
        np.concatenate([[0], needle, filler, needle[:-1]])
        for needle, filler in zip(chosen, fillers(text, distance))
    ]
    wanted = torch.from_numpy(chosen[:, BEGINNING:])
    rows = rows_of(model, windows, wanted.shape[1])
    loss = -rows.gather(-1, wanted[..., None])
    right = (rows.argmax(-1) == wanted).float()
    return {"right": round(float(right.mean()), 4), "loss": round(float(loss.mean()), 3)}


def digits_read(model: PreTrainedModel, text: np.ndarray, distance: int) -> float:
    """The share of the digits of a number that are the likeliest tokens when its name comes again.
    By chance it is a tenth.
    """
    tokenizer, drawn = load_tokenizer(FOLDERS["tiny"]), np.random.default_rng(1)
    windows, wanted = [], []
    for filler in fillers(text, distance):
        digits = "".join(str(each) for each in drawn.integers(0, 10, DIGITS))
        said = tokenizer(f"SECRET_KEY = {digits}")["input_ids"]
        windows.append(np.concatenate([said, filler, said[1:-1]]))
        wanted.append(said[-DIGITS:])
    rows = rows_of(model, windows, DIGITS)
    return round(float((rows.argmax(-1) == torch.tensor(wanted)).float().mean()), 4)


@torch.inference_mode()
def kept_shares(folder: str | Path, text: np.ndarray) -> list[list[float]]:
    """What decay leaves of a state after one token, the median over held-out text: for each layer
    with a state a number for each head.
    """
    model, found = load_decoder(folder), []
    attend = whole_sequence(model, FADING)

    def watched(layer: int, *inputs: Tensor) -> Tensor:
        if layer in model.config.state.layers:
            _, log_decay, _ = inputs
            shares = log_decay.float().exp().median(0).values
            found.append([round(float(each), 4) for each in shares])
        return attend(layer, *inputs)

    model(torch.from_numpy(text[:FADING].astype(np.int64)), watched)
    return found


# ---------------------------------------------------------------- memory and speed


def sequence_bytes(folder: str, context: int) -> int:
    """What a sequence of so many tokens keeps in 16 bits, and states in 32."""
    config = load_config(folder)
    state = config.state
    layers = config.num_hidden_layers if state is None else len(state.attention_layers)
    a_token = 2 * layers * config.num_key_value_heads * config.head_dim * 2
    return a_token * context + (0 if state is None else state.bytes_per_sequence(2))


def tokens_a_second(folder: str, prompt_tokens: int) -> float:
    """Of SEQUENCES answers side by side in our engine, in CPU time of one thread, prompts left out:
    a run with answers is held against one with a single token each. The better of two.
    """
    text, torch_threads = stream(), torch.get_num_threads()
    torch.set_num_threads(1)
    llm = LLM(
        folder,
        max_num_seqs=SEQUENCES,
        kv_cache_memory_bytes=200_000_000,
        enable_prefix_caching=False,  # a prompt is to cost the same each time
    )
    starts = np.linspace(0, len(text) - prompt_tokens, SEQUENCES).astype(int)
    prompts = [{"prompt_token_ids": text[s : s + prompt_tokens].tolist()} for s in starts]
    spent: dict[int, list[float]] = {1: [], NEW_TOKENS: []}
    for most in (1, *spent, *spent):  # the first one warms up
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        begun = time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        spent[most].append(time.process_time() - begun)
    torch.set_num_threads(torch_threads)
    seconds = min(spent[NEW_TOKENS]) - min(spent[1][1:])
    return round(SEQUENCES * (NEW_TOKENS - 1) / seconds, 1)
