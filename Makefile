# `make` lists what there is. Everything runs in .venv, which is made when first needed.

# Where Python writes no bytecode, every process of the tests would compile the product and its libraries again.
unexport PYTHONDONTWRITEBYTECODE

# The Python that .venv is made with: 3.11 or later.
PYTHON ?= python3
IN_VENV = .venv/bin/python -m
LOCK = $(IN_VENV) uv pip compile --quiet --universal --python-version 3.11 \
       --generate-hashes --no-header --no-annotate --no-emit-index-url $(ARGS)
PARALLEL = --maxprocesses 8 --dist
# The tests that take the whole machine. Beside others, not every fault would be injected in time, and a RabbitMQ
# cluster might recover late.
ALONE = every_fault_comes_once or node_of_a_cluster_fails
DEPLOY_CHECKS = $(addprefix tests/deploy/,test_manifests.py test_own_overlay.py test_network_policy.py \
                test_roles.py check_operator_schemas.py check_image.py) tests/service/outbox/test_asyncapi.py

.DEFAULT_GOAL = help
.PHONY: help run test test-long test-matrix fuzz faults cluster-check bench check deploy-check sbom asyncapi format lock clean

help:     ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

run:      .venv/installed  ## run everything on this machine until Ctrl-C (PORT=8000 JOURNEY_PORT=8010)
	@$(IN_VENV) deploy.local run

test:     .venv/installed  ## run the tests, with branch coverage (some, without: ARGS="-k name")
	$(IN_VENV) pytest -n auto $(PARALLEL) worksteal $(if $(ARGS),$(ARGS),--cov)

test-long: .venv/long-installed ## run the tests that take long: all faults, histories, bodies, overload
	@deploy/node/install
	$(if $(ARGS),,$(IN_VENV) pytest -m long -k "$(ALONE)")
	$(IN_VENV) pytest -m long -n auto $(PARALLEL) worksteal --hypothesis-profile default $(or $(ARGS),-k "not ($(ALONE))")

test-matrix:               ## run the tests with every Python, and with old and new servers (some: ARGS="python3.13")
	@tests/matrix $(ARGS)

fuzz:     .venv/installed  ## call the API with everything its OpenAPI document allows or forbids, and with mutated bodies
	FUZZ=long $(IN_VENV) pytest -q -s -o addopts= tests/fuzz

faults:   .venv/installed  ## inject faults into running processes for half an hour (ARGS="--seconds 60")
	$(IN_VENV) pytest -q tests/faults
	$(IN_VENV) tests.faults $(ARGS)

cluster-check: .venv/installed  ## inject faults under load into the development overlay in a cluster (KUBECONFIG)
	$(IN_VENV) tests.cluster $(ARGS)

bench:    .venv/installed .local/peers/installed  ## compare the product with other programs (ARGS="--only create relay --rounds 1")
	$(IN_VENV) tests.benchmarks $(ARGS)

check:    .venv/installed  ## lint, format, types, import contracts
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy
	.venv/bin/python .venv/bin/lint-imports

deploy-check: .venv/deploy-installed  ## lint and validate image, Compose, Kubernetes, AsyncAPI and workflows
	@deploy/local/kubectl-install
	.venv/bin/hadolint deploy/Dockerfile
	.venv/bin/zizmor --offline --no-progress --quiet --min-severity=medium .github
	@deploy/node/install
	$(IN_VENV) pytest -o addopts= -q -rs -o python_files='test_*.py check_*.py' $(DEPLOY_CHECKS) $(ARGS)

sbom:     .venv/deploy-installed  ## write .local/sbom.cdx.json: the packages of the image, as CycloneDX
	.venv/bin/python -W ignore -m cyclonedx_py requirements deploy/locks/product.lock --pyproject pyproject.toml \
		--output-reproducible --validate --output-file .local/sbom.cdx.json

asyncapi: .venv/installed  ## write deploy/asyncapi.json
	$(IN_VENV) service asyncapi > deploy/asyncapi.json

format:   .venv/installed  ## format the code and apply safe fixes
	$(IN_VENV) ruff check --fix .
	$(IN_VENV) ruff format .

lock:     .venv/installed  ## compile the dependency locks (newer releases: ARGS=--upgrade)
	$(LOCK) pyproject.toml -o deploy/locks/product.lock
	$(LOCK) pyproject.toml --group test --group tools -o deploy/locks/development.lock
	$(LOCK) --group long -c deploy/locks/development.lock -o deploy/locks/long.lock
	$(LOCK) --group deploy -c deploy/locks/development.lock -o deploy/locks/deploy-check.lock
	$(LOCK) --group peers -o deploy/locks/peers.lock

clean:                     ## remove .venv and .local, with all data in it
	@$$([ -x .venv/bin/python ] && echo .venv/bin/python || echo $(PYTHON)) -m deploy.local clean
	rm -rf .venv

.local/peers/installed: deploy/locks/peers.lock | .venv/installed
	$(PYTHON) -m venv --clear --without-pip .local/peers
	$(IN_VENV) pip --python .local/peers/bin/python --quiet --no-input --disable-pip-version-check \
		install --no-deps --require-hashes -r $<
	@touch $@

.venv/installed: deploy/locks/development.lock deploy/local/install
	@deploy/local/install "$(PYTHON)" .venv

.venv/long-installed: .venv/installed deploy/locks/long.lock
	@$(IN_VENV) pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r deploy/locks/long.lock
	@touch $@

.venv/deploy-installed: .venv/installed deploy/locks/deploy-check.lock
	@$(IN_VENV) pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r deploy/locks/deploy-check.lock
	@touch $@
