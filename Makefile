# make demo: install into .venv, then run the main job.   make test: install, then run the whole suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TYPECHECK := build/typecheck
# Compiled modules are kept: every process reads them.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --maxprocesses 4
ROOM ?=
SERVING := build/serving-environment
SKYPILOT := build/skypilot-environment

.DEFAULT_GOAL := help
.PHONY: help install readme demo test test-fast test-serving test-clusters lint docs format gallery activations keys bench clean

help:
	@echo "make demo    plan a model, then train a small one on two CPU ranks"
	@echo "make test    run the whole suite; ROOM=distillation: what has that word in its path or name"
	@echo "make test-fast    run what takes no real training, launch, browser or installation"
	@echo "make test-serving    load checkpoints of every scheme in vLLM's CPU engine, beside Transformers"
	@echo "make test-clusters    run plans over ssh, in a SLURM of two hosts and on Ray on this machine, as root"
	@echo "make lint    ruff and mypy"
	@echo "make docs    build the documentation site into build/site"
	@echo "make gallery | activations | keys    regenerate data that ships with the package"
	@echo "make readme    regenerate the map of rooms, docs/reference and what pages show"

install: $(VENV)/.installed

# torch comes first: whatever depends on it would otherwise choose a newer build.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11"'
	@command -v c++ >/dev/null || { echo "A C++ compiler is needed (Debian: apt-get install g++)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# DeepSpeed's CPU operators, compiled beside the environment once: torch's common directory would serve two in turn.
$(VENV)/.operators: $(VENV)/.installed
	TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions $(BIN)/python tests/operators.py
	touch $@

demo: install
	$(BIN)/shardwright demo --force

# make test ROOM=distillation runs the tests with that word in their path or name.
test: $(VENV)/.operators
	$(PYTEST) $(if $(ROOM),-k "$(ROOM)")

test-fast: install
	$(PYTEST) -m "not browser and not clusters and not distributed and not install and not trace and not slow"

# Every package by its exact version, so that nothing is left to choose: a release of tomorrow changes nothing.
$(SERVING)/.installed: benchmarks/serving_requirements.txt
	rm -rf $(SERVING)
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/pip install --quiet --upgrade pip
	$(SERVING)/bin/pip install --quiet --no-deps --requirement benchmarks/serving_requirements.txt
	touch $@

# The engine needs AVX-512; without it the benchmark says so and ends well, and nothing is installed for it.
test-serving: install $(if $(shell grep -m1 avx512f /proc/cpuinfo 2>/dev/null),$(SERVING)/.installed)
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

# mypy resolves relative imports from files, so it sees the checkout under the package's own name.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(TYPECHECK)
	ln -sfn "$(CURDIR)" $(TYPECHECK)/shardwright
	MYPYPATH=$(TYPECHECK) $(BIN)/mypy -p shardwright.ds_configs -p shardwright.plugins -p shardwright.trainers -p shardwright.cli

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: install
	$(BIN)/python tests/readme_parts.py
	$(BIN)/python tools/reference.py
	$(BIN)/python tests/runnable_blocks.py
	$(BIN)/python tools/picture.py

# A warning of Sphinx is an error: a link, an anchor, a page that nothing leads to, a docstring.
docs: install
	$(BIN)/python tools/docs_site.py

gallery: install
	$(BIN)/python tools/gallery.py tests/data/models ds_configs/gallery

activations: install
	$(BIN)/python tools/activation_trace.py --write

keys: install
	$(BIN)/python tools/config_keys.py --write

bench: install
	$(BIN)/python benchmarks/planning_time.py
	$(BIN)/python benchmarks/memory_accuracy.py

clean:
	rm -rf build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache
