"""What a plain request meets: a feature that it does not ask for is neither imported nor
entered.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
# Counted, with the packages around them. Both numbers may only fall.
MODULES, FILES_ENTERED = 61, 28
FEATURES = (
    # kernels, and the sampler of requests that draw
    "lessons.toolbox.kernels",
    "lessons.l02_naive_attention.batched",
    "lessons.l16_speculative_sampling",
    "lessons.l17_tree_speculation",
    "lessons.l18_weight_quantization",
    "lessons.l20_parallelism",
    "lessons.l21_multi_lora",
    "lessons.l22_serving",
    "lessons.l23_experts",
    "lessons.l24_structured_outputs",
    "reference.features",
    "reference.parallel",
    "reference.speculation",
    "reference.vision",
    "reference.weights.quantization",
    "reference.checkpoints.gguf",
)
SERVE = """
import json, sys
from pathlib import Path

from reference import LLM, SamplingParams

llm = LLM("models/tiny", device="cpu", num_gpu_blocks_override=8, max_num_seqs=1)
entered = set()

def note(frame, event, argument):
    if event == "call":
        entered.add(frame.f_code.co_filename)

sys.setprofile(note)
llm.generate("def f(", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
sys.setprofile(None)
root = Path.cwd()
ours = [Path(file) for file in entered if Path(file).is_relative_to(root / "lessons")
        or Path(file).is_relative_to(root / "reference")]
modules = [name for name in sys.modules if name.partition(".")[0] in ("lessons", "reference")]
print(json.dumps([sorted(modules), sorted(str(file.relative_to(root)) for file in ours)]))
"""


@pytest.fixture(scope="module")
def met() -> tuple[list[str], list[str]]:
    """The modules that a plain greedy request has loaded, and the files that it enters."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    modules, files = json.loads(done.stdout.splitlines()[-1])
    return modules, files


def test_no_feature_is_imported_before_it_is_asked_for(met):
    modules, _ = met
    found = [name for name in modules if f"{name}.".startswith(tuple(f"{x}." for x in FEATURES))]
    assert not found, f"a plain request imports {', '.join(found)}"


def test_a_plain_request_meets_few_modules_and_files(met):
    modules, files = met
    assert len(modules) <= MODULES and len(files) <= FILES_ENTERED, "\n".join([*modules, *files])
