# Every target does the set-up that it needs; what is done is skipped. GNU make 3.81 and later.

PYTHON3 := $(shell command -v python3 || command -v python3.13 || command -v python3.12 || command -v python3.11)
VENV := .venv/bin
SOAK_EXAMPLES := 1000

.PHONY: help setup tools demo serve test check fix gate soak test-clients bench clean

help:
	@echo 'make demo    set up, then four workers serve an orchestrated session; ends in build/demo.json'
	@echo 'make serve   set up, then serve until Ctrl-C; prints the address and a first curl'
	@echo 'make test    set up, then the tests (a few minutes)'
	@echo 'make check   format, lint, types and the map of the rooms'
	@echo 'make fix     format, and mend what the linter can'
	@echo 'make gate    the longest tests: hit rates of 1,700 calls, what 8 bits cost, 40 runs in a tree (minutes)'
	@echo 'make soak    property tests with new random seeds, and the slow tests'
	@echo 'make test-clients  real Codex, opencode, Hermes and Claude Code against the server (Linux; minutes)'
	@echo 'make bench   the benchmarks that there are, and how to run them'
	@echo 'make setup   only the set-up: .venv, OpenBLAS on Debian, the default model'
	@echo 'make clean   remove .venv and build (the model stays in its cache)'

setup:
	@test -n '$(PYTHON3)' || { echo 'Python 3 is needed: install python3, then run this again.' >&2; exit 2; }
	@'$(PYTHON3)' deploy/setup.py

# Without the model.
tools:
	@test -n '$(PYTHON3)' || { echo 'Python 3 is needed: install python3, then run this again.' >&2; exit 2; }
	@'$(PYTHON3)' deploy/setup.py --no-model

demo: setup
	@$(VENV)/python -m gateway demo

serve: setup
	@exec $(VENV)/python -m gateway serve

# Three processes on two cores, as many tests wait; each computes with one thread. What is freed is kept (only glibc
# knows these words): MLX's CPU backend asks for the same buffers again and again. The files with real processes come first.
TEST_ENVIRONMENT := OPENBLAS_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296

test: setup
	$(TEST_ENVIRONMENT) $(VENV)/python -m pytest -q -m 'not slow and not gate' -n 3 --dist loadfile --no-loadscope-reorder

check: tools
	$(VENV)/python -m ruff format --check .
	$(VENV)/python -m ruff check .
	$(VENV)/python -m mypy
	$(VENV)/python -m pytest -q tests/test_architecture.py

fix: tools
	$(VENV)/python -m ruff check --fix .
	$(VENV)/python -m ruff format .

gate: setup
	$(TEST_ENVIRONMENT) $(VENV)/python -m pytest -q -m gate -n 2

soak: setup
	TETRARCH_SOAK=$(SOAK_EXAMPLES) $(VENV)/python -m pytest -q -n 2 --dist loadfile tests/properties
	$(VENV)/python -m pytest -q -m slow

test-clients: tools
	@$(VENV)/python deploy/clients/run.py

bench:
	@for file in bench/README.md bench/[a-z]*.py; do \
	  printf '%-28s %s\n' "$$file" "$$(sed -n '1s/[#"]* *//; 1s/"*$$//p' "$$file")"; \
	done

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
