"""vLLM's names, and what each does here: README.md."""
