# Two commands on a fresh machine with Python 3.11 or later: `make run` (demo training) and `make test`.
PYTHON ?= python3
BIN := .venv/bin
SAMPLE := --sample

.PHONY: run test test-all unit check docs clean

run: .venv/installed
	$(BIN)/narrowgauge doctor
	$(BIN)/narrowgauge train

test: .venv/installed
	$(MAKE) --no-print-directory --jobs=2 check unit

# Every test in every variant.
test-all: .venv/installed
	$(MAKE) --no-print-directory --jobs=2 check unit SAMPLE=

# Plain assertions save 6 s in each worker. What fails runs again with rewritten ones, which show the values.
unit: .venv/installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --assert=plain --numprocesses auto --maxprocesses 8 \
	--dist worksteal $(SAMPLE) || { OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; exit 1; }

check: .venv/installed
	$(BIN)/ruff check src tests examples bench
	$(BIN)/ruff format --check src tests examples bench
	$(BIN)/mypy

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "narrowgauge needs Python 3.11 or later; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
