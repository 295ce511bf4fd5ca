# `make train` and `make test` are all that a newcomer needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

unexport PYTHONDONTWRITEBYTECODE  # else each process that a test starts would compile the whole of Squall

.PHONY: train test promises deep check browser soak chaos failures bench docs clean

train: $(READY)  ## train the digits example: 2 replicas, 1 shard, in separate processes
	$(BIN)/squall train examples/digits.py

test: $(READY)  ## lint, types, and every promise of the README: 5 minutes
	@$(MAKE) --no-print-directory -j2 check promises

promises: $(READY)  ## every promise of the README alone; much of what tests take is waiting, so three go at once
	$(BIN)/python -m pytest -n 3 --dist worksteal

deep: $(READY)  ## what make test leaves out: whole sweeps, random worlds and faults with the day's seeds; half an hour
	$(BIN)/python -m pytest --deep --no-repeats -n 2 --dist worksteal
	$(BIN)/python -m squall.sim.proof.soak --count 1000 --first $(shell date +%y%m%d)0000
	$(BIN)/python -m squall.sim.proof.soak --count 500 --first $(shell date +%y%m%d)0000 --answers
	$(BIN)/python -m squall.sim.proof.soak --count 250 --first $(shell date +%y%m%d)0000 --copies
	$(BIN)/python -m squall.sim.proof.soak --count 250 --first $(shell date +%y%m%d)0000 --deputies
	$(BIN)/python -m tests.chaos --faults 30

check: $(READY)  ## lint and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

BROWSER := chromium chromium-driver
browser:  ## Debian's Chromium, if root can install it, for the tests of pages; without one they are skipped, and say so
	@if ! { command -v chromium || command -v chromedriver; } && command -v apt-get && [ "$$(id -u)" = 0 ]; then \
		echo 'installing $(BROWSER): five minutes at most' >&2; export DEBIAN_FRONTEND=noninteractive; \
		timeout -k 9 300 sh -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends $(BROWSER)' \
			|| echo 'it was not to be had: tests of pages are skipped' >&2; \
	fi >/dev/null </dev/null

soak: $(READY)  ## chaotic worlds, COUNT of them or until Ctrl-C; a failing one is shrunk and shown
	$(BIN)/python -m squall.sim.proof.soak $(if $(COUNT),--count $(COUNT)) $(if $(FIRST),--first $(FIRST))

chaos: $(READY)  ## real runs under random faults, COUNT of them (default 200); SEED is the day's unless it is given
	$(BIN)/python -m tests.chaos $(if $(COUNT),--faults $(COUNT)) $(if $(SEED),--seed $(SEED))

failures: $(READY)  ## what happens when processes of a run fail, measured: writes docs/failures.md, in some twenty minutes
	$(BIN)/python -m benchmarks.failures

bench: $(READY)  ## measure against the floor and the peers; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

docs: $(READY)  ## write the tables in docs/ from the code
	$(BIN)/python docs/make.py

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

$(READY): pyproject.toml constraints.txt
	@echo 'Once: torch and the rest are installed into $(VENV). pip says nothing while it takes its minutes.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@
