# `make quickstart` and `make test` need only Python 3.11 or 3.12 (with venv), a C++ compiler and this folder.

PYTHON ?= python3
VENV ?= .venv
SHELL := /bin/bash

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One thread per process: the tests fork several ranks, and a parent's threads do not survive in its children.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help quickstart test test-slow test-slurm test-gpu check format clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(INSTALLED)  ## Train, export and decode a small model, with a report in quickstart/ (8 to 9 minutes on 2 quiet cores)
	$(BIN)/python tools/quickstart.py

test: check  ## Lint, types, and all tests except the slow ones and those that need a GPU or Slurm
	$(TEST) -m "not slow and not gpu and not slurm"

test-slow: $(INSTALLED)  ## The slow tests
	$(TEST) -m "slow and not gpu"

test-slurm: $(INSTALLED)  ## The tests on a real Slurm of four nodes on this host, except the slow ones (as root; see docs/slurm.md)
	$(TEST) -m "slurm and not slow and not gpu" $(PYTEST_OPTIONS)

test-gpu: $(INSTALLED)  ## The tests that need a GPU
	$(TEST) -m gpu

check: $(INSTALLED)  ## Lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)  ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove the virtual environment and the quickstart's output
	rm -rf $(VENV) quickstart

$(INSTALLED): requirements.txt requirements-dev.txt tests/oracles/requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13), f"Python 3.11 or 3.12 is needed, {sys.version} found"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -r requirements-dev.txt
	$(BIN)/python -m pip install --no-deps -e .
	rm -rf $(VENV)/oracles
	$(BIN)/python -m pip install --no-deps --target $(VENV)/oracles -r tests/oracles/requirements.txt
	@touch $@
