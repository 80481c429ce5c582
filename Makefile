# The same commands locally and in CI. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Seen by scripts/setup.sh: the Python 3.11 to build on.
export PYTHON

# The set-up puts every tool there: buf, grpcurl, ruff, mypy, tokenwire.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

ENGINE_EXTRAS := --extra server --extra cli --extra text --extra smg --extra demo
COMPILE := .venv/bin/uv pip compile --quiet --no-header --python-version 3.11 --generate-hashes \
	$(foreach folder,$(PIP_FIND_LINKS),--find-links $(folder))

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Set up .venv with the CPU engine, the tests' and the checks' tools
	@scripts/setup.sh dev

.PHONY: demo
demo: ## Set everything up and ask a real model through gRPC
	@scripts/setup.sh engine
	@python scripts/demo.py

.PHONY: test
test: ## Set everything up and run every test, in two halves at the same time
	@scripts/setup.sh languages
	@tokenwire demo-model
	@$(MAKE) --jobs=2 test-half-1 test-half-2

# Most of both is waiting for one engine or another to start; they take about the same time.
.PHONY: test-half-1 test-half-2
test-half-1:
	@python -m pytest tests/simulated tests/languages tests/client tests/text
test-half-2:
	@python -m pytest tests/server tests/real

.PHONY: test-fast
test-fast: setup ## Run the tests that need no engine
	@python -m pytest tests/client tests/server tests/text

.PHONY: bench
bench: ## Compare with every other way to drive vLLM and write docs/performance.md; QUICK=1: a short run of two minutes
	@scripts/setup.sh bench
	@.venv-bench/bin/python -m bench $(if $(QUICK),--quick)

.PHONY: format
format: setup ## Format the code and the contract, and apply safe fixes
	@ruff check --fix .
	@ruff format .
	@buf format --write

.PHONY: lint
lint: setup ## Check style, types, the layers of the code, and the contract
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
check: lint ## lint, the contract breaks nobody, the stubs are up to date, the client runs on its lowest and highest versions
	@buf breaking --against contract/v0.1.0.binpb
	@scripts/setup.sh generate
	@.venv-generate/bin/python scripts/generate.py --check
	@python scripts/check_versions.py

.PHONY: lock
lock: ## Compile requirements/*.in into the hashed locks; versions stay unless UPGRADE=--upgrade
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
soak: setup ## Run the long tests: chaos for ten minutes, 50,000 streams that are left, random bytes (about half an hour)
	@python -m pytest tests/simulated/test_chaos.py
# In a process of its own, whose memory nothing else has used.
	@python -m pytest tests/simulated/test_memory.py
	@python -m pytest tests/server/test_fuzz_bytes.py tests/server/test_fuzz_messages.py

.PHONY: clean
clean: ## Remove the environments and the tools' caches; the demo model's cache stays
	@rm -rf .venv .venv-bench .venv-generate bench/logs bench/results.json .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist \
		examples/*/build examples/node/{dist,node_modules,src/gen}
