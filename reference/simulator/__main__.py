"""How many GPUs a trace needs at a service level objective, by simulation on this machine.

    python -m reference.simulator --model llama-3-8b --gpu h100 --trace poisson:rate=8 \\
        --policy chunked --slo ttft=0.5,itl=0.05
    python -m reference.simulator --trace chats:rate=4,turns=8,pause=60 --host-gb 100 --disk-gb 1000
    python -m reference.simulator --policy disaggregated --replicas 4 --prefill 1 --link 100

prints TTFT, ITL, goodput and the GPUs needed. --policy all compares every policy. --out FOLDER
draws latencies over the arrival rate and goodput over the number of GPUs. Every number is a
prediction.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import sys
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command

NAMES = ("static", "dynamic", "continuous", "chunked", "disaggregated")
ROUTER_NAMES = ("round-robin", "least-loaded", "prefix-aware")


def count(text: str) -> int:
    """A whole number above 0 and below a million, for argparse."""
    if not text.isdecimal() or not 0 < int(text[:9]) < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: a whole number above 0")
    return int(text)


def share(text: str) -> float:
    """A number above 0, at most 1, for argparse."""
    try:
        if 0 < float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted: above 0, at most 1")


def size(text: str, least: float = 0.0) -> float:
    """A finite number of at least this, for argparse."""
    try:
        if least <= float(text) < 10**9:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted: a number, {least:g} or more")


def rate(text: str) -> float:
    """A bandwidth, for argparse."""
    return size(text, least=0.001)


def failures(text: str) -> list[tuple[float, int]]:
    """ "30:0,60:2": replica 0 dies at 30 s and replica 2 at 60 s, for argparse."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return [(float(at_s), int(replica)) for at_s, replica in pairs]
    except ValueError:
        accepted = "seconds:replica,seconds:replica"
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: {accepted}") from None


def new_parser() -> OneLineParser:
    """Every option, with its default."""
    parser = OneLineParser(
        prog="python -m reference.simulator",
        description=__doc__.split("\n")[0],
        epilog="models and GPUs: python -m lessons.l01_roofline --help lists them",
    )

    def option(name: str, default, text: str, kind: type = str, **more) -> None:
        text = text if default is None else f"{text} (default: %(default)s)"
        parser.add_argument(name, default=default, type=kind, help=text, **more)

    option("--model", "llama-3-8b", "a model of lesson 1")
    option("--gpu", "h100", "a GPU of lesson 1's table")
    option("--gpus-per-replica", None, "default: the fewest that hold the weights", count)
    option("--trace", "poisson:rate=8", "poisson:rate=8,requests=600,prompt=1024,output=200, "
           "bursty:rate=8,cv=4, chats:rate=4,turns=8,pause=60, mooncake:rate=4, or a file of JSON "
           "lines (ours, or Mooncake's)")  # fmt: skip
    option("--policy", "chunked", f"{', '.join(NAMES)}, or all", choices=(*NAMES, "all"))
    option("--router", "least-loaded", "which replica gets a request", choices=ROUTER_NAMES)
    option("--slo", "ttft=0.5,itl=0.05", "limits in seconds")
    option("--attain", 0.99, "share of the requests that has to keep the limits", share)
    option("--replicas", None, "simulate so many; default: find how many are needed", count)
    option("--most-replicas", 64, "when looking for how many", count)
    option("--max-num-batched-tokens", 1024, "of a chunked step", count)
    option("--max-num-seqs", None, "places of a replica; default: 256, 32 in waves", count)
    option("--host-gb", 0.0, "host memory for K and V, of each GPU", size)
    option("--disk-gb", 0.0, "of a disk below it", size)
    option("--host-link", 64.0, "GB/s between a GPU and host memory", rate)
    option("--disk-link", 14.0, "GB/s of a disk", rate)
    option("--prefill", None, "replicas that compute prompts, if disaggregated; default: the best "
           "of a quarter, a half and three quarters", count)  # fmt: skip
    option("--link", 3600.0, "Gb/s between GPUs of replicas; 3600: NVLink", rate)
    option("--send", "end", "K and V of a prompt: at its end, or layer by layer beside it",
           choices=("end", "layers"))  # fmt: skip
    option("--failures", None, "30:0 lets replica 0 die at 30 s; needs --replicas", failures)
    option("--step-cost", None, "measured steps instead of data sheets: a file of lesson 14's "
           "lab/cost.py", Path)  # fmt: skip
    option("--out", None, "folder for the figures", Path)
    return parser


def run(args: argparse.Namespace) -> int:
    """Simulate, print, draw. Returns the exit code."""
    from reference.simulator import report

    if args.failures and not args.replicas:
        raise ValueError("--failures: got no --replicas; accepted: with --replicas")
    if args.out is not None:
        args.out = args.out.expanduser()
        check_writable(args.out)
    return report.run(args)


def main(arguments: list[str] | None = None) -> int:
    """The command; every mistake is one line."""
    return run_command("reference.simulator", lambda: run(new_parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
