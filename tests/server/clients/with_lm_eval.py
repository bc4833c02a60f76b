"""lm-eval's task of a few lines by log-likelihoods: `python with_lm_eval.py URL TOKENIZER` prints
them as JSON. TOKENIZER: a folder.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

LINES = [
    {"begin": "import numpy", "ends": [" as np", " of the"], "right": 0},
    {"begin": "for i in", "ends": [" banana", " range(10)"], "right": 1},
    {"begin": "def __init__", "ends": ["(self):", "Dog", " = 1"], "right": 0},
]
TASK = {
    "task": "ends",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{begin}}",
    "doc_to_choice": "{{ends}}",
    "doc_to_target": "{{right}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}

with tempfile.TemporaryDirectory() as folder:
    os.environ["HF_HOME"] = folder
    data = Path(folder, "lines.json")
    data.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    model = LocalCompletionsAPI(
        base_url=sys.argv[1] + "/v1/completions",
        model="tiny",
        tokenizer=sys.argv[2],
        tokenizer_backend="huggingface",
        max_length=512,
        max_retries=1,
        batch_size=2,
    )
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    found = simple_evaluate(model, tasks=[task], bootstrap_iters=0)
said = [
    [line["doc"]["begin"], end, *answer]
    for line in found["samples"]["ends"]
    for end, (answer,) in zip(line["doc"]["ends"], line["resps"])
]
print(json.dumps({"said": said, "acc": found["results"]["ends"]["acc,none"]}))
