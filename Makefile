# The same commands run locally and in CI. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Read by scripts/setup.sh: the Python 3.11 interpreter to use.
export PYTHON

# scripts/setup.sh installs every tool there: buf, grpcurl, ruff, mypy, tokenwire.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

ENGINE_EXTRAS := --extra server --extra cli --extra text --extra smg --extra demo
COMPILE := .venv/bin/uv pip compile --quiet --no-header --python-version 3.11 --generate-hashes \
	$(foreach folder,$(PIP_FIND_LINKS),--find-links $(folder))

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Set up .venv with the CPU engine and the tools for tests and checks
	@scripts/setup.sh dev

.PHONY: demo
demo: ## Set everything up and ask a real model a question over gRPC
	@scripts/setup.sh engine
	@python scripts/demo.py

# What runs the tests; `make coverage` replaces it.
PYTEST := python -m pytest
PYTEST_OPTIONS := --durations=20 --durations-min=1

.PHONY: test
test: ## Set everything up and run every test, in three parts in parallel
	@scripts/setup.sh languages
	@tokenwire demo-model
	@$(MAKE) --jobs=3 test-part-1 test-part-2 test-part-3

# Each part spends most of its time waiting for engines to start; they take about equally long.
# These files of tests/real share no server with the others.
REAL_ALONE := $(addprefix tests/real/test_,process.py load_endings.py fidelity_tokenizer.py)

.PHONY: test-part-1 test-part-2 test-part-3
test-part-1:
	@$(PYTEST) $(PYTEST_OPTIONS) tests/simulated
test-part-2:
	@$(PYTEST) $(PYTEST_OPTIONS) tests/server tests/client tests/text tests/real $(addprefix --ignore=,$(REAL_ALONE))
test-part-3:
	@$(PYTEST) $(PYTEST_OPTIONS) $(REAL_ALONE) tests/languages

.PHONY: coverage
coverage: ## Run every test under coverage.py, including the processes that tests start, and print what no test runs
	@rm -f .coverage .coverage.*
	@$(MAKE) test PYTEST="coverage run -m pytest"
	@coverage combine --quiet
	@coverage report

.PHONY: test-fast
test-fast: setup ## Run the tests that need no engine
	@python -m pytest tests/client tests/server tests/text

.PHONY: bench
bench: ## Compare with vLLM's other front ends and write docs/performance.md; QUICK=1: two minutes, terminal only
	@scripts/setup.sh bench
	@.venv-bench/bin/python -m bench $(if $(QUICK),--quick)

.PHONY: format
format: setup ## Format the code and the contract, and apply safe fixes
	@ruff check --fix .
	@ruff format .
	@buf format --write

.PHONY: lint
lint: setup ## Check style, types, import layers and the contract
	@ruff check .
	@ruff format --check .
	@lint-imports --no-logo --no-cache
	@mypy
	@buf lint
	@buf format --diff --exit-code

.PHONY: generate
generate: ## Generate the Python stubs from protos/
	@scripts/setup.sh generate
	@.venv-generate/bin/python scripts/generate.py

.PHONY: check
check: lint ## lint, plus backward compatibility, up-to-date stubs, and the client on its lowest and highest dependency versions
	@buf breaking --against contract/v0.1.0.binpb
	@scripts/setup.sh generate
	@.venv-generate/bin/python scripts/generate.py --check
	@python scripts/check_versions.py

.PHONY: lock
lock: ## Compile requirements/*.in into hashed locks; versions are kept unless UPGRADE=--upgrade
	@scripts/setup.sh uv
	@$(COMPILE) $(UPGRADE) pyproject.toml requirements/engine-cpu.in $(ENGINE_EXTRAS) \
		--overrides requirements/overrides.txt --output-file requirements/engine-cpu.lock
	@$(COMPILE) $(UPGRADE) requirements/dev.in --constraints requirements/engine-cpu.lock --output-file requirements/dev.lock
	@$(COMPILE) $(UPGRADE) requirements/bench.in --constraints requirements/engine-cpu.lock --output-file requirements/bench.lock
	@$(COMPILE) $(UPGRADE) requirements/generate.in --output-file requirements/generate.lock
	@$(COMPILE) $(UPGRADE) requirements/uv.in --output-file requirements/uv.lock

.PHONY: soak
soak: export TOKENWIRE_SOAK_SECONDS ?= 600
soak: export TOKENWIRE_SOAK_STREAMS ?= 50000
soak: export TOKENWIRE_SOAK_EXAMPLES ?= 5000
soak: setup ## Run the long tests: ten minutes of chaos, 50,000 abandoned streams, random bytes (about half an hour)
	@python -m pytest tests/simulated/test_chaos.py
# In a separate process, so that no other test affects the memory it measures.
	@python -m pytest tests/simulated/test_memory.py
	@python -m pytest tests/server/test_fuzz_bytes.py tests/server/test_fuzz_messages.py

.PHONY: clean
clean: ## Remove the environments and tool caches, but not the cached demo model
	@rm -rf .venv .venv-bench .venv-generate bench/logs bench/results.json .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist \
		examples/*/build examples/node/{dist,node_modules,src/gen}
