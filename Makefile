# Everything that a developer runs. `make help` lists it.

PYTHON ?= python3
ARGS ?=

VENV := .venv
LOWEST := .venv-lowest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
RUN := +algorithm=ppo env=CartPole-v1
PARALLEL := --numprocesses auto --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-all test-lowest check conf docs site bench scores clean

help: ## List the targets.
	@echo "Usage: make <target> [ARGS=\"more arguments\"] [PYTHON=python3.11]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(VENV)/.installed ## Train PPO on CartPole-v1; ARGS are further overrides.
	$(BIN)/maze-run $(RUN) $(ARGS)

test: $(VENV)/.installed-test ## Run the everyday tests, on all cores; ARGS replaces the arguments of pytest.
	$(BIN)/python -m pytest $(or $(ARGS),$(PARALLEL) -m "not exhaustive")

test-all: $(VENV)/.installed-test ## Run every test, on all cores, as CI does.
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# Old packages warn of their newer dependencies. Python 3.11: the lowest versions have no wheels for later ones.
test-lowest: $(LOWEST)/.installed ## Run the everyday tests with the lowest supported version of each direct dependency.
	$(LOWEST)/bin/python -m pytest -W ignore::DeprecationWarning $(or $(ARGS),$(PARALLEL) -m "not exhaustive")

check: $(VENV)/.installed-dev ## Lint, format and type checks, and whether generated files are current.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

conf: $(VENV)/.installed ## Write conf/ and the tables of settings in docs/ from the dataclasses.
	$(BIN)/python docs/generate.py

docs: $(VENV)/.installed-test ## Check links, commands and code of the documentation.
	$(BIN)/python -m pytest tests/test_docs.py $(ARGS)

site: $(VENV)/.installed-docs ## Build the documentation as a site, into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(VENV)/.installed-benchmark ## Measure throughput against other libraries.
	$(BIN)/python benchmarks/throughput.py $(ARGS)

scores: $(VENV)/.installed-test ## Run the presets that have no score yet, and write docs/scores.md.
	$(BIN)/python -m benchmarks.scores $(ARGS)

clean: ## Remove the virtual environment, builds and caches; runs in outputs/ stay.
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: with another package beside it pip may choose among builds of torch.
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
