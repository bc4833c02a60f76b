"""The functions of `make profile` on a real GPU, for Nsight Compute to count what they do there.

    ncu --set full --nvtx --profile-from-start off --clock-control none -o counters \\
        python -m lessons.toolbox.profile.on_gpu [09 10 ...]
    ncu --import counters.ncu-rep --csv --page raw > counters.csv

Each function runs once before, so that nothing is compiled while it is watched. Its launches stand
in an NVTX range with the lesson's number and the function's name, such as "09 optimized".
"""

import dataclasses
import importlib
import inspect
import sys
import traceback
from pathlib import Path

import torch

LESSONS = Path(__file__).resolve().parents[2]


def moved(value):
    """A value with its tensors on the GPU, those in tuples, lists and data classes included."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, (tuple, list)):
        return type(value)(moved(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: moved(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **fields)
    return value


def functions_of(number: str) -> dict:
    """{name: function} of a lesson's lab/profile.py but `naive`, their tensors on the GPU."""
    room = next(LESSONS.glob(f"l{number}_*"))
    module = importlib.import_module(f"lessons.{room.name}.lab.profile")
    for name, value in list(vars(module).items()):
        if not name.startswith("__") and not inspect.ismodule(value):
            setattr(module, name, moved(value))
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    }


def main(numbers: list[str]) -> int:
    known = sorted(p.parts[-3][1:3] for p in LESSONS.glob("l*/lab/profile.py"))
    failed = 0
    for number in numbers or known:
        try:
            for name, function in functions_of(number).items():
                if name == "naive":
                    continue
                function()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                torch.cuda.nvtx.range_push(f"{number} {name}")
                function()
                torch.cuda.synchronize()
                torch.cuda.nvtx.range_pop()
                torch.cuda.profiler.stop()
                print(f"{number} {name}", flush=True)
        except Exception:
            failed += 1
            print(f"{number} failed:", traceback.format_exc(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
