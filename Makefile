# The Inference Ladder. `make` alone lists what there is.
PYTHON ?= python3
RUN := .venv/bin/python
LESSON ?=
OUT ?= build
TESTS ?=
MODEL ?= models/tiny

.DEFAULT_GOAL := help
.PHONY: help setup demo test lab bench doctor clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

setup: ## install into .venv, once (no GPU? TORCH_INDEX=https://download.pytorch.org/whl/cpu saves gigabytes)
	@$(PYTHON) lessons/toolbox/install.py

demo: setup ## climb the ladder: the same prompts through every rung, and proof that the tokens are the same
	@$(RUN) -m reference.ladder --model $(MODEL) --out $(OUT)

test: setup ## everything the course claims, tested (TESTS=path or TESTS="-k word" for a part)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto $(TESTS)

lab: setup ## JupyterLab on the notebooks
	@$(RUN) -m jupyterlab --notebook-dir .

bench: setup ## a lesson's benchmark: make bench LESSON=03
	@$(RUN) -m lessons.toolbox.bench $(LESSON)

doctor: setup ## what this machine can run, and what it cannot and why
	@$(RUN) -m lessons.toolbox.device

clean: ## remove what was built (not .venv)
	@rm -rf build .pytest_cache .ruff_cache .hypothesis
