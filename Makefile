# Every target sets up what it needs. PYTHON picks the interpreter of a new environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-slow test-optimized check bench clean

demo: $(VENV)/.base  ## learn Countdown and Frozen Lake with LoRA on this machine's CPU
	$(BIN)/python -m train.demo

test: check  ## static checks, then the suite without slow tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(VENV)/.test  ## the tests that take long
	$(BIN)/python -m pytest -m slow

test-optimized: $(VENV)/.test  ## laws and official outputs, slow ones too, compiled as users compile them
	XLA_FLAGS=--xla_backend_optimization_level=3 $(BIN)/python -m pytest -n 2 --dist loadfile tests/laws tests/k3jax tests/pallas_kernels

check: $(VENV)/.test  ## ruff, pyright, import directions
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.base  ## ops against their references; the README's table is the first
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
