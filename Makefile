# Each target does all of its own set-up. It needs Python 3.11 or newer, and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS := .venv-docs
UV := $(BIN)/uv
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
export UV_PYTHON_DOWNLOADS ?= never
ARGS ?=

# Assertions are rewritten once and cached, also where the environment forbids bytecode. A `make` that a test runs is
# not part of this one. Tests install engines as users do, without compiling them.
PYTEST := env -u PYTHONDONTWRITEBYTECODE -u MAKEFLAGS -u UV_COMPILE_BYTECODE $(BIN)/python -m pytest
# Each test is in one of these sets by its marks (pyproject.toml); tests/conftest.py adds `engine` by fixtures.
QUICK := first_answer or not (engine or browser or asyncio_loop or measures or nightly or cluster or packages)
REST := (engine or browser or asyncio_loop or packages) and not (first_answer or measures or nightly or cluster)
MEASURES := measures and not nightly
# Failed tests once more, with the values in their assertions.
AGAIN = status=$$?; [ $$status -ne 1 ] || $(PYTEST) -n 0 --last-failed --last-failed-no-failures none --maxfail 20

.PHONY: help serve test quick test-rest test-all nightly coverage fleet cluster lint style types format score advice docs locks clean

help:
	@echo "make serve [ARGS=...]  run the built-in model behind an OpenAI-compatible endpoint"
	@echo "make test [ARGS=...]   lint, types, all tests without an engine or a browser, and one real answer"
	@echo "make test-all          the above, then the tests with real engines, a browser and measurements"
	@echo "make nightly           soaks, the notebook, thousands of generated cases, and measurements that must be decided"
	@echo "make coverage          lines that make test covers; fails below 80 %"
	@echo "make fleet [ARGS=...]  install and try every engine that this machine can run, and print a table"
	@echo "make cluster [ARGS=...] apply, upgrade, scale and delete emitted files on a real Kubernetes control plane"
	@echo "make lint              ruff and mypy --strict"
	@echo "make format            let ruff rewrite the code"
	@echo "make score             predicted speed and memory against published rows"
	@echo "make advice            write docs/advice.md: fifty questions, each compared with the engine's own recipe"
	@echo "make docs              write docs/rules.md and the JSON Schemas from the source, and build the documentation site"
	@echo "make locks [ARGS=...]  resolve the packages of engines that have changed, with hashes, for every platform"
	@echo "make clean             remove what the above made here"

serve: $(READY)
	@# Bytecode is written for what is imported, also where the environment forbids it: a quarter of the CPU time that
	@# compiling all packages beforehand takes.
	@exec env -u PYTHONDONTWRITEBYTECODE $(BIN)/bedplate serve $(ARGS)

# mypy uses one core for a while, and tests wait now and then: together they leave less of either unused.
test: style
	@$(MAKE) --no-print-directory -j 2 types quick

quick: $(READY_DEV)
	@# Rewriting the assertions of all tests takes ten seconds in a fresh clone: only those of failed tests are rewritten.
	$(PYTEST) -p tests.forking --forks 4 --assert plain -m "$(QUICK)" $(ARGS) || { $(AGAIN); exit 1; }

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
	$(PYTEST) -n 2 --dist worksteal -m "$(QUICK)" -p pytest_cov --cov --cov-report=term:skip-covered --cov-fail-under=80

# Its environments and weights are fresh each time, made as a user's are, and gone afterwards; uv's cache stays.
fleet: $(READY_DEV)
	$(BIN)/python -m tests.fleet $(ARGS)

# The control plane's programs are not part of this project: where they are absent, the tests say so and are skipped.
cluster: $(READY_DEV)
	$(PYTEST) -n 0 -m cluster -rs tests/cluster $(ARGS)

lint: style types

style: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY_DEV)
	$(BIN)/mypy

score: $(READY)
	$(BIN)/python benchmarks/score/speed.py $(ARGS)

# Answers the fifty questions of benchmarks/advice, and fails if one is not what its recipe says.
advice: $(READY_DEV)
	$(BIN)/python benchmarks/advice/write_page.py $(ARGS)

# The generator has an environment of its own; bedplate's dependencies and those of the tests stay as they are.
docs: $(READY) $(DOCS)/.ready
	$(BIN)/python -c "import sys; from bedplate.show.rules import write_rules_page; sys.stdout.write(write_rules_page())" > docs/rules.md
	$(BIN)/python -c "import sys; from bedplate.show.quantizations import write_quantizations_page; sys.stdout.write(write_quantizations_page())" > docs/quantizations.md
	$(BIN)/python -m bedplate.cli.schema_files
	$(BIN)/python docs/site/stage.py build/docs
	cd build/docs && $(CURDIR)/$(DOCS)/bin/zensical build --strict -f mkdocs.yml
	@echo "open build/docs/site/index.html"

$(DOCS)/.ready: pyproject.toml | $(UV)
	@$(UV) venv -q --clear --python $(BIN)/python $(DOCS)
	@$(UV) pip install -q --python $(DOCS)/bin/python --group docs
	@touch $@

locks: $(READY)
	$(BIN)/python -m bedplate.cli.lock_files $(ARGS)

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(DOCS) build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: bedplate needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 2; }
	@echo "setting up $(VENV) with uv" >&2
	@# Debian keeps what venv needs in a package of its own. A uv or a pip that is there already needs none of it.
	@if command -v uv >/dev/null; then uv venv -q --python $(PYTHON) $(VENV) && uv pip install -q -p $(BIN)/python uv; \
	 elif $(PYTHON) -m venv --without-pip $(VENV) 2>/dev/null \
	   && $(PYTHON) -m pip -q --disable-pip-version-check --python $(BIN)/python install uv 2>/dev/null; then :; \
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
	@touch $@

$(READY_DEV): $(READY)
	@echo "installing what the tests need" >&2
	@$(UV) pip install -q --python $(BIN)/python --group dev
	@touch $@
