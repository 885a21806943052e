# Everything runs in .venv, which is made when it is missing or pyproject.toml has changed.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= data/checkpoints/vit_tiny_patch8_64
READY := .venv/.ready

.PHONY: figures lab notebooks test test-slow test-all lint

figures: $(READY)  ## the inspection figures of MODEL (IMAGES="a.jpg b.png" for your own photographs)
	$(BIN)/vitlens inspect $(MODEL) $(IMAGES) --out figures

lab: $(READY)  ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir=notebooks

notebooks: $(READY)  ## run all notebooks in clean kernels and write them back with their figures
	$(BIN)/python notebooks/execute.py

test: $(READY)  ## every test but the sweep over all of timm
	$(BIN)/python -m pytest -n auto

test-slow: $(READY)  ## the sweep over all of timm
	$(BIN)/python -m pytest -n auto -m slow

test-all: test test-slow

lint: $(READY)
	$(BIN)/ruff check vitlens tests benchmarks notebooks

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[notebooks,dev]"
	touch $@
