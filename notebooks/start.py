"""What each notebook begins with: the course's folder, and what this machine can do."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    import torch

    from lessons.toolbox.exercises import cells
    from lessons.toolbox.measure.device import doctor
except ImportError as error:
    raise SystemExit(
        f"{error}: run `make setup` in {ROOT}, then choose its .venv as the kernel."
    ) from None


def begin(seed: int) -> None:
    """Print what the machine can do, seed the random numbers, and make `%%exercise` known."""
    from IPython import get_ipython

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # one thread: steadier on a machine that others use, too
    cells.register(get_ipython())
    doctor()
