"""Train all of the embedded models again, one after the other, within a time budget.

    python -m models.text                               # once, where the libraries are
    python -m models.retrain --budget-minutes 9         # again, until it says that all is trained
    python -m models.evaluate && python -m models.heads_card     # where the libraries are

The target, which then learns to leave its loops, the draft that is distilled from it and then
learns to be accepted, the kinds of heads, three of them side by side, and the draft that guesses
several tokens in one pass. The budget is for a borrowed machine: what is not done by then stops,
and the same command goes on with it, also elsewhere when the files in --pack have been unpacked in
models/'s parent. Only a training under way (build/) stays behind; heads, the last draft and the
leaving of loops begin anew, and the latter takes a quarter of an hour on a CPU, so give it a larger
budget there. models/retraining.json says what is finished; with other settings all begins anew.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from lessons.toolbox.proof.pack import write_pack
from models.tokenizer import FOLDERS, HERE

BESIDE, AFTER_EAGLE = ("medusa", "eagle", "eagle3"), ("mtp",)  # MTP starts from its weights
KINDS = BESIDE + AFTER_EAGLE
STAGES = ("tiny", "loops", "draft", "acceptance", "heads", "pard")
SHORTEST_S = 40  # what a round needs besides its training, or it is not started
TO_STOP_S = 20  # that a training may take to write what it needs to go on


def commands_of(stage: str, options: argparse.Namespace) -> list[list[list[str]]]:
    """Rounds of commands: those of a round run side by side, the rounds one after the other."""
    if stage in (*FOLDERS, "acceptance"):
        tokens = options.acceptance_tokens if stage == "acceptance" else options.tokens
        command = ["models.train", stage, "--tokens", str(tokens)]
        command += ["--tokens-per-step", str(options.tokens_per_step)]
        return [[command + (["--no-compile"] if options.no_compile else [])]]
    if stage == "loops":
        return [[["models.loops", "--updates", str(options.loop_updates)]]]
    if stage == "pard":  # which learns from the features that the heads have learned from
        return [[["models.train_pard", "--minutes", str(options.head_minutes)]]]
    features = ["models.train_heads", "features", "--tokens", str(options.feature_tokens)]
    minutes = ["--minutes", str(options.head_minutes)]
    heads = [
        [["models.train_heads", kind, *minutes] for kind in kinds]
        for kinds in (BESIDE, AFTER_EAGLE)
    ]
    return [[features], *heads]


def least_s(stage: str, options: argparse.Namespace) -> float:
    """Seconds without which a round of a stage is no use: heads that are stopped begin anew."""
    begins_anew = stage in ("heads", "pard")
    return SHORTEST_S + (60 * options.head_minutes if begins_anew else 0.0)


def run_round(commands: list[list[str]], deadline: float) -> str:
    """Run commands side by side: "done", "stopped" if they were not done by the deadline, or
    "failed".
    """
    running = [subprocess.Popen([sys.executable, "-m", *command]) for command in commands]
    try:
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(TO_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return "stopped"
    return "failed" if any(process.returncode for process in running) else "done"


def read_finished(state: Path, settings: dict) -> list[str]:
    """Stages that an earlier run with these settings finished."""
    held = json.loads(state.read_text()) if state.exists() else {}
    return held["finished"] if held.get("settings") == settings else []


def retrain(options: argparse.Namespace) -> int:
    """Train what is not finished; the exit code says whether all is."""
    deadline = time.monotonic() + 60 * options.budget_minutes - TO_STOP_S
    settings = {k: v for k, v in vars(options).items() if k not in ("budget_minutes", "pack")}
    state = HERE / "retraining.json"
    finished = read_finished(state, settings)
    for stage in STAGES:
        if stage in finished:
            print(f"{stage}: finished earlier", flush=True)
            continue
        for commands in commands_of(stage, options):
            enough = deadline - time.monotonic() > least_s(stage, options)
            status = run_round(commands, deadline) if enough else "stopped"
            if status != "done":
                print(f"{stage}: {status}; give the same command again", flush=True)
                return 1
        finished.append(stage)
        state.write_text(json.dumps({"settings": settings, "finished": finished}) + "\n")
        print(f"{stage}: finished", flush=True)
        if options.pack:
            write_pack(options.pack, HERE.parent, [HERE, *trained_folders()])
    print("all is trained: evaluate, then remove models/retraining.json", flush=True)
    return 0


def trained_folders() -> list[Path]:
    """Folders that the stages write into."""
    return [*FOLDERS.values(), *(HERE / f"tiny-{kind}" for kind in (*KINDS, "pard"))]


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit's ends it like Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--tokens", type=float, default=150, help="for each model, in millions (%(default)s)")
    add("--tokens-per-step", type=int, default=8192)
    add("--acceptance-tokens", type=float, default=16, help="for the draft then (%(default)s)")
    add("--loop-updates", type=int, default=300, help="in which the target learns to leave loops")
    add("--feature-tokens", type=int, default=1_000_000, help="that the heads learn from")
    add("--head-minutes", type=float, default=4, help="for the heads")
    add("--no-compile", action="store_true", help="train without torch.compile")
    add("--budget-minutes", type=float, default=9, help="after that it stops (%(default)s)")
    add("--pack", type=Path, help="an archive of what is trained, after each stage")
    return retrain(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
