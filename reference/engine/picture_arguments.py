"""The argument that limits the pictures of a prompt."""

import json
import re
from contextlib import suppress

from lessons.toolbox.model.arguments import is_whole, refuse


def read_picture_limit(limit: dict[str, int] | str) -> dict[str, int]:
    """limit_mm_per_prompt as vLLM takes it: an object, JSON, or "image=2". Raises ValueError."""
    given = limit
    if isinstance(limit, str):
        with suppress(ValueError):
            given = json.loads(re.sub(r"^image=(\d+)$", r'{"image": \1}', limit))
    fits = isinstance(given, dict) and given.keys() == {"image"} and is_whole(given["image"], 0)
    if not fits:
        refuse("limit_mm_per_prompt", limit, '{"image": a whole number, 0 or more}')
    return dict(given)
