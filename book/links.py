"""What a link, an image and a heading's anchor look like in our pages."""

import re

# whether it is an image, its label, its target; a title in quotes may stand behind the target
LINK = re.compile(
    r"(?P<bang>!?)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]"
    r"\((?P<target>[^()\s]+(?:\([^()]*\))?)(?P<title>\s+\"[^\"]*\")?\)"
)


def slug(heading: str) -> str:
    """The anchor that a heading gets on GitHub. Its links count by their labels."""
    heading = LINK.sub(r"\g<label>", heading)
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
