# Needs python3 (3.11 or newer) with venv, git and make; all else goes into .venv.
#   make demo          train a small network on handwritten digits, analyse its checkpoints, write a report
#   make test          the test suite; `make test-slow` what takes minutes or gigabytes
#   make lint types    ruff; mypy --strict on the package
#   make real-weights  fetch trained weights for the tests that want them
#   make bench         this package's benchmarks; `make peers` the same work beside other tools and bare NumPy;
#                      gigabytes and the engine's share: python -m benchmarks.large matrix, … checkpoint, .overhead
#   make docs          the documentation as a site, in site/
# PYTHON chooses the interpreter that .venv is made from: make test PYTHON=python3.13

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow bench peers lint format types real-weights docs clean

help:
	@sed -n 's/^#   //p' Makefile

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "diffract_dask needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make … PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

# One stamp per set of packages, so that a second run installs nothing and the demo does not wait for test tools.
.venv/.run .venv/.dev .venv/.docs: pyproject.toml | .venv/pyvenv.cfg
	@echo "installing into .venv; the first time takes about a minute"
	@$(BIN)/python -m pip install -qq --editable '.$(patsubst [run],,[$(patsubst .%,%,$(@F))])'
	@touch $@ .venv/.run

demo: .venv/.run
	$(BIN)/diffract-dask demo

test: .venv/.dev
	$(BIN)/python -m pytest -n auto

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow

bench: .venv/.dev
	$(BIN)/python -m benchmarks.run

peers: .venv/.dev real-weights
	$(BIN)/python -m benchmarks.peers.side_by_side

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.dev
	$(BIN)/mypy

real-weights: .venv/pyvenv.cfg
	$(BIN)/python benchmarks/fetch_real_weights.py

docs: .venv/.docs
	$(BIN)/sphinx-build -W --keep-going -q -b html docs site

clean:
	rm -rf .venv .bench-envs .mypy_cache .pytest_cache .ruff_cache .hypothesis .asv build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
