# Two commands: `make demo` runs the main job, `make test` the tests. `make help` lists all.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STATE ?= .draftworks
export PYTHONUNBUFFERED = 1

.PHONY: help install demo up down test lint clean
help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

install: $(VENV)/installed ## a virtual environment with everything for one machine
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[orchestrator,gpu,demo,dev]'
	@touch $@

demo: install ## a real drafter for a real model, from nothing, in minutes
	@$(BIN)/python -m deployments.demo --home $(STATE)

up: install ## Prefect server and workers on loopback, to play with
	@$(BIN)/python -m deployments.local up --home $(STATE)

down: install ## end them
	@$(BIN)/python -m deployments.local down --home $(STATE)

test: install ## the tests (some run the bundled model, so it is fetched first)
	$(BIN)/python -m draftworks fetch
	$(BIN)/python -m pytest

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: down ## remove the environment and what the demo made
	rm -rf $(VENV) $(STATE)
