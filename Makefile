# Two commands do all on a fresh machine with Python 3.11 or newer, make and a package index: `make demo`, `make test`.
# Everything lives in .venv; files named .venv/.* remember what was installed, so that a repeated call is quick.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PYTEST = $(BIN)/pytest $(if $(JOBS),--numprocesses $(JOBS) --dist worksteal) $(ARGS)
# Test processes: one a core, unless told otherwise. `make test JOBS=` runs in one process.
JOBS ?= auto
# More arguments for the command behind a target: `make demo ARGS='--drill kill-active --json'`.
ARGS ?=

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: .venv/.dev ## Make .venv with Narwhal and all tools for working on it

.PHONY: demo
demo: .venv/.demo ## Run a whole pair on this machine: Redis, two routers, four stub engines
	@exec $(BIN)/narwhal demo $(ARGS)

.PHONY: test
test: .venv/.dev ## Run every test that needs neither Docker nor real engines
	$(PYTEST) -m 'not docker and not real'

.PHONY: quick
quick: .venv/.dev ## Run only the tests that take no time
	$(PYTEST) -m 'not docker and not real and not e2e and not slow'

.PHONY: lint
lint: .venv/.dev ## Style, format, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: check
check: lint test ## The bar for every change: lint and test

.PHONY: format
format: .venv/.dev ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: e2e
e2e: .venv/.dev ## Run the tests with real router processes and a real Redis
	$(PYTEST) -m e2e

.PHONY: sim
sim: .venv/.dev ## Replay simulated worlds: make sim SEED=7 HOURS=1
	@$(BIN)/python -m narwhal.testing.simulation --seed $(or $(SEED),1) --hours $(or $(HOURS),0.1)

.PHONY: golden
golden: .venv/.dev ## Write what the core answers now into the scenario files, for review
	@$(BIN)/python -m tests.scenarios

.PHONY: test-docker
test-docker: .venv/.dev ## Run the tests that need a Docker engine
	$(BIN)/pytest $(ARGS) -m docker

.PHONY: test-real
test-real: .venv/.dev ## Run the tests that need real vLLM engines
	$(BIN)/pytest tests/real $(ARGS)

# The plugin where the engine has it, else the program of the same name.
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: up
up: ## Start the pair behind HAProxy in containers
	$(COMPOSE) up --detach --build

.PHONY: down
down: ## Stop the containers and drop their volumes
	$(COMPOSE) down --volumes --remove-orphans

.PHONY: hooks
hooks: .venv/.dev ## Check style before every commit of this clone
	$(BIN)/pre-commit install

.PHONY: clean
clean: ## Remove .venv, caches and state
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage build dist narwhal-state
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first interpreter on PATH that pyproject.toml allows; `make setup PYTHON=...` chooses another.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	"$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& command -v "$$name" && break; done)

# venv needs ensurepip, which Debian ships apart from Python; virtualenv carries its own pip.
.venv/.made:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "make: no Python 3.11, 3.12 or 3.13 on PATH; install one (Debian: apt-get install python3)" >&2; exit 1; fi
	@rm -rf .venv
	@if "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then "$(PYTHON)" -m venv .venv; \
	elif command -v virtualenv >/dev/null; then virtualenv --quiet --python "$(PYTHON)" .venv; \
	else echo "make: $(PYTHON) cannot make an environment; install its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; fi
	@touch $@

# The build backend is pinned like everything else, so it goes first and the build is not isolated.
.venv/.backend: .venv/.made constraints.txt
	$(PIP) hatchling editables
	@touch $@

.venv/.demo: .venv/.backend pyproject.toml
	$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

.venv/.dev: .venv/.backend pyproject.toml
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch .venv/.demo $@
