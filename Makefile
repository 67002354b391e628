# Every target sets itself up: the first run makes .venv, later runs reuse it.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
LIGHT := $(VENV)/.light

.PHONY: demo test test-gpu sanitize lint bench figures notebooks notebooks-check clean

demo: $(LIGHT)
	OPENBLAS_NUM_THREADS=1 $(RUN) -m dsv41 demo

test: $(STAMP) lint
	OPENBLAS_NUM_THREADS=1 $(RUN) -m pytest -q -n auto tests

test-gpu:
	PYTHONPATH=.:kernels $(PYTHON) -m pytest -q -m gpu tests

# on a CUDA machine with the toolkit: make sanitize, or make sanitize OPS="hc_boundary model"
sanitize:
	PYTHONPATH=.:kernels $(PYTHON) -m dsv41_kernels.sanitize $(OPS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

bench: $(STAMP)
	$(RUN) -m dsv41 bench

figures: $(STAMP)
	$(RUN) -m dsv41 ledger --figures out

notebooks: $(STAMP)
	$(RUN) tutorials/build.py

notebooks-check: $(STAMP)
	$(RUN) tutorials/build.py --check

# what the demo needs, in seconds; everything else brings tests, notebooks and compilers
$(LIGHT): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable . tokenizers
	touch $(LIGHT)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable ".[text,plots,dev]" nbclient nbformat ipykernel
	touch $(STAMP) $(LIGHT)

clean:
	rm -rf $(VENV) out build dist *.egg-info
