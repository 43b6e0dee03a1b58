# `make` lists what there is. Everything runs in .venv, which is made when it is first needed.

# The Python that .venv is made with: 3.11, 3.12 or 3.13.
PYTHON ?= python3
IN_VENV = .venv/bin/python -m
LOCK_GROUP = $(IN_VENV) uv pip compile --quiet --universal --python-version 3.11 \
             --generate-hashes --no-header --no-annotate --no-emit-index-url $(ARGS)
LOCK = $(LOCK_GROUP) pyproject.toml

.DEFAULT_GOAL = help
.PHONY: help run demo test faults drain bench check format lock clean

help:     ## list these targets
	@sed -n 's/^\([a-z]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

run:      .venv/installed  ## run everything on this machine until Ctrl-C (PORT=8000)
	@$(IN_VENV) deploy.local run

demo:     .venv/installed  ## send one request through the whole chain and show the time of each step
	@$(IN_VENV) deploy.local demo

test:     .venv/installed  ## run all tests, with branch coverage (ARGS="-k name" for some)
	@mkdir -p .local/coverage && rm -f .local/coverage/data*
	$(IN_VENV) coverage run -m pytest $(ARGS)
	@$(IN_VENV) coverage combine --quiet
	$(IN_VENV) coverage report $(if $(ARGS),--fail-under=0)

faults:   .venv/installed  ## inject faults into running processes for half an hour (ARGS="--seconds 60")
	$(IN_VENV) pytest -q -o addopts= tests/faults/test_invariants.py
	$(IN_VENV) tests.faults $(ARGS)

drain:    .venv/installed  ## measure the relay on a full outbox, an old snapshot, poison, nothing (ARGS="--only idle")
	$(IN_VENV) tests.faults.drain $(ARGS)

bench:    .venv/installed .local/peers/installed  ## compare us with others (ARGS="--only create relay --rounds 1")
	$(IN_VENV) tests.benchmarks $(ARGS)

check:    .venv/installed  ## lint, format, types, import contracts
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy
	.venv/bin/python .venv/bin/lint-imports

format:   .venv/installed  ## format the code and fix what can be fixed
	$(IN_VENV) ruff check --fix .
	$(IN_VENV) ruff format .

lock:     .venv/installed  ## compile the locks of the dependencies anew (ARGS=--upgrade for newer releases)
	$(LOCK) -o requirements.lock
	$(LOCK) --group test --group tools -o requirements-dev.lock
	$(LOCK_GROUP) --group peers -o requirements-peers.lock

clean:                     ## remove .venv and .local, with all data in it
	@$$([ -x .venv/bin/python ] && echo .venv/bin/python || echo $(PYTHON)) -m deploy.local clean
	rm -rf .venv

.local/peers/installed: requirements-peers.lock
	$(PYTHON) -m venv --clear .local/peers
	.local/peers/bin/python -m pip install --quiet --no-input --disable-pip-version-check --require-hashes -r $<
	@touch $@

.venv/installed: requirements-dev.lock deploy/local/install
	@deploy/local/install "$(PYTHON)"
