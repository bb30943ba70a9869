# Commands for development; `make help` lists them.

PYTHON ?= python3
ARGS ?=

VENV := .venv
LOWEST := .venv-lowest
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
RUN := algorithm=ppo env=CartPole-v1
PARALLEL := --numprocesses auto --dist worksteal
CORE := functional distributions nets spaces test_events.py test_seeding.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-all test-core test-lowest wheel check conf docs site bench scores clean

help: ## List the targets.
	@echo "Usage: make <target> [ARGS=\"more arguments\"] [PYTHON=python3.11]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(VENV)/.installed ## Train PPO on CartPole-v1; ARGS are additional overrides.
	$(BIN)/maze-run $(RUN) $(ARGS)

test: $(VENV)/.installed-test ## Run the default tests on all cores; ARGS replaces the arguments of pytest.
	$(BIN)/python -m pytest $(or $(ARGS),$(PARALLEL) -m "not exhaustive")

test-all: $(VENV)/.installed-test ## Run all tests on all cores, as in CI.
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-core: $(VENV)/.installed-test-core ## Run the tests of platforms without worker processes.
	$(BIN)/python -m pytest -m "not slow and not exhaustive" $(or $(ARGS),$(addprefix tests/,$(CORE)))

# Deprecation warnings are ignored: old packages warn about newer dependencies. The lowest versions only have wheels for Python 3.11.
test-lowest: $(LOWEST)/.installed ## Run the default tests with the lowest supported version of each direct dependency.
	$(LOWEST)/bin/python -m pytest -W ignore::DeprecationWarning $(or $(ARGS),$(PARALLEL) -m "not exhaustive")

wheel: ## Build the wheel and the source distribution in dist/.
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check build
	$(BIN)/python -m build

check: $(VENV)/.installed-dev ## Check linting, formatting, types and generated files.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_program.py
	$(BIN)/python docs/generate.py --check

conf: $(VENV)/.installed ## Generate conf/ and the tables of settings in docs/ from the dataclasses.
	$(BIN)/python docs/generate.py

docs: $(VENV)/.installed-test ## Check links, commands and code of the documentation.
	$(BIN)/python -m pytest tests/test_docs.py $(ARGS)

site: $(VENV)/.installed-docs ## Build the documentation site in site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(VENV)/.installed-benchmark ## Measure throughput against other libraries.
	$(BIN)/python benchmarks/throughput.py $(ARGS)

scores: $(VENV)/.installed-test ## Run the presets without a score and write docs/scores.md.
	$(BIN)/python -m benchmarks.scores $(ARGS)

clean: ## Remove the virtual environment, builds and caches, but not outputs/.
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed separately, because together with other packages pip may select another build.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python >= 3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) --editable .
	@touch $@

$(LOWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip compile -q --no-deps --resolution lowest-direct --python $(LOWEST)/bin/python pyproject.toml -o $(LOWEST)/lowest.txt
	$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python --constraint $(LOWEST)/lowest.txt --editable ".[test-lowest]"
	@touch $@

$(VENV)/.installed-%: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[$*]"
	@touch $@ $(VENV)/.installed
