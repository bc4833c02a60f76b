"""A plugin of pytest that keeps the tests which only a GPU can settle: those that record a proof,
and those marked `gpu`. A borrowed GPU has minutes, and the other tests are the same anywhere.

    pytest -p lessons.toolbox.proof.first lessons/l03_kv_cache
"""


def pytest_collection_modifyitems(config, items) -> None:
    kept = [item for item in items if is_first(item)]
    config.hook.pytest_deselected(items=[item for item in items if not is_first(item)])
    items[:] = kept


def is_first(item) -> bool:
    """Whether a test records a proof or needs a GPU."""
    return "proof" in item.fixturenames or item.get_closest_marker("gpu") is not None
