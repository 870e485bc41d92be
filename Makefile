# `make test` and `make demo` need Python >= 3.10 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The demo needs less than the tests: it installs in about a minute.
DEMO_STAMP := $(VENV)/.installed-demo
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo docs test test-all lint bench clean

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing PyTorch and the rest into $(VENV): some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $(STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	@echo "1 of 2: PyTorch and what the demo needs, into $(VENV), once"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --progress-bar on torch
	$(PIP) --progress-bar on -e '.[examples]'
	touch $(DEMO_STAMP)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	@echo "2 of 2: the demo"
	$(BIN)/mnemos demo --open
	@echo "source $(BIN)/activate puts mnemos on your path."

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python -m pip install --quiet --no-deps jupyter-server-mathjax  # its MathJax alone is copied into the site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/muon.py
	$(BIN)/python benchmarks/capacity.py

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache
