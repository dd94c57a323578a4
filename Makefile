# Every target sets up what it needs: system packages (apt), a virtual environment in .venv, the program in it.
#
#   make demo            the main job on a local directory as the store      make demo STORE=s3   on a real S3 server
#   make bench           this and other filesystems side by side, into docs/benchmarks.md      make bench BENCH=--quick
#   make test            the tests (PYTEST="-k name -x" and JOBS=1 to choose)     make lint       ruff and mypy, strict

STORE ?= file
PYTEST ?=
BENCH ?= --out docs/benchmarks/results.json --report docs/benchmarks.md
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py scripts/setup $(wildcard lakefs_fuse/kernel/native/*.c)

.PHONY: demo bench test lint setup clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/python scripts/demo.py --store $(STORE)

test: $(VENV)/.installed-test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST)

bench: $(VENV)/.installed-bench
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m scripts.bench $(BENCH)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.installed-test

$(VENV)/.installed-%: $(SOURCES)
	scripts/setup $* $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lakefs_fuse scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f lakefs_fuse/kernel/native/_*.so
