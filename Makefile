# `make demo` and `make test` set everything up by themselves; `make setup` alone makes the environment (.venv).
PYTHON ?=
BIN := .venv/bin
# Test processes: as many as cores, each with one thread; tests that share an expensive set-up stay together.
JOBS ?= auto

.PHONY: setup demo lint test test-slow test-distributed bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh

demo: setup
	$(BIN)/moerl train recipe=laptop

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not distributed" tests

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m slow tests

# Every layout; up to eight processes in one test, so one test at a time.
test-distributed: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m distributed tests

bench: setup
	for file in $$(ls bench/[a-z]*.py | grep -v _gpu); do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv dist build
