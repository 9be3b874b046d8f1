# Everything needed is installed into .venv on first use; outside this folder only
# models are kept (~/.cache/specjax). `make` alone lists what can be made.

VENV ?= .venv
# Paths or options for pytest, e.g. make test TESTS=tests/decoding ARGS="-k tree".
TESTS ?=
ARGS ?=
JOBS ?= 2
# Further requirements, e.g. make test VENV=.venv-oldest PINS="jax==0.10.2".
PINS ?=
BIN := $(VENV)/bin
# The interpreter for a new .venv; empty: the newest that works.
PYTHON ?=
export PYTHON

# The installed wheel of jax is the CPU one; without this jax looks for devices
# that it could not use. Compiled programs are kept, which halves a second run.
JAX_PLATFORMS ?= cpu
JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1
export JAX_PLATFORMS JAX_COMPILATION_CACHE_DIR
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES

# A file's tests stay on one worker, which keeps what it has traced. A worker that
# dies (a crash, a timeout) ends the run, or its test would be tried eight times more.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0

.PHONY: help demo test test-full aot lint format clean
.DEFAULT_GOAL := help

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) \
		| awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'
	@echo 'Settings: VENV, PYTHON, TESTS, ARGS, JOBS, PINS (see the top of the Makefile)'

demo: $(VENV)/.base  ## Run a small demonstration
	@$(BIN)/specjax demo

test: $(VENV)/.dev  ## Run the tests (ARGS and TESTS go to pytest)
	@$(PYTEST) $(ARGS) $(TESTS)

test-full: $(VENV)/.dev  ## Run all tests: full matrices and those that need the network
	@$(PYTEST) -m "" $(ARGS) $(TESTS)

# The compilers are 1.3 GB, so they have an environment of their own.
AOT_VENV ?= .venv-aot
AOT_EXTRAS ?= aot-tpu,aot-cuda

aot: $(AOT_VENV)/.aot  ## Compile the kernels for TPUs and GPUs that are not there
	@$(AOT_VENV)/bin/python -m pallas_kernels.aot $(ARGS)

$(AOT_VENV)/.aot: pyproject.toml
	@scripts/setup_venv.sh $(AOT_VENV) $@ '.[$(AOT_EXTRAS)]' $(PINS)

lint: $(VENV)/.dev  ## Check format, style, types and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev  ## Format the code and mend what can be mended
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## Remove environments, caches and build products
	rm -rf .venv* .cache .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	rm -rf dist build site
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# An environment is made anew when another PYTHON is asked for, or when its last
# installation was interrupted (scripts/setup_venv.sh); else the stamps decide.
ifneq ($(wildcard $(VENV)/.installing),)
FORCE_SETUP := force
endif
ifneq ($(PYTHON),)
ifneq ($(shell scripts/find_python.sh),$(shell cat $(VENV)/.python 2>/dev/null))
FORCE_SETUP := force
endif
endif

.PHONY: force
$(VENV)/.base: pyproject.toml $(FORCE_SETUP)
	@scripts/setup_venv.sh $(VENV) $@ . $(PINS)

$(VENV)/.dev: pyproject.toml $(FORCE_SETUP)
	@scripts/setup_venv.sh $(VENV) $@ '.[dev]' $(PINS)
	@touch $(VENV)/.base
