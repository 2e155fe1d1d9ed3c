# Every target sets up what it needs. PYTHON picks the interpreter of a new environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-slow check bench clean

demo: $(VENV)/.base  ## learn Countdown and Frozen Lake with LoRA on this machine's CPU
	$(BIN)/python -m train.demo

test: check  ## static checks, then the suite without slow tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(VENV)/.test  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.test  ## ruff, pyright, import directions
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.base  ## the figures in the README's table
	$(BIN)/python -m pallas_kernels.kda.bench
	$(BIN)/python -m pallas_kernels.grouped_matmul.bench

clean:
	rm -rf $(VENV) .jax_cache runs

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@
