"""Where the embedded models are."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = str(REPOSITORY / "models/tiny")
ADAPTERS = {name: f"{MODEL}-lora-{name}" for name in ("sql", "tests")}
