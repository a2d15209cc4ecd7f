# `make serve` runs the server on the built-in model, `make test` runs the tests; each sets up what it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
MODEL ?=
ARGS ?=

.PHONY: install serve test clients sanitize lint bench clean

# What a Debian or Ubuntu machine may lack. Only asked for when missing, and only where apt-get and root are at hand.
define need_system_packages
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "Quire needs Python 3.11 or newer as '$(PYTHON)'; set PYTHON=..." >&2; exit 2; fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; \
	  else echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 2; fi; fi
endef

$(VENV)/.installed: pyproject.toml
	$(need_system_packages)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

clients: .venv-clients/.installed

.venv-clients/.installed: tests/integration/clients/requirements.txt
	$(need_system_packages)
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --requirement $<
	@touch $@

install: $(VENV)/.installed
	$(BIN)/quire fetch

serve: $(VENV)/.installed
	$(BIN)/quire serve $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.tested lint
	$(BIN)/quire fetch
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# The CPU kernels' tests, on libraries that stop at reads and writes out of bounds and at undefined behaviour.
sanitize: export XDG_CACHE_HOME := $(CURDIR)/build/sanitized
sanitize: export CXX := $(CURDIR)/tests/kernels/cpu/sanitizing-g++
sanitize: $(VENV)/.tested
	$(BIN)/python -c 'from kernels.cpu import build; print(*map(build.library, build.supported()), sep="\n")'
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/python -m pytest tests/kernels/cpu tests/kernels/test_{attention,fused,memory}.py --ignore tests/kernels/cpu/test_build.py $(ARGS)

lint: $(VENV)/.tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.continuous_batching
	$(BIN)/python -m benchmarks.scheduler_cost
	$(BIN)/python -m benchmarks.utilization

clean:
	rm -rf $(VENV) .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
