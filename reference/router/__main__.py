"""A router in front of several servers.

python -m reference.router --replicas http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000
"""

# Nothing slow is imported here: it takes a while, and Ctrl-C may come meanwhile.
import sys

from lessons.toolbox.command import run_command


def route(arguments: list[str]) -> int:
    """Route until a signal comes. Returns the exit code."""
    from reference.router.args import read_args

    args = read_args(arguments)
    if args.impl:
        from reference.server.__main__ import use_exercises

        use_exercises(args.impl)
    from reference.router.run import serve_forever

    return serve_forever(args)


def main(arguments: list[str] | None = None) -> int:
    """python -m reference.router; every mistake is one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_command("reference.router", lambda: route(arguments))


if __name__ == "__main__":
    sys.exit(main())
