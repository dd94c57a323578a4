# Every target sets up what it needs: system packages (apt), a virtual environment in .venv, the program in it.
#
#   make demo            the main job on a local directory as the store      make demo STORE=s3   on a real S3 server
#   make bench           this and other filesystems side by side, into docs/benchmarks.md      make bench BENCH=--quick
#
# Tests have three tiers (tests/README.md); PYTEST="-k name -x" chooses among the tests of one, JOBS=1 sets the workers:
#
#   make check           lint, types, import contracts, unit tests with fakes: a minute     make lint   without the tests
#   make test            all of `check`, and real mounts on real object stores: about eight minutes with the set-up
#   make test-long       all of `test` with full numbers, and what is marked `long`: more than an hour

#
# The simulation of many nodes (docs/internals/simulation.md), on all cores:
#
#   make simulate        20 seeds of each profile      make simulate SEEDS=1000 FIRST=20 PROFILE=mixed NODES=3
#   make simulate-one SEED=7 PROFILE=mixed             one seed, with what each node and the store did
#   make simulate-mutants                              how soon deliberate defects are found
#   make scale                                         what one lake serves: measures, and makes docs/guide/scale.md
#
# Packages for installing it elsewhere, in dist/ (nothing is published):
#
#   make dist            source distribution, wheels for x86-64 and ARM, a wheel of pyfuse3, a Debian package
#   make wheels          the same without the Debian package
#   make lowest          the unit tests with the oldest versions of libraries that pyproject.toml allows

STORE ?= file
DIST ?= dist
PYTEST ?=
BENCH ?= --out docs/benchmarks/results.json --report docs/benchmarks.md
VENV := .venv
BIN := $(VENV)/bin
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python
# Workers steal single tests from each other's ends, so no core idles while another finishes a long module. On two cores
# three of them for unit tests, which need little but CPU, and 3 s of it to collect them in each worker; and four for
# mounts and stores: with five, tests that kill daemons or wait for a second run out of time.
UNIT := -m "not integration and not long" --ignore=tests/bench --ignore=tests/killed --ignore=tests/mount
SHORT := -m "not long"
# pytest rewrites the assertions of each module that it collects, 20 s of CPU for all, and keeps what it made. In a fresh
# clone one process does that before all workers would do it at the same time. What it finds wrong, they tell.
COLLECT := $(RUN) -m pytest --collect-only -q
# A machine may ask Python to write no bytecode. Each start of the program would then compile it, which is a third of the
# CPU time of a mount, and each worker would compile all tests.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := pyproject.toml setup.py scripts/setup $(wildcard lakefs_fuse/kernel/native/*.c)

.PHONY: demo bench check test test-long lint unit short setup clean dist wheels deb lowest \
	simulate simulate-one simulate-mutants scale
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/python scripts/demo.py --store $(STORE)

check: $(VENV)/.installed-test
	$(MAKE) --no-print-directory -j2 --output-sync=target lint unit

test: $(VENV)/.installed-test
	$(MAKE) --no-print-directory -j2 --output-sync=none lint short

test-long: $(VENV)/.installed-test-long
	LAKEFS_TEST_LONG=1 $(RUN) -m pytest --dist worksteal -n $(or $(JOBS),3) $(PYTEST)

unit: $(VENV)/.installed-test
	@[ -d tests/vfs/__pycache__ ] || $(COLLECT) $(UNIT) $(PYTEST) >/dev/null || true
	$(RUN) -m pytest --dist worksteal -q -n $(or $(JOBS),3) $(UNIT) $(PYTEST)

short: $(VENV)/.installed-test
	@[ -d tests/mount/__pycache__ ] || $(COLLECT) $(SHORT) $(PYTEST) >/dev/null || true
	$(RUN) -m pytest --dist worksteal -q -n $(or $(JOBS),4) $(SHORT) $(PYTEST)

simulate: $(VENV)/.installed-test
	$(BIN)/python -m tests.simulation run --seeds $(or $(SEEDS),20) --first $(or $(FIRST),0) \
		--nodes $(or $(NODES),3) --profile "$(PROFILE)" $(SIMULATE)

simulate-one: $(VENV)/.installed-test
	$(BIN)/python -m tests.simulation one --seed $(or $(SEED),0) --profile $(or $(PROFILE),mixed) \
		--nodes $(or $(NODES),3) $(SIMULATE)

simulate-mutants: $(VENV)/.installed-test
	$(BIN)/python -m tests.simulation mutants --seeds $(or $(SEEDS),50) --name "$(MUTANT)"

scale: $(VENV)/.installed-test
	$(BIN)/python -m scripts.scale run --nodes 3 --writers 1 --commits 0.2 --seconds 200
	$(BIN)/python -m scripts.scale run --nodes 24 --writers 2 --commits 0.5 --seconds 60
	$(BIN)/python -m scripts.scale --write

dist: deb

deb wheels: $(VENV)/.installed-dist
	$(BIN)/python -m scripts.dist $@ --out $(DIST)

lowest: $(VENV)/.installed-dist
	mkdir -p build
	$(BIN)/python scripts/lowest.py > build/lowest.txt
	PIP_CONSTRAINT="$(CURDIR)/build/lowest.txt" $(MAKE) --no-print-directory VENV=$(VENV)-lowest unit

bench: $(VENV)/.installed-bench
	$(RUN) -m scripts.bench $(BENCH)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.installed-test

$(VENV)/.installed-%: $(SOURCES)
	scripts/setup $* $(VENV)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lakefs_fuse scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f lakefs_fuse/_version.py lakefs_fuse/kernel/native/_*.so
