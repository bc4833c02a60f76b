"""Train the course's two embedded models on the source of Python's own standard library.

    python models/train.py tokenizer            # byte-level BPE, seconds
    python models/train.py tiny  --minutes 70   # the target: next-token cross-entropy
    python models/train.py draft --minutes 15   # the draft: distilled from the target, same tokenizer
    python models/train.py evaluate             # held-out figures -> models/figures.json and models/README.md

The budget is wall-clock minutes, because the same recipe runs on a laptop and on a GPU: the learning rate
follows the share of the budget that is spent. Results are ordinary Hugging Face Llama checkpoints; a
directory under models/ is replaced only when its training has finished.
"""
import argparse
import ast
import json
import math
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
END = "<|endoftext|>"
VOCAB_SIZE = 4096

# Never trained on, nor are their tests: varied, readable modules that a learner may know.
HELD_OUT = ("bisect", "calendar", "cmd", "colorsys", "csv", "fileinput", "fractions", "graphlib", "heapq", "netrc",
            "queue", "sched", "shlex", "statistics", "string", "textwrap", "timeit", "wave", "zipapp")
# Tables and prose, not code that a reader would call code.
SKIPPED = ("encodings/", "pydoc_data/", "lib2to3/tests/data/", "idlelib/", "test/encoded_modules/", "test/test_email/data",
           "site-packages/", "dist-packages/", "turtledemo/", "config-")

SHAPES = {  # ratio of query to KV heads: 3 (no power of two, as in Qwen2's 6 and 7) and 2
    "tiny": dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2, intermediate_size=1024),
    "draft": dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, intermediate_size=512),
}
FOLDERS = {"tiny": HERE / "tiny", "draft": HERE / "tiny-draft"}


def corpus() -> tuple[list[str], list[str]]:
    """The standard library's modules as (train, held_out) lists of source texts, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out, seen = [], [], set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(name.startswith(s) or f"/{s}" in name for s in SKIPPED):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # deliberately broken test fixtures
        if len(text) < 200 or text in seen:
            continue
        seen.add(text)
        is_held_out = path.stem.removeprefix("test_") in HELD_OUT
        if is_held_out and not name.startswith("test/") and path.parent == root:
            held_out.append(text)
        elif not is_held_out:
            train.append(text)
    return train, held_out


# ---------------------------------------------------------------- tokenizer

def train_tokenizer() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        # A newline and the indentation after it stay together: one token for "go to column 8".
        pre_tokenizers.Split(Regex(r"\d|\n+[ \t]*| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|[ \t]+(?!\S)|\s+"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus()[0], trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END,
                                   model_max_length=2048, clean_up_tokenization_spaces=False)
    for folder in FOLDERS.values():
        fast.save_pretrained(folder)


def load_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(FOLDERS["tiny"])


def token_stream(texts: list[str]) -> np.ndarray:
    """Every text, each preceded by the end-of-text token, as one array of ids."""
    tokenizer = load_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    ids = [token for encoded in tokenizer(texts)["input_ids"] for token in (end, *encoded)]
    return np.array(ids, dtype=np.int64)


# ---------------------------------------------------------------- training

def new_model(name: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        **SHAPES[name], vocab_size=VOCAB_SIZE, head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048,
        rms_norm_eps=1e-5, rope_theta=10000.0, bos_token_id=0, eos_token_id=0, pad_token_id=None, initializer_range=0.02))


def windows(stream: np.ndarray, rng: np.random.Generator, rows: int, length: int):
    """Endless [rows, length + 1] batches: each epoch cuts the stream at a new offset and shuffles the pieces."""
    while True:
        starts = np.arange(rng.integers(length), len(stream) - length - 1, length)
        rng.shuffle(starts)
        for i in range(0, len(starts) - rows + 1, rows):
            yield torch.from_numpy(np.stack([stream[s:s + length + 1] for s in starts[i:i + rows]]))


def next_token_loss(model, batch, teacher=None):
    return F.cross_entropy(model(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1), batch[:, 1:].flatten())


def distillation_loss(model, batch, teacher):
    """KL(teacher || student) over every position (Hinton et al. 2015, at temperature 1)."""
    with torch.no_grad():
        target = torch.log_softmax(teacher(input_ids=batch[:, :-1], use_cache=False).logits.float(), -1)
    student = torch.log_softmax(model(input_ids=batch[:, :-1], use_cache=False).logits.float(), -1)
    return F.kl_div(student.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean")


def optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the tied embedding and the norms (Jordan et al. 2024)."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    return [torch.optim.Muon(hidden, lr=4e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)]


def schedule(spent: float) -> float:
    """Learning-rate factor after a share `spent` of the budget: warm up 2 %, hold, then linear to zero over the last 45 %."""
    return min(spent / 0.02 + 0.01, 1.0, (1 - spent) / 0.45)


def train(name: str, minutes: float, tokens_per_step: int, compile_model: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_texts, held_out_texts = corpus()
    stream, held_out = token_stream(train_texts), token_stream(held_out_texts)
    model = new_model(name).to(device)
    teacher = AutoModelForCausalLM.from_pretrained(FOLDERS["tiny"], dtype=torch.bfloat16).to(device).eval() if name == "draft" else None
    loss_of = distillation_loss if teacher else next_token_loss
    step_loss = torch.compile(loss_of) if compile_model else loss_of
    opts = optimizers(model)
    base = [[g["lr"] for g in o.param_groups] for o in opts]
    rng = np.random.default_rng(0)
    phases = [(0.0, 512), (0.88, 2048)]  # the last 12 % of the time at the full context, so that RoPE sees every position
    print(f"{name}: {model.num_parameters() / 1e6:.2f}M parameters, {len(stream) / 1e6:.2f}M training tokens, "
          f"{len(held_out)} held-out tokens, on {device}", flush=True)
    start, seen, step, best = time.monotonic(), 0, 0, None
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task(name, total=1.0)
        for phase, (phase_start, length) in enumerate(phases):
            phase_end = phases[phase + 1][0] if phase + 1 < len(phases) else 1.0
            for batch in windows(stream, rng, tokens_per_step // length, length):
                spent = (time.monotonic() - start) / (60 * minutes)
                if spent >= phase_end:
                    break
                for opt, lrs in zip(opts, base):
                    for group, lr in zip(opt.param_groups, lrs):
                        group["lr"] = lr * schedule(spent)
                with torch.autocast(device, torch.bfloat16):
                    loss = step_loss(model, batch.to(device), teacher)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for opt in opts:
                    opt.step()
                    opt.zero_grad()
                seen, step = seen + batch[:, 1:].numel(), step + 1
                progress.update(bar, completed=spent, description=f"{name} loss {loss.item():.3f}")
                if step % 100 == 0 or step == 10:
                    print(f"step {step} spent {spent:.3f} tokens {seen / 1e6:.2f}M loss {loss.item():.4f} "
                          f"held-out {held_out_loss(model, held_out[:16385], device):.4f}", flush=True)
                if step % 500 == 0:
                    save(model, HERE.parent / "build" / f"{name}-unfinished")
    figures = {"minutes": round((time.monotonic() - start) / 60, 1), "steps": step, "tokens_seen": seen,
               "training_tokens": len(stream), "device": torch.cuda.get_device_name() if device == "cuda" else "CPU, 2 cores"
               if os.cpu_count() == 2 else f"CPU, {os.cpu_count()} cores", "torch": torch.__version__,
               "python_source": sys.version.split()[0]}
    save(model, FOLDERS[name])
    (FOLDERS[name] / "training.json").write_text(json.dumps(figures, indent=2) + "\n")


def save(model, folder: Path) -> None:
    """Write weights and config beside `folder`, then move each file into place: nothing is ever half written."""
    scratch = folder.with_name(folder.name + ".part")
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    for file in scratch.iterdir():
        file.replace(folder / file.name)
    shutil.rmtree(scratch)


# ---------------------------------------------------------------- evaluation

@torch.no_grad()
def held_out_loss(model, stream: np.ndarray, device: str, length: int = 512) -> float:
    """Mean next-token loss in nats over consecutive windows of `length` tokens."""
    rows = torch.from_numpy(np.stack([stream[i:i + length + 1] for i in range(0, len(stream) - length, length)])).to(device)
    total = [F.cross_entropy(model(input_ids=r[:, :-1], use_cache=False).logits.float().flatten(0, 1), r[:, 1:].flatten())
             for r in rows.split(4)]
    return float(torch.stack([t * len(r) for t, r in zip(total, rows.split(4))]).sum() / len(rows))


@torch.no_grad()
def greedy_agreement(tiny, draft, stream: np.ndarray, device: str, length: int = 512) -> float:
    """Share of held-out positions at which draft and target have the same most likely next token."""
    rows = torch.from_numpy(np.stack([stream[i:i + length] for i in range(0, len(stream) - length, length)])).to(device)
    same = [(tiny(input_ids=r).logits.argmax(-1) == draft(input_ids=r).logits.argmax(-1)).float().mean() for r in rows.split(4)]
    return float(torch.stack(same).mean())


@torch.no_grad()
def sampled_functions(model, tokenizer, count: int, device: str) -> list[str]:
    """`count` functions sampled at temperature 0.8, top-p 0.95: cut where the next top-level statement begins."""
    torch.manual_seed(0)
    prompts = ["def read_lines(path):\n", "def merge(left, right):\n", "class Stack:\n    def __init__(self):\n",
               "def parse_header(line):\n    \"\"\"", "def is_valid(name, value):\n", "def write_table(rows, out):\n"]
    functions = []
    for i in range(count):
        prompt = prompts[i % len(prompts)]
        ids = torch.tensor([[0] + tokenizer(prompt)["input_ids"]], device=device)
        out = model.generate(ids, max_new_tokens=160, do_sample=True, temperature=0.8, top_p=0.95, top_k=0, pad_token_id=0)
        lines = tokenizer.decode(out[0, 1:], skip_special_tokens=True).split("\n")
        body = [lines[0]] + [line for line in _until_top_level(lines[1:])]
        functions.append("\n".join(body).rstrip())
    return functions


def _until_top_level(lines):
    for line in lines:
        if line and not line[0].isspace():
            return
        yield line


def parses(source: str) -> bool:
    try:
        ast.parse(source)
        return True
    except (SyntaxError, ValueError):
        return False


def evaluate(samples: int = 60) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer()
    texts = corpus()[1]
    stream = token_stream(texts)
    bytes_per_token = sum(len(t.encode()) for t in texts) / len(stream)
    loaded, figures = {}, {}
    for name, folder in FOLDERS.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        loaded[name] = model
        loss = held_out_loss(model, stream, device)
        figures[name] = {"parameters": model.num_parameters(), "weight_bytes": (folder / "model.safetensors").stat().st_size,
                         "held_out_loss_nats": round(loss, 4), "held_out_bits_per_byte": round(loss / math.log(2) / bytes_per_token, 4),
                         **json.loads((folder / "training.json").read_text())}
    functions = sampled_functions(loaded["tiny"], tokenizer, samples, device)
    # A function cut by the token limit cannot parse; it counts as a failure all the same.
    figures["tiny"]["sampled_functions"] = samples
    figures["tiny"]["sampled_functions_that_parse"] = round(sum(map(parses, functions)) / samples, 3)
    figures["draft"]["greedy_agreement_with_tiny"] = round(greedy_agreement(loaded["tiny"], loaded["draft"], stream, device), 4)
    figures["held_out"] = {"modules": list(HELD_OUT), "tokens": len(stream), "bytes_per_token": round(bytes_per_token, 3)}
    figures["samples"] = functions[:3]
    (HERE / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    (HERE / "README.md").write_text(model_card(figures))
    print(model_card(figures))


def model_card(figures: dict) -> str:
    """models/README.md, every number in it taken from `figures`."""
    rows = [("", "`models/tiny`", "`models/tiny-draft`")]

    def row(label, key, show=str):
        rows.append((label, *(show(figures[m][key]) if key in figures[m] else "" for m in ("tiny", "draft"))))

    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        rows.append((name.replace("_", " "), str(SHAPES["tiny"][name]), str(SHAPES["draft"][name])))
    row("parameters", "parameters", lambda n: f"{n / 1e6:.2f} M")
    row("weights (bfloat16)", "weight_bytes", lambda n: f"{n / 1e6:.1f} MB")
    row("trained on", "device")
    row("minutes", "minutes")
    row("tokens seen", "tokens_seen", lambda n: f"{n / 1e6:.1f} M")
    row("held-out loss (nats per token)", "held_out_loss_nats")
    row("held-out bits per byte", "held_out_bits_per_byte")
    row("sampled functions that `ast.parse` accepts", "sampled_functions_that_parse", lambda s: f"{s:.0%}")
    row("greedy agreement with the target, held-out code", "greedy_agreement_with_tiny", lambda s: f"{s:.1%}")
    table = "\n".join("| " + " | ".join(r) + " |" + ("\n| --- | --- | --- |" if i == 0 else "") for i, r in enumerate(rows))
    samples = "\n\n".join(f"```python\n{s}\n```" for s in figures["samples"])
    held = figures["held_out"]
    return f"""# The embedded models

Two Llama models, small enough to live in the repository and to run on any laptop, and real: trained on the source of
Python's own standard library, so that they complete Python code. Ordinary Hugging Face checkpoints:
`AutoModelForCausalLM.from_pretrained("models/tiny")` works, and so does our loader.
This page is written by `python models/train.py evaluate`; every figure on it is measured by that command.

{table}

- **Data**: {figures['tiny']['training_tokens'] / 1e6:.1f} M tokens of the standard library of Python {figures['tiny']['python_source']}
  (PSF licence), tests included, tables of encodings and the like left out. Held out, with their tests
  ({held['tokens']} tokens, {held['bytes_per_token']} bytes each): {', '.join(f'`{m}`' for m in held['modules'])}.
- **Tokenizer**: byte-level BPE with {VOCAB_SIZE} entries; a newline and the indentation after it can be one token;
  digits stay single. `{END}` (id 0) begins every document and ends every generation.
- **Target**: next-token cross-entropy, Muon for the hidden matrices and AdamW for the rest, 512-token windows and
  2048-token windows for the last 12 % of the time. GQA, RoPE, SwiGLU, RMSNorm, tied embeddings, head dimension 64.
- **Draft**: the same recipe, but trained on the target's probabilities (distillation) instead of on the text.
- **Sampling**: temperature 0.8, top-p 0.95, {figures['tiny']['sampled_functions']} functions of at most 160 tokens; one cut off by that limit counts as a failure.

Train them again: `python models/train.py tokenizer`, `tiny --minutes N`, `draft --minutes N`, `evaluate`. More minutes
or a GPU give better models of the same shape; nothing else in the course depends on the weights.

## Samples

{samples}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["tokenizer", "tiny", "draft", "evaluate"])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run the training step without torch.compile")
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    if args.what == "tokenizer":
        train_tokenizer()
    elif args.what == "evaluate":
        evaluate()
    else:
        train(args.what, args.minutes, args.tokens_per_step, args.compile)


if __name__ == "__main__":
    main()
