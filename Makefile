# What people and CI type. Each target makes the machine ready itself and says so; see scripts/setup.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-kubernetes test-machine check bench chaos docs docs-img dist setup clean

BIN := .venv/bin
ARGS ?=
# A test process that dies ends the run at once: a replaced one may wait for ever (seen with xdist 3.8).
# Three test files at a time on two cores: most of a test's time is waiting for real processes.
JOBS ?= 3
SECONDS ?= 60
SEED ?= 1
# The tests start hundreds of interpreters: what is compiled once is compiled for all of them.
export PYTHONDONTWRITEBYTECODE :=

# Real programs that tests drive: PROGRAM=DEBIAN-PACKAGE. Without them their tests are skipped with a reason.
TEST_PROGRAMS := chromium=chromium redis-server=redis-server node=nodejs strace=strace gcc=gcc nginx=nginx-light git=git \
  dovecot=dovecot-imapd /usr/lib/dovecot/submission=dovecot-submissiond openssl=openssl smtpd=opensmtpd prosody=prosody runc=runc
BENCH_PROGRAMS := gcc=gcc
# On a cluster: the page in a browser, and JupyterHub with its proxy.
CLUSTER_PROGRAMS := chromium=chromium node=nodejs

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
	@echo '  ARGS="…" is handed to what is run, e.g. make test ARGS="tests/kernel -k reuse"'

demo: ## a tour of two minutes: three sample users, the page, and a guided kill -9
	@scripts/setup run
	@$(BIN)/everdeck demo $(ARGS)

test: ## every test, against the code that the wheel holds (12 to 16 minutes on two cores)
	@scripts/setup test $(TEST_PROGRAMS)
	@echo "test: pytest -n $(JOBS) $(ARGS)" >&2
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

check: ## what a change must pass before it is sent: format, lint, types, layers, unit tests
	@scripts/setup test
	@scripts/check

bench: ## Everdeck beside its peers and the bare kernel; writes docs/benchmarks.md
	@scripts/setup bench $(BENCH_PROGRAMS)
	@$(BIN)/python -m bench $(ARGS)

# What harms the servers of the cluster itself comes first and alone; it mostly waits, so an image is brought to two nodes
# meanwhile. The others wait for pods most of the time, so five at once do; those that harm nodes have nodes of their own.
ALONE := tests/kubernetes/test_control_plane.py
BESIDE := $(filter-out $(ALONE), $(wildcard tests/kubernetes/test_*.py)) tests/contract

test-kubernetes: ## the tests on a real cluster, made here from Debian packages (root; 25 minutes, 8 with its cache)
	@scripts/setup test $(CLUSTER_PROGRAMS)
	@scripts/cluster up everdeck --nodes 6
	@status=0; export EVERDECK_TEST_PATIENCE=240; \
	  scripts/cluster jupyter n5 n6 & jupyter=$$!; \
	  scripts/cluster run $(BIN)/python -m pytest -n 0 $(ALONE) $(ARGS) || status=$$?; \
	  wait $$jupyter || status=$$?; \
	  scripts/cluster run $(BIN)/python -m pytest -n 5 --dist loadgroup $(BESIDE) -k "kubernetes or cluster" $(ARGS) \
	    || status=$$?; \
	  scripts/cluster figures; scripts/cluster down; exit $$status

test-machine: ## systemd, cgroups, kernel 6.1 and power cuts in a virtual machine made here (root; ARGS=SUITE for one)
	@scripts/setup test
	@scripts/machine test $(ARGS)

chaos: ## random SIGKILLs of owner and workers: make chaos SECONDS=60 SEED=7
	@scripts/setup test
	@$(BIN)/python scripts/chaos.py --seconds $(SECONDS) --seed $(SEED) $(ARGS)

docs: ## the documentation as a site with search, in build/docs; a broken link is an error
	@scripts/setup test
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs $(ARGS)
	@echo "docs: open build/docs/index.html" >&2

dist: ## wheel and sdist in dist/, from a clean tree, each installed into an empty environment per Python that is there
	@scripts/setup test
	@scripts/dist

docs-img: ## the screenshots in docs/img, taken from a real daemon by a real browser
	@scripts/setup test $(TEST_PROGRAMS)
	@EVERDECK_SCREENSHOTS=docs/img $(BIN)/python -m pytest tests/browser -k screenshot $(ARGS)

setup: ## only the set-up, with everything that the tests can use
	@scripts/setup test $(TEST_PROGRAMS)

clean: ## remove what the other targets made (not .everdeck: that is a deck)
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis bench/work
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
