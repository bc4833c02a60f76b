"""The embedded models and the scripts that trained them."""

# first, because it decides how Triton runs, and transformers imports Triton
import lessons  # noqa: F401
