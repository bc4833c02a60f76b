"""Trainings that take a second: of models with one layer, on random tokens."""

import numpy as np

from models import train


def train_small_models(monkeypatch, folder) -> None:
    """From now on `models.train` trains models/tiny and models/tiny-draft as small ones, into
    `folder`.
    """
    stream = np.random.default_rng(0).integers(0, 4096, 6000).astype(np.uint16)
    text = {"wide": stream, "own": stream[:3000], "held_out": stream[:600]}
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    small |= dict(num_key_value_heads=1, intermediate_size=16)
    monkeypatch.setattr(train, "streams", lambda: text)
    monkeypatch.setattr(train, "HERE", folder / "models")
    (folder / "build").mkdir()
    for name in train.FOLDERS:
        monkeypatch.setitem(train.SHAPES, name, small)
        monkeypatch.setitem(train.FOLDERS, name, folder / name)
