"""Checks of the exercises. `pytest tests/exercises` checks solutions/, `--impl exercises` checks
what you wrote.
"""
