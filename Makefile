# The Inference Ladder. `make` alone lists what there is.
PYTHON ?= python3
RUN := .venv/bin/python
LESSON ?=
OUT ?= build
TESTS ?=
SINCE ?=
MODEL ?= models/tiny
IMPL ?=
LAB ?=
REHEARSE ?=
MINUTES ?=
PLAN ?=
PACK ?=
SERVE ?= --port 8000
FILE ?=
GPU ?=
COMPARE ?=
EXPORT ?=
VERSION ?=

.DEFAULT_GOAL := help
.PHONY: help setup peers clients book playground demo serve test test-all check progress board lab bench doctor gpu proof profile slides handouts film wheel release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install into .venv, once (without an NVIDIA GPU the small PyTorch; TORCH_INDEX= for the other one)
	@test -x $(RUN) && cmp -s requirements.txt .venv/installed || sh lessons/toolbox/setup.sh $(PYTHON)

# The index has CPU builds of torch, which spare gigabytes of CUDA. TORCH_INDEX= asks only where pip asks anyway.
PEERS := reference/bench/peers/requirements.txt
# what vLLM itself says that its interface has
NAMES := reference/engine/compatibility/vllm_names
peers: ## vLLM's CPU build and llama.cpp in an environment of their own, .venv-peers, to compare with (Linux on x86-64)
	@test -x .venv-peers/bin/python && cmp -s $(PEERS) .venv-peers/installed || { \
	  TORCH_INDEX="$${TORCH_INDEX-https://download.pytorch.org/whl/cpu}" \
	  sh lessons/toolbox/setup.sh $(PYTHON) .venv-peers $(PEERS) 3.11 --no-deps && \
	  .venv-peers/bin/python $(NAMES).py > .venv-peers/names.json && cp .venv-peers/names.json $(NAMES).json; }

CLIENTS := tests/server/clients/requirements.txt
clients: ## seven clients of the server in an environment of their own, .venv-clients, to test with (Python 3.11 or newer)
	@test -x .venv-clients/bin/python && cmp -s $(CLIENTS) .venv-clients/installed || \
	  TORCH_INDEX= sh lessons/toolbox/setup.sh $(PYTHON) .venv-clients $(CLIENTS) 3.11 --no-deps openai

BOOK := book/requirements.txt
book: ## the course as pages for a browser, in build/book/html, without a server or the network (Python 3.11 or newer)
	@test -x .venv-book/bin/python && cmp -s $(BOOK) .venv-book/installed || \
	  TORCH_INDEX= sh lessons/toolbox/setup.sh $(PYTHON) .venv-book $(BOOK) 3.11 --no-deps "sphinx, myst_nb, furo"
	@.venv-book/bin/python -m book.stage build/book/source
	@.venv-book/bin/python -m sphinx -W --keep-going -d build/book/doctrees build/book/source build/book/html
	@echo "open build/book/html/index.html"

playground: ## the pages with sliders by themselves, in build/playground, in a second
	@$(PYTHON) -m book.playground.alone build/playground

demo: setup ## climb the ladder: the same prompts through every rung, the same tokens (IMPL=exercises: on your code)
	@$(RUN) -m reference.ladder --model $(MODEL) --out $(OUT) $(if $(IMPL),--impl $(IMPL))

serve: setup ## the OpenAI-compatible server on MODEL (SERVE="--port 8080 --api-key secret": vllm serve's flags; IMPL=exercises: on your code)
	@$(RUN) -m reference.server --model $(MODEL) $(SERVE) $(if $(IMPL),--impl $(IMPL))

test: setup ## what the course claims, tested; of the longest tests what fits into its time (TESTS=path for a part, SINCE=main for what changed)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal --timeout 600 --quick $(if $(SINCE),--since $(SINCE)) $(TESTS)

test-all: setup ## the same in the long forms: every case, more seeds, every kernel compiled again
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal --timeout 600 --all $(if $(SINCE),--since $(SINCE)) $(TESTS)

check: setup ## your exercises, checked: make check LESSON=02 (or one: LESSON=2.1)
	@$(RUN) -m lessons.toolbox.exercises check $(LESSON)

progress: setup ## the map of the course: what you solved, what is left, how many minutes (EXPORT=file.csv)
	@$(RUN) -m lessons.toolbox.exercises progress $(if $(EXPORT),--export $(EXPORT))

# --allow-root, because in a container everybody is root; the address that it prints holds the key
lab: setup ## JupyterLab on the notebooks, with LANG=ko_KR on Korean copies in build/ko/notebooks, too (in a container: LAB="--ip 0.0.0.0 --no-browser")
	@case "$${INFERENCE_LADDER_LANG:-$${LC_ALL:-$$LANG}}" in ko*) $(RUN) -m book.notebooks write build/ko/notebooks;; esac
	@$(RUN) -m jupyterlab --notebook-dir . --allow-root $(LAB)

board: setup ## a kernel of yours, checked and counted, beside your earlier ones (FILE=mine.py; an open task)
	@$(RUN) -m reference.bench.open_tasks board $(FILE)

bench: setup ## a lesson's benchmark: make bench LESSON=03 (into build/bench, or OUT=folder)
	@$(RUN) -m lessons.toolbox.measure.bench $(LESSON) $(if $(filter-out file,$(origin OUT)),--out $(OUT))

doctor: setup ## what this machine can run, and what it cannot and why
	@$(RUN) -m lessons.toolbox.measure.device

# A borrowed GPU machine has torch and triton but no .venv and no network, so nothing is installed here.
gpu: ## prove and measure everything that needs a GPU, in MINUTES=9, the next run goes on (OUT=results/<device>, LESSON=03 for one; PACK=file: in one archive; PLAN=1: only say what; REHEARSE=1: on a pretended GPU)
	@$$(test -x $(RUN) && echo $(RUN) || echo $(PYTHON)) -m lessons.toolbox.proof $(if $(PLAN),plan,gpu) $(if $(LESSON),--lesson $(LESSON)) \
	  $(if $(REHEARSE),--rehearse --budget-minutes 120) $(if $(MINUTES),--budget-minutes $(MINUTES)) $(if $(filter-out file,$(origin OUT)),--out $(OUT)) $(if $(PACK),--pack $(PACK))

proof: setup ## which kernels are proved: in the interpreter, by the compiler, on which GPU
	@$(RUN) -m lessons.toolbox.proof table

profile: setup ## a lesson's kernels line by line, counted without a GPU: LESSON=09, or FILE=mine.py:try_it (GPU=a100, COMPARE=naive)
	@$(RUN) -m lessons.toolbox.profile $(if $(FILE),$(FILE),$(LESSON)) $(if $(GPU),--gpu $(GPU)) $(if $(COMPARE),--compare $(COMPARE)) \
	  $(if $(filter-out file,$(origin OUT)),--out $(OUT))

slides: setup ## lessons for a projector: pictures, index.html with arrow keys, slides.pdf (LESSON=03 for one; OUT=build/slides)
	@$(RUN) -m reference.bench.slides $(if $(LESSON),--lesson $(LESSON)) $(if $(filter-out file,$(origin OUT)),--out $(OUT))

handouts: setup ## the quizzes and exercises to print, and their answers apart (LESSON=03 for one; OUT=build/handouts)
	@$(RUN) -m reference.bench.handouts $(if $(LESSON),--lesson $(LESSON)) $(if $(filter-out file,$(origin OUT)),--out $(OUT))

film: setup ## the moving picture of the front page, from a new run of the engine (OUT=folder: not over the committed one)
	@$(RUN) -m reference.trace.film $(if $(filter-out file,$(origin OUT)),--out $(OUT))

wheel: setup ## the course as a wheel for pip, in build/wheel (its build program comes from the network)
	@rm -rf build/wheel
	@$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	@ls build/wheel/*.whl

release: ## check everything, build and try the wheel, and tag the commit: VERSION=0.2.0 (uploads nothing)
	@PYTHON=$(PYTHON) sh deploy/release.sh "$(VERSION)"

clean: ## remove what was built (not .venv)
	@rm -rf build .pytest_cache .ruff_cache .hypothesis
