"""Render one template and end: `templates` runs this file in a process of its own.

It reads {"template", "variables"} as JSON and writes the text as JSON. It imports nothing of the
course, so that it starts in a tenth of a second.
"""

import json
import sys

CPU_S = 1
MEMORY_BYTES = 512 * 2**20


def limit_resources() -> None:
    """From now on the system ends this process if it takes more. Windows has no such limits; there
    only the caller's clock ends it.
    """
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    if sys.platform == "linux":  # macOS counts all that is mapped, the system's libraries too
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def main() -> None:
    """The process."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    request = json.load(sys.stdin)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    limit_resources()
    try:
        text = environment.from_string(request["template"]).render(**request["variables"])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    json.dump(text, sys.stdout)


if __name__ == "__main__":
    main()
