"""Results in one file, or in a few of them: what a borrowed machine gives back."""

import tarfile
from collections.abc import Iterable
from pathlib import Path

PART_BYTES = 15 * 2**20


def write_pack(
    pack: Path, root: Path, folders: Iterable[Path], part_bytes: int = PART_BYTES
) -> list[Path]:
    """The files of some folders, by their paths below `root`, in the archive `pack`; returns what
    was written.

    More than part_bytes become pack.0, pack.1 …, which `cat pack.* | tar xz` unpacks. Pictures in
    pixels stay out: they are drawn again from the records.
    """
    whole = pack.with_name(pack.name + ".part")
    with tarfile.open(whole, "w:gz", compresslevel=3) as archive:
        for folder in folders:
            for file in sorted(folder.iterdir()):
                if file.is_file() and file.suffix != ".png":
                    archive.add(file, str(file.relative_to(root)))
    for old in (pack, *pack.parent.glob(f"{pack.name}.[0-9]*")):
        old.unlink(missing_ok=True)
    if whole.stat().st_size <= part_bytes:
        return [whole.replace(pack)]
    written, packed = [], whole.read_bytes()
    for number, start in enumerate(range(0, len(packed), part_bytes)):
        written.append(pack.with_name(f"{pack.name}.{number}"))
        written[-1].write_bytes(packed[start : start + part_bytes])
    whole.unlink()
    return written
