# make demo     install, fetch a small model, start router + prefill + decode, ask, draw the trace;
#               TP=3: each worker has three ranks
# make test     lint, and everything that runs without a GPU
# make help     the rest

PROMPT ?= What is the capital of France?
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
RUNS ?= 500
MINUTES ?= 10
SEED ?= $(shell date +%s)
export PROMPT

# Where pip finds CPU builds of torch, for machines without a GPU whose own sources have none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

GPU := $(wildcard /dev/nvidia[0-9]*)

# A stamp is named after what was installed from, so that nothing is installed twice and any change
# installs again. `dev` includes `run`.
KEY := $(shell cat pyproject.toml constraints-cpu.txt | sha256sum | cut -c1-16)
RUN_STAMP := $(VENV)/.installed-run-$(KEY)
DEV_STAMP := $(VENV)/.installed-dev-$(KEY)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo up install install-dev install-debian test test-slow test-clients test-turn breakages chaos lint format protos docs wheels clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

demo: install ## One question through the whole system (PROMPT="..." asks another)
	@$(BIN)/baton demo$(if $(TP), --tp $(TP)) "$$PROMPT"

up: install ## A router, a prefill and a decode worker, until Ctrl-C
	@$(BIN)/baton up

install: $(or $(wildcard $(DEV_STAMP)),$(RUN_STAMP)) ## What serving needs, into .venv

install-dev: $(DEV_STAMP) ## And what the tests need

install-debian: ## And what some tests need of Debian, by apt-get, as root
	@missing="$$($(PYTHON) tests/debian.py)" && { test -z "$$missing" || { apt-get update \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$missing; }; }

test: lint ## Lint, then everything that runs without a GPU
	@$(BIN)/python tests/debian.py --tell
	$(BIN)/python tests/side_by_side.py $(PYTEST_ARGS)

test-slow: install-dev ## What takes minutes
	$(BIN)/python tests/side_by_side.py --one --slow -m slow $(PYTEST_ARGS)

test-clients: install-dev ## Clients that others wrote
	$(BIN)/python tests/side_by_side.py --one --clients -m clients $(PYTEST_ARGS)

test-turn: install-dev ## A part of the two above, another one with each commit: MINUTES=10
	$(BIN)/python tests/side_by_side.py --one --slow --clients -m "slow or clients" --minutes $(MINUTES) $(PYTEST_ARGS)

breakages: install-dev ## Break the product on purpose: each fault must be caught; ONLY=NAME for one of them
	$(BIN)/python tests/breakages.py --jobs 2 $(ONLY)

chaos: install-dev ## Runs with faults: make chaos RUNS=500 SEED=1; ONLY=7 repeats one of them
	PYTHONPATH=tests:. $(BIN)/python -m chaos --runs $(RUNS) --seed $(SEED) $(if $(ONLY),--only $(ONLY)) $(CHAOS_ARGS)

lint: install-dev ## Formatting, lint, types, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf lint protos

format: install-dev ## Format and sort imports
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

protos: install-dev ## Build the stubs again
	$(BIN)/python protos/generate.py

docs: install-dev ## Write the reference pages again, and build the site into site/
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheels: install-dev ## baton-llm and baton-client, wheels and source archives, into dist/
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist wheels/client

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site *.egg-info wheels/*/*.egg-info

comma := ,
$(RUN_STAMP): EXTRAS := router,worker,gguf$(if $(GPU),$(comma)gpu)
$(DEV_STAMP): EXTRAS := dev$(if $(GPU),$(comma)gpu)

# Whether pip's own sources have a CPU build of torch.
HAS_CPU_TORCH = $(PIP) install --quiet --dry-run --ignore-installed --no-deps --report - \
	torch -c constraints-cpu.txt 2>/dev/null | grep -q '"version": "[^"]*+cpu"'

# Of pip's warnings, most are about its own configuration: they are shown where it fails.
OR_SAY_WHY = 2>$(VENV)/pip.log || { cat $(VENV)/pip.log; exit 1; }

$(RUN_STAMP) $(DEV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Baton needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq "pip>=24.1" # its progress can be shown while the model is fetched
	@echo "installing Baton and what it needs into $(VENV), once"
ifneq ($(GPU),)
	@$(PIP) install -e ".[$(EXTRAS)]" $(OR_SAY_WHY)
else
	@index=; $(HAS_CPU_TORCH) || index="--extra-index-url $(TORCH_INDEX)"; \
	$(PIP) install -c constraints-cpu.txt $$index -e ".[$(EXTRAS)]" $(OR_SAY_WHY)
endif
	@rm -f $(VENV)/.installed-*
	@touch $@
