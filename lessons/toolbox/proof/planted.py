"""A module with one line changed: does the test see the bug?

    buggy = with_bug(optimized, tmp_path, "l_i * alpha + tl.sum", "l_i + tl.sum")
    with pytest.raises(NotEquivalent):
        prove(buggy.decode_attention, naive.decode_attention, inputs)

Choose inputs of which the bug reads nothing that lies outside: a kernel that leaves its tensors may
end the process, and that shows nothing.
"""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType


def with_bug(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """`module` once more, under another name and from a file in `folder`, with the one place where
    its source says `old` saying `new`. Raises ValueError unless it says so exactly once.
    """
    source = inspect.getsource(module)
    if source.count(old) != 1:
        raise ValueError(f"old: got {old!r}, {source.count(old)} times in the source; accepted: 1")
    path = folder / f"buggy_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{folder.name}", path)
    buggy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(buggy)
    return buggy
