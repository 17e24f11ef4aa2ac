# Everyday verbs. Each sets up what it needs: a virtual environment in .venv with the CPU build of torch.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0

.PHONY: demo test check bench explore chaos depth soak bench-training scale clean

demo: $(VENV)/.ready  ## the main job, end to end, in under a minute
	$(BIN)/taskmesh demo

test: $(VENV)/.ready check  ## linters, types, import contract, tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry taskmesh

bench: $(VENV)/.ready  ## the engine beside its peers; makes their environments itself
	$(BIN)/python -m benchmarks.tasks --json

COUNT ?= 200000
SEED  ?=
explore: $(VENV)/.ready  ## very many schedules: make explore COUNT=100000 SEED=7
	$(BIN)/python -m tests.schedules.explore --count $(COUNT) $(if $(SEED),--seed $(SEED))

chaos: $(VENV)/.ready  ## a minute of faults on every topology, then with primary loss where there are replicas
	for topology in embedded single sentinel cluster; do \
	  $(BIN)/python -m benchmarks.chaos --topology $$topology --json || exit 1; done
	for topology in sentinel cluster; do \
	  $(BIN)/python -m benchmarks.chaos --topology $$topology --primary-loss --json || exit 1; done

depth: $(VENV)/.ready  ## long backlogs, a slow wire, dead workers, partitions, and the soak: about 40 minutes
	$(BIN)/python -m benchmarks.depth --json

soak: $(VENV)/.ready  ## ten minutes at half load: what grows
	$(BIN)/python -m benchmarks.depth --only soak --json

bench-training: $(VENV)/.ready  ## training beside DDP, slow links (as root), stragglers, crashes, parity: about an hour
	$(BIN)/python -m benchmarks.training --json

scale: $(VENV)/.ready  ## steps of up to 1,000 workers, by a model that is fitted here: about 3 minutes
	$(BIN)/python -m benchmarks.scale

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# The CPU build first: a bare "torch" may bring gigabytes of CUDA along.
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev
	touch $@

clean:
	rm -rf $(VENV) .taskmesh build dist .mypy_cache .ruff_cache .pytest_cache
