# Everything runs in .venv, which is made when pyproject.toml is newer than it.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test bench soak clean

train: .venv/train
	$(BIN)/drawloom run first_run --overlay with_aim

test: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not soak"

bench: .venv/test
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/benchmarks $(ONLY)

soak: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m soak

clean:
	rm -rf .venv runs dist .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/train: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[aim]'
	touch $@

.venv/test: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

.PHONY: golden
golden: .venv/test
	PYTHONPATH=tests $(BIN)/python tests/golden
