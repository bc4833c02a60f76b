"""Sections of a Markdown text."""


def sections(text: str) -> dict[str, str]:
    """{heading of level 2: what is under it}; code fences hide what looks like a heading."""
    found, heading, fenced = {}, "", False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("## ") and not fenced:
            heading = line[3:].strip().replace("*", "")
            found[heading] = ""
        elif heading:
            found[heading] += line + "\n"
    return found


def section(text: str, heading: str) -> str:
    """The section whose heading begins with `heading`, in any case; "" without one."""
    return next(
        (body for name, body in sections(text).items() if name.lower().startswith(heading.lower())),
        "",
    )
