.DEFAULT_GOAL := help
# PY=python3 uses another Python, in which everything is already installed.
PY ?= .venv/bin/python
# Versions to install: constraints-3.12.txt with Python 3.12.
CONSTRAINTS ?= constraints.txt
SETUP := $(if $(filter .venv/bin/python,$(PY)),setup)
# Test files that run at the same time (some start four processes). 0: one process, for a debugger.
JOBS ?= 3
export OMP_WAIT_POLICY = PASSIVE
# Each of the many processes that tests start would compile all sources and tests again.
unexport PYTHONDONTWRITEBYTECODE

help:  ## Show this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: .venv/installed  ## Create .venv and install wfm_ds with all test dependencies

# Older versions of wfm_ds replaced the deepspeed script, and pip removes it with them: doctor restores DeepSpeed's script.
.venv/installed: pyproject.toml $(CONSTRAINTS)
	test -x $(PY) || python3 -m venv .venv
	@echo "Installing wfm_ds, torch and other packages into .venv, which takes minutes."
	DS_BUILD_OPS=0 $(PY) -m pip install -q -c $(CONSTRAINTS) -e ".[dev]"
	-$(PY) -m wfm_ds doctor --fix
	touch .venv/installed

# Optional packages are in an environment of their own, because libraries import some of them, which makes each process
# slower. It sees the packages of .venv.
OPTIONAL_TESTS := tests/data/test_hf.py tests/data/test_edit_data.py tests/data/test_stream.py tests/data/test_folder.py tests/multi_rank/test_streams.py \
	tests/engine/test_low_bit.py tests/engine/test_fp8_training.py tests/engine/test_optimizer.py \
	tests/monitoring/test_tracking.py tests/cli/test_notebook.py tests/recipe/test_editor_schema.py
.venv-full/installed: $(SETUP)
	python3 -m venv .venv-full
	realpath .venv/lib/python3*/site-packages > $$(echo .venv-full/lib/python3*/site-packages)/base.pth
	DS_BUILD_OPS=0 .venv-full/bin/python -m pip install -q -c $(CONSTRAINTS) -e ".[test-full]"
	touch .venv-full/installed

test-optional: .venv-full/installed  ## Run the tests that need optional packages (datasets, torchao, wandb, ...)
	.venv-full/bin/python -m pytest -q -m "not gpu" $(OPTIONAL_TESTS)

# As on many GPU machines: Python 3.12 with the older torch and transformers of constraints-3.12.txt.
PYTHON312 ?= python3.12
.venv-3.12/installed: pyproject.toml constraints-3.12.txt
	$(PYTHON312) -m venv .venv-3.12
	DS_BUILD_OPS=0 .venv-3.12/bin/python -m pip install -q -c constraints-3.12.txt -e ".[dev]"
	touch .venv-3.12/installed

test-python312: .venv-3.12/installed  ## Import all modules and run the default tests with Python 3.12, torch 2.11 and transformers 5.17
	.venv-3.12/bin/python -m pytest tests/test_imports.py
	$(MAKE) test PY=.venv-3.12/bin/python

quickstart: $(SETUP)  ## Digits demo: train an image model with SFT, improve it with DiffusionNFT (docs/quickstart.md)
	$(PY) -m wfm_ds quickstart --output outputs/quickstart

quickstart-video: $(SETUP)  ## Video demo: train a video model of moving shapes with SFT, improve it with DiffusionNFT (docs/video_demo.md)
	$(PY) -m wfm_ds quickstart --demo shapes --output outputs/quickstart-video

quickstart-world: $(SETUP)  ## Action demo: train a tiny Cosmos3 with SFT, improve how it follows actions with DiffusionNFT (docs/action_demo.md)
	$(PY) -m wfm_ds quickstart --demo actions --output outputs/quickstart-world

quickstart-long: $(SETUP)  ## Long-video demo: train a tiny Cosmos3 with SFT, reduce the drift of its long videos with DiffusionNFT (docs/long_video_demo.md)
	$(PY) -m wfm_ds quickstart --demo long --output outputs/quickstart-long

quickstart-edits: $(SETUP)  ## Edit demo: train a tiny FLUX.2 to invert one of two digits with SFT, improve it with DiffusionNFT (docs/edit_demo.md)
	$(PY) -m wfm_ds quickstart --demo edits --output outputs/quickstart-edits

quickstart-fewstep: $(SETUP)  ## Few-step demo: distill the model of the digits demo to 4 steps and to 1 step with DMD2 (docs/few_steps_demo.md)
	$(PY) -m wfm_ds quickstart --demo fewstep --start outputs/quickstart --output outputs/quickstart-fewstep

test: $(SETUP)  ## Run the tests; choose some with ARGS="tests/transport -k ledger"
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(or $(ARGS),-m "not slow and not gpu")

lint: $(SETUP)  ## Check formatting, lint rules and types
	$(PY) -m ruff format --check . && $(PY) -m ruff check . && $(PY) -m mypy

bench: $(SETUP)  ## Measure the kernels on a GPU, or count their launches, bytes and host synchronizations on a CPU (docs/measurements.md)
	$(PY) -m benchmarks.kernels

gpu: $(SETUP)  ## Measure on one GPU for half an hour; ARGS="--tiny" rehearses all measurements on a CPU (docs/measurements.md)
	$(PY) -m benchmarks.gpu day $(ARGS)

.PHONY: help setup test-optional test-python312 quickstart quickstart-video quickstart-world quickstart-long quickstart-edits quickstart-fewstep test lint bench gpu
