# Each target does all of its own set-up. It needs Python 3.11 or newer, and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
# Start-up time is mostly reading source where no bytecode is written; compile once instead.
export UV_COMPILE_BYTECODE := 1
export UV_PYTHON_DOWNLOADS ?= never
ARGS ?=

# Assertions are rewritten once and cached, also where the environment forbids bytecode. A `make` that a test runs is
# not part of this one.
PYTEST := env -u PYTHONDONTWRITEBYTECODE -u MAKEFLAGS $(BIN)/python -m pytest
# Each test is in one of these sets by its marks (pyproject.toml); tests/conftest.py adds `engine` by fixtures.
QUICK := first_answer or not (engine or browser or asyncio_loop or measures or nightly)
REST := (engine or browser or asyncio_loop) and not (first_answer or measures or nightly)
MEASURES := measures and not nightly

.PHONY: help serve test quick test-rest test-all nightly coverage fleet lint style types format score docs locks clean

help:
	@echo "make serve [ARGS=...]  run the built-in model behind an OpenAI-compatible endpoint"
	@echo "make test [ARGS=...]   lint, types, all tests without an engine or a browser, and one real answer"
	@echo "make test-all          the above, then the tests with real engines, a browser and measurements"
	@echo "make nightly           soaks, the notebook, thousands of generated cases, and measurements that must be decided"
	@echo "make coverage          lines that make test covers; fails below 80 %"
	@echo "make fleet [ARGS=...]  install and try every engine that this machine can run, and print a table"
	@echo "make lint              ruff and mypy --strict"
	@echo "make format            let ruff rewrite the code"
	@echo "make score             predicted speed and memory against published rows"
	@echo "make docs              write docs/rules.md and the JSON Schemas from the source"
	@echo "make locks [ARGS=...]  resolve the packages of engines that have changed, with hashes, for every platform"
	@echo "make clean             remove what the above made here"

serve: $(READY)
	@exec $(BIN)/bedplate serve $(ARGS)

# mypy uses one core for a while, and tests wait now and then: together they leave less of either unused.
test: style
	@$(MAKE) --no-print-directory -j 2 types quick

quick: $(READY_DEV)
	$(PYTEST) -n 2 --dist worksteal -m "$(QUICK)" $(ARGS)

# Without what `make test` runs. Measuring tests run alone, after all others.
test-rest: $(READY_DEV)
	$(PYTEST) -n 2 --dist loadfile -m "$(REST)"
	$(PYTEST) -n 0 -m "$(MEASURES)"

test-all: test
	@$(MAKE) --no-print-directory test-rest

nightly: $(READY_DEV)
	$(PYTEST) -n 2 --dist worksteal -m "$(QUICK)" --hypothesis-profile=nightly
	$(PYTEST) -n 0 -m "nightly or measures" --fail-undecided
	$(BIN)/python -m tests.soak.hostile

coverage: $(READY_DEV)
	$(PYTEST) -n 2 --dist worksteal -m "$(QUICK)" --cov --cov-report=term:skip-covered --cov-fail-under=80

# Its environments and weights are fresh each time, made as a user's are, and gone afterwards; uv's cache stays.
fleet: $(READY_DEV)
	env -u UV_COMPILE_BYTECODE $(BIN)/python -m tests.fleet $(ARGS)

lint: style types

style: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY_DEV)
	$(BIN)/mypy

score: $(READY)
	$(BIN)/python benchmarks/score/speed.py $(ARGS)

docs: $(READY)
	$(BIN)/python -c "import sys; from bedplate.show.rules import write_rules_page; sys.stdout.write(write_rules_page())" > docs/rules.md
	$(BIN)/python -m bedplate.cli.schema_files

locks: $(READY)
	$(BIN)/python -m bedplate.cli.lock_files $(ARGS)

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: bedplate needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 2; }
	@echo "setting up $(VENV) with uv" >&2
	@# Debian keeps what venv needs in a package of its own. A uv that is there already needs none of it.
	@if command -v uv >/dev/null; then uv venv -q --python $(PYTHON) $(VENV) && uv pip install -q -p $(BIN)/python uv; \
	 else $(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory python3-venv; \
	   $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q --disable-pip-version-check uv; fi \
	 || { rm -rf $(VENV); exit 3; }

.PHONY: python3-venv
python3-venv:
	@command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] || { echo "error: $(PYTHON) cannot make virtual environments" >&2; \
	  echo "hint: sudo apt-get install python3-venv, or install uv" >&2; exit 2; }
	@echo "installing Debian's python3-venv" >&2
	@apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy python3-venv >/dev/null

$(READY): pyproject.toml | $(UV)
	@echo "installing bedplate's own dependencies" >&2
	@$(UV) pip install -q --python $(BIN)/python -e .
	@$(BIN)/python -m compileall -q src
	@touch $@

$(READY_DEV): $(READY)
	@echo "installing what the tests need" >&2
	@$(UV) pip install -q --python $(BIN)/python --group dev
	@touch $@
