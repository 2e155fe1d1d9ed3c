# Every target sets up what it needs. PYTHON picks the interpreter of a new environment.
PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-slow test-optimized check bench tpu-aot gpu-aot gpu-check clean

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
	$(BIN)/python -m pallas_kernels.kda.bench_cpu
	$(BIN)/python -m pallas_kernels.grouped_matmul.bench_cpu

tpu-aot: $(VENV)/.tpu  ## every kernel compiled for TPUs that are not here; fails where a figure is over 10 % worse than on record
	$(BIN)/python -m pallas_kernels.aot --chip v5p v6e tpu7x

gpu-aot: $(CUDA_VENV)/.cuda  ## the same for an NVIDIA H200 (sm_90a): registers, shared memory, spills; needs ptxas
	$(CUDA_VENV)/bin/python -m pallas_kernels.aot --chip h200

gpu-check:  ## on a machine with an NVIDIA GPU and jax for it: parity, then times
	JAX_PLATFORMS= $(PYTHON) -m pallas_kernels.gpu_check

clean:
	rm -rf $(VENV) $(CUDA_VENV) .jax_cache runs

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@

$(VENV)/.tpu: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e ".[tpu]"
	touch $@

# Only the compiler: the plugin without the libraries of CUDA, which nothing runs here.
$(CUDA_VENV)/.cuda: pyproject.toml
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(CUDA_VENV)/bin/python -m pip install --quiet -e . absl-py
	version=$$($(CUDA_VENV)/bin/python -c "import jax; print(jax.__version__)") && \
		$(CUDA_VENV)/bin/python -m pip install --quiet --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	touch $@
