# Everything runs in .venv, which is made when pyproject.toml or constraints.txt is newer than it.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes, and each would compile every module

.PHONY: train test test-versions docs figures journeys bench soak clean test-gpu

train: .venv/train
	$(BIN)/drawloom run first_run --overlay with_aim

# mypy works beside the tests, which often wait, and prints when they are done.
test: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .mypy_cache; $(BIN)/mypy > .mypy_cache/printed & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not soak" -n 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types; typed=$$?; cat .mypy_cache/printed; exit $$((tests | typed))

# The site: open site/index.html, or with search: python3 -m http.server -d site. The build itself takes no network.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

figures: .venv/test
	PYTHONPATH=tests $(BIN)/python tests/house/figures.py $(ONLY)

journeys: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python tests/house/journeys.py $(ONLY)

# One benchmark, or all that need no GPU: make bench NAME=titan PEERS=/path/to/site-packages. PEERS has what others need
# in an environment of its own, RANKS the number of processes, and ONLY the benchmark's own words.
bench: .venv/test
	OMP_NUM_THREADS=1 PYTHONPATH=tests:$(PEERS) $(if $(RANKS),RANKS=$(RANKS)) $(BIN)/python tests/benchmarks $(NAME) $(ONLY)

# A quarter of an hour on two cores, and half an hour at most: every part of it has a limit of its own. Property tests
# are run with more examples than `make test` takes.
soak: .venv/soak
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m soak
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "hypothesis and not soak" --hypothesis-profile thorough -n 2 --dist loadfile

# The oldest, pinned and newest torch, and all Pythons, each in an environment of its own; the table is docs/versions.md.
# Hours on two cores. FOLDERS="--folders tests/meshes" runs fewer tests.
VERSIONS ?= 3.11:2.11 3.11:2.13 3.11:2.15 3.12:2.15 3.13:2.15
test-versions:
	$(PYTHON) tests/house/versions.py $(VERSIONS) $(FOLDERS)

# On a machine with a GPU: kernels compiled and not interpreted, great sizes, runs, and tests in other folders that use one.
GPU_TESTS = tests/gpu $(shell grep -rlE "triton|mark.gpu|torch.cuda" tests/kernels tests/components --include='test_*.py')

# With packages that are there already, and no .venv: make test-gpu PYTEST="python3 -m pytest"; each worker takes a core
# and a GiB of the GPU. Every test is printed, since machines with GPUs are lent for minutes.
WORKERS ?= 16
ifdef PYTEST
test-gpu:
else
test-gpu: PYTEST := $(BIN)/pytest
test-gpu: .venv/test
endif
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
	$(PYTEST) -v -p xdist -p hypothesispytest -p support.early_failures -m "not soak" -n $(WORKERS) --dist loadgroup $(GPU_TESTS)

clean:
	rm -rf .venv .versions runs dist site .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/train: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[aim]'
	touch $@

.venv/docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[docs]'
	touch $@

# The oldest Triton that pyproject.toml allows is beside the environment: its compiler refuses what newer ones accept.
.venv/test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/oldest-triton triton==3.6.0
	touch $@

.venv/soak: .venv/test
	$(PIP) --editable '.[dev,soak]'
	touch $@

.PHONY: golden
golden: .venv/test
	PYTHONPATH=tests:docs $(BIN)/python tests/golden

# What small runs compute, to the last bit: make baseline TO=file, and after a change: make baseline TO="--compare file"
.PHONY: baseline
baseline: .venv/test
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/house/baseline.py $(TO)
