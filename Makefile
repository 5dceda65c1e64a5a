# Everything runs in .venv, which each target brings up to date by itself. Needs Python 3.11 or newer with pip, and make.
# CPU only: where pip would take the CUDA build of torch, point it to the CPU one, e.g. PIP_EXTRA_INDEX_URL=<index> make demo.

SHELL := /bin/bash
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
# Two cores must do for tests; libraries that take all of them only slow each other down.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test slow sim check bench bench-recovery bench-goodput bench-checkpoint bench-overhead bench-control-plane clean
.DELETE_ON_ERROR:

setup: $(VENV)/.all $(VENV)/.bench  ## everything that demo, test, check and bench need

demo: $(VENV)/.demo  ## a training job, a real kill -9, the recovery, and the same job unbroken for comparison; under two minutes
	$(BIN)/keepstep demo

test: $(VENV)/.all  ## all tests but the slow ones; those with a real cluster one at a time
	$(BIN)/python -m pytest -m "not slow and not cluster" -n 2 $(ARGS)
	$(BIN)/python -m pytest -m "cluster and not slow" $(ARGS)

slow: $(VENV)/.all  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

sim: $(VENV)/.all  ## the simulation over many seeds: make sim SIM_SEEDS=5000, or one: make sim SIM_SEED=17
	$(BIN)/python -m pytest tests/simulation --timeout=0 --sim-seeds $(or $(SIM_SEEDS),1000) $(if $(SIM_SEED),--sim-seed $(SIM_SEED)) $(ARGS)

check: $(VENV)/.all  ## lint, format, types, direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_imports.py

bench: bench-recovery bench-goodput bench-checkpoint bench-overhead bench-control-plane  ## all measurements of docs/benchmarks.md, one after the other

bench-recovery: $(VENV)/.bench  ## kill -9 to the next new step, beside torchrun and Ray Train; other numbers: ARGS="--ranks 2 --kills 3"
	$(BIN)/python benchmarks/recovery.py $(ARGS)

bench-goodput: $(VENV)/.bench  ## 5 minutes of one kill a minute for each system; a quick look: ARGS="--seconds 90 --every 20"
	$(BIN)/python benchmarks/goodput.py $(ARGS)

bench-checkpoint: $(VENV)/.all  ## snapshots and checkpoints beside a plain copy and a plain write; a quick look: ARGS="--sizes 0 100 --pairs 3"
	$(BIN)/python benchmarks/checkpoint.py $(ARGS)

bench-overhead: $(VENV)/.all  ## steps of an undisturbed training with KeepStep and without; a quick look: ARGS="--pairs 1 --seconds 5"
	$(BIN)/python benchmarks/overhead.py $(ARGS)

bench-control-plane: $(VENV)/.all  ## submits, lists and the reconciler's pass with up to 10,000 jobs; a quick look: ARGS="--jobs 100 --databases sqlite"
	$(BIN)/python benchmarks/control_plane.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# The system's pip fills the environment, since Debian's Python has no ensurepip to put one into it.
$(BIN)/python:
	$(if $(PYTHON),,$(error no Python 3 was found; install Python 3.11, or say make PYTHON=/path/to/python))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is older; say make PYTHON=...")'
	$(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PYTHON) -m pip --python $(BIN)/python install -q -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	$(PYTHON) -m pip --python $(BIN)/python install -q -c constraints.txt -e '.[torch,tensorflow,postgres,s3,dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.all
	$(PYTHON) -m pip --python $(BIN)/python install -q -c constraints.txt -e '.[bench]'
	@touch $@
