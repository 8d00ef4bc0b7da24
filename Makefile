# make demo: install into .venv, then run the main job.   make test: install, then run the whole suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One file of exact versions for each environment that the suite runs in. llm-compressor, which the extra `quantize`
# brings, holds transformers down: the newest releases are tested without it.
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev,lint,quantize
TESTS ?=
NEWEST := build/newest-environment
OLDEST := build/oldest-environment
WITH_NEWEST := VENV=$(NEWEST) CONSTRAINTS=constraints-newest.txt EXTRAS=dev
WITH_OLDEST := VENV=$(OLDEST) CONSTRAINTS=constraints-oldest.txt EXTRAS=dev READY=$(OLDEST)/.installed
# What the oldest supported releases of other libraries can change: settings, tables, files, data sets and adapters. torch,
# Transformers, Accelerate and DeepSpeed are the pinned ones there too, whose layouts `make test` trains: nothing loads
# DeepSpeed's operators.
OLDEST_TESTS := tests/cli tests/ds_configs/check tests/ds_configs/plan tests/plugins tests/trainers/data \
	tests/trainers/formats tests/trainers/reports tests/distributed/test_qlora_layouts.py
GRID_TESTS := tests/equivalence $(patsubst %,tests/distributed/test_%.py,trainer_layouts unused_parameters)
# What the newest releases can change: adapters, canaries, a launch of each layout, saving, loading, exports and whatever
# trains, quantizes or evaluates.
NEWEST_TESTS := tests/ds_configs/check/test_check_fuzz.py tests/ds_configs/legality/test_engines_agree.py \
	$(patsubst %,tests/ds_configs/memory/test_%.py,activations activation_kinds quantization_memory) \
	tests/ds_configs/models tests/equivalence tests/plugins tests/distributed \
	$(patsubst %,tests/trainers/%,counting data distillation evaluation formats parallel preferences qat quantization \
	sparsity test_exact.py test_quantization_verify.py training) \
	tests/cli/commands/test_evaluate_command.py tests/cli/commands/test_quantize_command.py tests/test_examples.py
TYPECHECK := build/typecheck
# One worker more than processors: tests wait for launchers, browsers and ranks.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))')
# A file stays on one worker, which creates what its tests share once. Compiled modules are kept: every process reads them.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
K ?=
# What the tests of an environment are chosen by; `once` marks what `make test` alone runs.
MARKS ?= not clusters and not full
# What has to be there before tests run.
READY ?= $(VENV)/.operators
# Of what `make test` does not run: 2/6 is the second sixth of it.
PART ?= 1/1
SERVING := build/serving-environment
# vLLM's engine needs AVX-512; without it the benchmark says so and ends well, and nothing is installed for it.
SERVING_INSTALLED := $(if $(shell grep -m1 avx512f /proc/cpuinfo 2>/dev/null),$(SERVING)/.installed)
SKYPILOT := build/skypilot-environment

.DEFAULT_GOAL := help
.PHONY: help install pages demo test test-full test-grid test-newest test-oldest environments newest test-fast test-serving test-clusters lint docs format activations keys bench clean

help:
	@echo "make demo    plan a model, then train a small one on two CPU ranks"
	@echo "make test    run the suite before a commit; K=distillation: tests with that word in their path or name"
	@echo "make test-full    run all tests: also browsers, installations, sweeps, quality, every cell of tables"
	@echo "make test-grid    run every pair of layouts, settings and trainers against one process"
	@echo "make test-newest    run what upstream releases can change with the newest ones"
	@echo "make test-oldest    run what upstream releases can change with the oldest supported ones"
	@echo "make test-fast    run what takes no real training, launch, browser or installation"
	@echo "make test-serving    load checkpoints of every scheme in vLLM's CPU engine, beside Transformers"
	@echo "make test-clusters    run plans over ssh, in a SLURM of two hosts and on Ray on this machine, as root"
	@echo "make lint    ruff, mypy, import-linter, and replaced words"
	@echo "make docs    build the documentation site into build/site"
	@echo "make activations | keys    regenerate data that ships with the package"
	@echo "make newest    move constraints-newest.txt to today's releases, and print what changed"
	@echo "make pages    run the commands that pages show, and update their output"

install: $(VENV)/.installed

# torch comes first: whatever depends on it would otherwise choose a newer build.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11"'
	@command -v c++ >/dev/null || { echo "A C++ compiler is needed (Debian: apt-get install g++)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' $(CONSTRAINTS))"
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	touch $@

# DeepSpeed's CPU operators, compiled beside the environment once: torch's common directory would serve two in turn.
$(VENV)/.operators: $(VENV)/.installed
	TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions $(BIN)/python tests/operators.py
	touch $@

demo: install
	$(BIN)/shardwright demo --force

# make test K=distillation runs the tests with that word in their path or name.
test: $(READY)
	$(PYTEST) --durations=25 -m "$(MARKS)" --part $(PART) $(if $(K),-k "$(K)") $(TESTS)

test-full:
	$(MAKE) test MARKS="not clusters"

# Every pair of layouts, settings and trainers, of which `make test` runs each value once.
test-grid:
	$(MAKE) test MARKS="not clusters" TESTS="$(GRID_TESTS)"

test-newest:
	$(MAKE) test $(WITH_NEWEST) MARKS="not clusters and not once and not full" TESTS="$(or $(TESTS),$(NEWEST_TESTS))"

test-oldest:
	$(MAKE) test $(WITH_OLDEST) MARKS="not clusters and not once and not full" TESTS="$(or $(TESTS),$(OLDEST_TESTS))"

# Everything that tests install, for a machine that has something else to do meanwhile.
environments: $(VENV)/.operators $(SERVING_INSTALLED) $(SKYPILOT)/.installed
	$(MAKE) $(NEWEST)/.operators $(WITH_NEWEST)
	$(MAKE) $(OLDEST)/.installed $(WITH_OLDEST)

# Resolves the extra `dev` anew, in an environment of its own.
newest:
	$(PYTHON) tools/newest_releases.py

test-fast: install
	$(PYTEST) -m "not browser and not clusters and not distributed and not install and not trace and not slow"

# Every package by its exact version, so that nothing is left to choose: a release of tomorrow changes nothing.
$(SERVING)/.installed: benchmarks/serving_requirements.txt
	rm -rf $(SERVING)
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/pip install --quiet --upgrade pip
	$(SERVING)/bin/pip install --quiet --no-deps --requirement benchmarks/serving_requirements.txt
	touch $@

test-serving: install $(SERVING_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/serving_matrix.py --engine-python $(SERVING)/bin/python

# Two hosts with networks of their own, sshd and SLURM in them, and what SkyPilot's own loader says of its tasks.
test-clusters: $(VENV)/.operators $(SKYPILOT)/.installed
	@for needed in nsenter ip sshd slurmctld munged; do PATH="$$PATH:/usr/sbin:/sbin" command -v $$needed >/dev/null || \
	{ echo "$$needed is needed (Debian: apt-get install util-linux iproute2 openssh-server slurm-wlm munge)" >&2; exit 1; }; done
	SKYPILOT_PYTHON=$(abspath $(SKYPILOT))/bin/python OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest -m clusters tests/clusters

# SkyPilot wants other versions of much that trains. Most of its modules are never imported.
$(SKYPILOT)/.installed: constraints.txt
	rm -rf $(SKYPILOT)
	$(PYTHON) -m venv $(SKYPILOT)
	$(SKYPILOT)/bin/pip install --quiet --no-compile skypilot==0.14.1
	touch $@

# mypy and import-linter read files, so they see the checkout under the package's own name.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(TYPECHECK)
	ln -sfn "$(CURDIR)" $(TYPECHECK)/shardwright
	MYPYPATH=$(TYPECHECK) $(BIN)/mypy -p shardwright.ds_configs -p shardwright.plugins -p shardwright.trainers -p shardwright.cli
	PYTHONPATH=$(TYPECHECK) $(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tools/words.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pages: install
	$(BIN)/python tests/runnable_blocks.py

# A warning of Sphinx is an error: a link, an anchor, a page that nothing leads to, a docstring.
docs: install
	$(BIN)/python tools/docs_site.py

activations: install
	$(BIN)/python tools/activation_trace.py --write

keys: install
	$(BIN)/python tools/config_keys.py --write

bench: install
	$(BIN)/python benchmarks/memory_accuracy.py

clean:
	rm -rf build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache
