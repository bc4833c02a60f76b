"""Train `models/tiny-hybrid`, three layers with a state and one with attention, and its controls.

    python -m models.train_hybrid hybrid                # models/tiny-hybrid
    python -m models.train_hybrid attention             # the same with attention in every layer
    python -m models.train_hybrid states                # the same with states alone
    python -m models.hybrid_card                        # what is measured of them

Text, losses, optimizers and schedule are those of `models.train`; one that was interrupted goes on
where it last saved. The controls stay in build/: only what was measured of them is kept.
"""

import argparse
import functools
import shutil
from pathlib import Path

from transformers.models.qwen3_next import modeling_qwen3_next

from models.networks import MIXES, new_mix
from models.steps import keep_freed_memory, next_token_loss
from models.stop import Stop
from models.tokenizer import FOLDERS, HERE
from models.train import DEVICE, Options, Stage, learn

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
CHUNK = 32  # tokens: on a CPU a tenth faster than transformers' own 64


def folder_of(name: str) -> Path:
    """Where one of MIXES is saved, or "tiny"."""
    if name == "tiny":
        return FOLDERS[name]
    return HERE / "tiny-hybrid" if name == "hybrid" else HERE.parent / "build" / f"tiny-{name}"


def train_mix(name: str, options: Options, stop: Stop | None = None) -> None:
    """Train one of MIXES into its folder. Raises SystemExit when it was asked to stop."""
    model = new_mix(name).to(DEVICE)
    if DEVICE == "cpu":
        model.set_attn_implementation("eager")
        rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
        chunked = functools.partial(rule, chunk_size=CHUNK)
        modeling_qwen3_next.torch_chunk_gated_delta_rule = chunked
    stage, folder = Stage(name, next_token_loss), folder_of(name)
    learn(name, stage, (model, None), folder, options, stop=stop)
    for file in TOKENIZER:
        shutil.copy(FOLDERS["tiny"] / file, folder / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=MIXES)
    parser.add_argument("--tokens", type=float, default=8, help="in millions (%(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    args = parser.parse_args()
    if not 0 < args.tokens < 1e6:
        parser.error(f"--tokens: got {args.tokens}; accepted: millions of tokens, above 0")
    keep_freed_memory()
    train_mix(args.what, Options(args.tokens, args.tokens_per_step, False), Stop().listen())


if __name__ == "__main__":
    main()
