# Everyday verbs. Each sets up what it needs: a virtual environment in .venv with the CPU build of torch.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0

.PHONY: demo test check bench clean

demo: $(VENV)/.ready  ## the main job, end to end, in under a minute
	$(BIN)/taskmesh demo

test: $(VENV)/.ready check  ## linters, types, import contract, tests
	$(BIN)/python -m pytest

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry taskmesh

bench: $(VENV)/.ready  ## the engine beside its peers; makes their environments itself
	$(BIN)/python -m benchmarks.tasks --json

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# The CPU build first: a bare "torch" may bring gigabytes of CUDA along.
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev
	touch $@

clean:
	rm -rf $(VENV) .taskmesh build dist .mypy_cache .ruff_cache .pytest_cache
