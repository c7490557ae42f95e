.DEFAULT_GOAL := help
# PY=python3 uses a Python of your own, which has everything installed.
PY ?= .venv/bin/python
SETUP := $(if $(filter .venv/bin/python,$(PY)),setup)
# Files of tests at a time, of which some start four processes; 0: all in one process, for a debugger.
JOBS ?= 2
export OMP_WAIT_POLICY = PASSIVE

help:  ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: .venv/installed  ## Create .venv and install wfm_ds with everything that tests need

# An older wfm_ds had a deepspeed script of its own, which pip removes with it: doctor puts DeepSpeed's back.
.venv/installed: setup.py pyproject.toml constraints.txt
	test -x $(PY) || python3 -m venv .venv
	DS_BUILD_OPS=0 $(PY) -m pip install -q -c constraints.txt -e ".[dev]"
	-$(PY) -m wfm_ds doctor --fix
	touch .venv/installed

quickstart: $(SETUP)  ## Demo with digits: train an image model by SFT, improve it by DiffusionNFT (docs/quickstart.md)
	$(PY) -m wfm_ds.quickstart --output outputs/quickstart

quickstart-video: $(SETUP)  ## Demo with moving shapes: train a video model by SFT, improve it by DiffusionNFT (docs/video_demo.md)
	$(PY) -m wfm_ds.quickstart --demo shapes --output outputs/quickstart-video

quickstart-world: $(SETUP)  ## Demo with actions: train a tiny Cosmos3 by SFT, improve how it follows actions by DiffusionNFT (docs/action_demo.md)
	$(PY) -m wfm_ds.quickstart --demo actions --output outputs/quickstart-world

test: $(SETUP)  ## Run the tests; variants by ARGS="tests/pipes -k ledger"
	$(PY) -m pytest -n $(JOBS) --dist loadfile $(or $(ARGS),-m "not slow and not gpu")

lint: $(SETUP)  ## Formatting, lint rules and types
	$(PY) -m ruff format --check . && $(PY) -m ruff check . && $(PY) -m mypy

bench: $(SETUP)  ## Measure the kernels on a GPU, or count their launches, bytes and waits on a CPU (docs/measurements.md)
	$(PY) -m benchmarks.kernels

gpu: $(SETUP)  ## Everything that one GPU can show, in an hour; ARGS="--tiny" rehearses it on a CPU (docs/measurements.md)
	$(PY) -m benchmarks.gpu day $(ARGS)

.PHONY: help setup quickstart quickstart-video quickstart-world test lint bench gpu
