# Everything on a fresh machine: `make demo` runs the main job, `make test` runs the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint format types docs bench clean

demo: $(STAMP)
	@test -d models/tiny || $(BIN)/inflight tiny-model models/tiny
	rm -rf runs/quickstart
	$(BIN)/inflight train examples/quickstart.toml

test: $(STAMP) lint types
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/pipeline.py

docs: $(STAMP)
	$(BIN)/python -m inflight.http.openapi > docs/openapi.json
	$(BIN)/python benchmarks/render.py
	$(BIN)/python -m tests.conformance.pages

# torch first, by itself: the constraint then keeps every later package on that build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs models .mypy_cache .ruff_cache .pytest_cache
