# make demo: real telemetry in, a verdict out.  make test: the whole check.  make test SLOW=1: with the long tests.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint docs lock clean

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
MARKS := $(if $(SLOW),not nightly,not slow and not nightly)
# WHEEL=1 tests the built wheel instead of the checkout: what a user installs.
INSTALL := $(if $(WHEEL),.,--editable .)
STAMP := .venv/installed-$(if $(WHEEL),wheel,editable)
SOURCES := $(if $(WHEEL),$(shell find analyzer collector dashboard instrumented_engine rules -type f -not -path '*/__pycache__/*'))

help:
	@sed -n '1s/^# //p' Makefile | tr -s ' ' && echo "make lint | docs | lock | clean; options: SLOW=1, WHEEL=1, PYTHON=..., ARGS=... (to pytest or demo)"

$(STAMP): requirements.lock pyproject.toml $(SOURCES)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name one with: make PYTHON=/path/to/python" >&2; exit 4; }
	@test -x $(BIN)/python || { echo "making .venv with $(PYTHON)"; "$(PYTHON)" -m venv .venv; } \
	  || { echo "no virtual environment: is the venv module installed and this folder writable?" >&2; exit 4; }
	@total=$$(grep -c '==' requirements.lock); \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements.lock 2>&1 \
	  | tee .venv/install.log \
	  | awk -v total=$$total '/^(Collecting|Processing|Requirement already)/ {n++; printf "\r[%3d of %d packages] ", (n > total ? total : n), total; fflush()} /^Installing/ {printf "\runpacking %d packages  ", total; fflush()} END {print ""}' \
	  || { echo "the packages could not be installed: is a package index reachable? Details: .venv/install.log" >&2; exit 4; }
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps --force-reinstall $(INSTALL) > .venv/install-phasewise.log 2>&1 \
	  || { echo "phasewise itself could not be installed; details: .venv/install-phasewise.log" >&2; exit 4; }
	@rm -f .venv/installed-* && touch $@

demo: $(STAMP)
	@$(BIN)/phasewise demo $(ARGS)

lint: $(STAMP)
	mkdir -p build/ns && ln -sfn ../.. build/ns/phasewise
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/mypy tests

test: lint
	$(BIN)/pytest -m "$(MARKS)" $(ARGS)

docs: $(STAMP)
	$(BIN)/python docs/generate.py

lock: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	{ head -1 requirements.lock; $(BIN)/uv pip compile pyproject.toml --extra dev --python-version 3.11 --universal --upgrade --quiet --no-header --no-annotate --no-emit-index-url; } > .venv/lock && mv .venv/lock requirements.lock

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
