.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check tiny clean

# The first of these that runs and is new enough; `make PYTHON=/path/to/python3.12 ...` takes another.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)

BIN  := .venv/bin
VENV := .venv/.made

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

demo: $(VENV) ## ablate the tiny model's tensors; the table and the pictures go to demo/
	$(BIN)/k2probe demo

test: $(VENV) ## the tests, on two processes; more of pytest's options in ARGS
	$(BIN)/python -m pytest -n 2 $(ARGS)

check: $(VENV) ## lint, format, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

tiny: $(VENV) ## train the shipped model anew
	$(BIN)/python -m training.prompts
	$(BIN)/python -m training.train --out probe/tiny

clean: ## remove .venv and all that is made
	rm -rf .venv build dist demo .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "k2-probe needs Python 3.11 or newer; found: $(or $(PYTHON),none)." \
		     "To name another: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Making .venv with everything in it: a few minutes, once."
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
