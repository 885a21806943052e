# Everything runs in .venv, which is made when it is missing or pyproject.toml has changed.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= bundled
READY := .venv/.ready
COLAB := .venv/colab
# What Colab's runtime has: the widgets must work with it too.
COLABS := timm==1.0.28 ipywidgets==7.7.1 traitlets==5.7.1 anywidget==0.9.21 ipython==7.34.0
RECIPES := .venv/recipes
# The packages of docs/recipes.md that are in no extra, with the versions that its table names.
RECIPE_PACKAGES := pydicom==3.0.2 vit-pytorch==1.26.11 monai==1.6.1 tensorboard==2.21.0 wandb==0.31.0 lightning==2.6.6 quantus==0.6.0 fiftyone==1.22.1 "overcomplete==0.3.0; python_version < '3.13'"
SITE := import site; print(site.getsitepackages()[0])

.PHONY: figures app live lab notebooks browser test test-colab test-recipes test-slow test-all dist lint size english claims site space links

figures: $(READY)  ## the inspection figures of MODEL (IMAGES="a.jpg b.png" for your own photographs)
	$(BIN)/vitlens inspect $(MODEL) $(IMAGES) --out figures

app: $(READY)  ## the explorer of MODEL as a page in the browser (IMAGES="a.jpg" for your own photograph)
	$(BIN)/vitlens app $(MODEL) $(IMAGES)

live: $(READY)  ## site/live.html, a page with MODEL in it that takes photos (IMAGES="a.jpg" for its first ones)
	mkdir -p site
	$(BIN)/vitlens page $(MODEL) $(IMAGES) --live --out site/live.html

site: live  ## the book and the documentation as a site in site/, for a browser without a network
	$(BIN)/python docs/website.py build

space: $(READY)  ## docs/space/index.html, the page without a model, for a static page on a hub
	$(BIN)/vitlens page --blank --out docs/space/index.html

links: $(READY)  ## badges of the book and its REPOSITORY, from the addresses in pyproject.toml
	$(BIN)/python docs/website.py links

lab: $(READY)  ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir=notebooks

notebooks: $(READY)  ## run all notebooks in clean kernels and write them back with their figures
	$(BIN)/python notebooks/execute.py

browser: $(READY)  ## a browser for the tests, where there is none yet
	$(BIN)/python tests/browser/install.py

test: browser  ## the tests of every day (NO_BROWSER=1 leaves the browser out)
	$(BIN)/python -m tests everyday

test-slow: browser  ## the tests that take minutes: all of timm, all notebooks, other front ends
	$(BIN)/python -m tests slow

test-colab: $(COLAB)/.ready  ## the widgets and the opening of models with the versions of Colab
	$(COLAB)/bin/python -m pytest -q -n auto tests/test_bundled.py tests/test_models.py tests/test_explorer.py tests/test_explorer_saved.py tests/test_widgets.py \
	    tests/test_lanes.py

test-recipes: $(RECIPES)/.ready  ## docs/recipes.md with the packages of others that it names (about 1 GB)
	VITLENS_RECIPES=1 FIFTYONE_DO_NOT_TRACK=true WANDB_ERROR_REPORTING=false \
	    $(RECIPES)/bin/python -m pytest -q tests/test_recipes_page.py

test-all: test test-slow test-colab

dist: $(READY)  ## wheel and source distribution in dist/, checked
	$(BIN)/python tests/dist.py

lint: $(READY)  ## style, format, and the types that users see
	$(BIN)/python -m tests lint
	$(BIN)/python -m tests types

size: $(READY)  ## lines, files, raise statements and tests
	$(BIN)/python tests/size.py

claims: $(READY)  ## results in the prose of the book that no cell prints and no reference covers
	$(BIN)/python tests/claims.py

english: $(READY)  ## riddles in docstrings, comments, errors, options, pages and test names, room by room
	$(BIN)/python tests/english.py

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[notebooks,transformers,openclip,datasets,site,dev]"
	touch $@

$(COLAB)/.ready: $(READY) Makefile
	$(PYTHON) -m venv $(COLAB)
	$(BIN)/python -c "$(SITE)" > "$$($(COLAB)/bin/python -c "$(SITE)")/workstation.pth"
	$(COLAB)/bin/python -m pip install --quiet $(COLABS)
	touch $@

$(RECIPES)/.ready: $(READY) Makefile
	$(PYTHON) -m venv $(RECIPES)
	$(BIN)/python -c "$(SITE)" > "$$($(RECIPES)/bin/python -c "$(SITE)")/workstation.pth"
	$(RECIPES)/bin/python -m pip install --quiet $(RECIPE_PACKAGES)
	touch $@
