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

.PHONY: help serve test lint format clean

help:
	@echo "make serve [ARGS=...]  run the built-in model behind an OpenAI-compatible endpoint"
	@echo "make test [ARGS=...]   lint, type-check and run the tests"
	@echo "make lint              ruff and mypy --strict"
	@echo "make format            let ruff rewrite the code"
	@echo "make clean             remove what the above made here"

serve: $(READY)
	@exec $(BIN)/bedplate serve $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: bedplate needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 2; }
	@# Debian's python3 comes without ensurepip; uv brings what is missing once there is any pip at all.
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --without-pip $(VENV)
	@echo "setting up $(VENV) with uv (about 30 MB)" >&2
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then $(BIN)/python -m pip install -q uv; \
	 elif command -v uv >/dev/null; then uv pip install -q --python $(BIN)/python uv; \
	 elif $(PYTHON) -m pip --version >/dev/null 2>&1; then $(PYTHON) -m pip --python $(BIN)/python install -q uv; \
	 else echo "error: no pip; apt-get install python3-venv, or install uv" >&2; rm -rf $(VENV); exit 2; fi

$(READY): pyproject.toml | $(UV)
	@echo "installing bedplate's own dependencies" >&2
	@$(UV) pip install -q --python $(BIN)/python -e .
	@$(BIN)/python -m compileall -q src
	@touch $@

$(READY_DEV): $(READY)
	@echo "installing what the tests need" >&2
	@$(UV) pip install -q --python $(BIN)/python --group dev
	@touch $@
