# ds_core: every target does its own set-up. Needs GNU make and python3 >= 3.10 with venv; nothing else.
#
#   make quickstart   train the example GPT on two processes: half, then from the checkpoint to the end
#   make test         lint and the tests (not the slow ones, not those that need a GPU)
#   make changed      lint and the tests that what differs from BASE calls for (BASE: where the branch left origin/main, or HEAD~1)
#   make test-all     lint and all tests that this machine can run
#   make lint         ruff, mypy --strict, import-linter, proselint with docs/style.toml, links, install lines
#   make wheels       a wheel of every distribution in dist/: pip install -c dist/constraints.txt "dscore-train[standard]"
#   make test-wheels  each distribution from its wheel, in an empty environment, with what it declares
#   make test-versions  the oldest and newest python and torch, from wheels: the table of docs/versions.md (20 GB of downloads)
#   make test-frontends  transformers, accelerate, lightning, peft, trl and scripts for DeepSpeed, unchanged, on ds_core
#   make test-programs  DeepSpeedExamples' programs, unchanged, on ds_core: PROGRAMS=FOLDER has them and their runner
#   make test-matrix  every pair of features, and every triple of the numeric core, against plain torch; resumes where it was interrupted
#   make test-monitors  wandb, comet_ml, mlflow and trackio, offline: what they record of a run
#   make test-hosts   launchers on hosts in namespaces: ssh, pdsh, MPI, Slurm, Ray (Debian packages, root)
#   make release-check  all of these, one after the other; resumes where it was interrupted; results in benchmarks/release-check.md
#   make release VERSION=x  a checked release in dist/, with its commit and tag; uploads nothing (RELEASING.md). DRY=1 tries it
#   make bench        the benchmarks
#   make docs         the documentation in site/
#   make release-notes  what changes/ becomes in CHANGELOG.md; WRITE=1 moves it there
#   make catalogue    ds_core/catalogue.json and the stub of engine methods, from the packages
#   make clean        remove everything that these made, .venv too

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := test

PYTHON ?= python3
TORCH := torch==2.13.0

# Every folder with a pyproject.toml is a distribution; a new one needs no line here.
DISTS := . $(patsubst %/,%,$(sort $(dir $(wildcard plugins/*/pyproject.toml ops/*/pyproject.toml monitors/*/pyproject.toml))))

PACKAGES := ds_core $(wildcard plugins/*/ds_* ops/*/ds_* monitors/*/ds_*)

# [Note: one set-up per change] The stamp's name holds a checksum of all that decides what is installed, and of
# where: a virtual environment does not survive being moved. Set-up runs again only when one of them changes.
INPUTS := Makefile constraints.txt requirements-dev.txt $(patsubst %,%/pyproject.toml,$(DISTS))
HASH := $(shell (echo '$(CURDIR)'; cat $(INPUTS)) | cksum | tr -c '0-9\n' '-')
VENV := .venv
STAMP := $(VENV)/.stamp-$(HASH)

BIN := $(VENV)/bin
PY := $(BIN)/python
DSCORE := $(BIN)/dscore
# -qq: only errors. Progress is told by the recipe's own lines.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq -c constraints.txt
PYTEST := $(PY) -m pytest

ARGS ?=

.PHONY: setup quickstart test changed test-all test-matrix test-wheels test-versions test-frontends test-programs test-monitors test-hosts release-check release lint pytest wheels bench docs catalogue release-notes clean help

setup: $(STAMP)

# [Note: uv] torch by pip (its own sources say where the build without CUDA lies), the rest by uv, which takes a quarter of
# pip's time: from the PATH, or brought by pip. Where uv is missing or fails, or UV=no is given, pip does it. Like pip, uv
# trusts the system's certificates: those of a company's proxy are nowhere else (the second name is that of newer releases).
define INSTALL
install() { \
  uv=$$(command -v uv || echo $(BIN)/uv); \
  if [ '$(UV)' != no ] && [ -x "$$uv" ]; then \
    UV_NATIVE_TLS=1 UV_SYSTEM_CERTS=1 "$$uv" pip install -q --python $(PY) -c constraints.txt "$$@" && return; \
    echo "  uv failed as it says above; pip installs the same, which takes longer"; \
  fi; \
  $(PIP) "$$@"; \
}; install
endef

# torch goes first and exact: a range could bring another build of it, with gigabytes of libraries.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"python >= 3.10 is needed, {sys.executable} is {sys.version.split()[0]}; use: make PYTHON=/path/to/python3")'
	@echo "set-up 1/4: $(VENV)"
	@grep -qs '$(CURDIR)/$(VENV)' $(BIN)/activate || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/.stamp-*
	@echo "set-up 2/4: $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "set-up 3/4: tools"
	@[ '$(UV)' = no ] || command -v uv > /dev/null || $(PIP) uv 2> /dev/null || echo "  without uv, by pip"
	@$(INSTALL) -r requirements-dev.txt
	@echo "set-up 4/4: $(words $(DISTS)) distributions"
	@$(PY) -m pip list --editable --format=freeze 2> /dev/null | sed 's/==.*//' | grep -vxFf <(sed -n 's/^name = "\(.*\)"/\1/p' $(addsuffix /pyproject.toml,$(DISTS))) \
	  | xargs -r $(PY) -m pip uninstall -qqy || test $$? = 1  # what this clone has no more, or under another name
	@$(INSTALL) --no-build-isolation $(addprefix -e ,$(DISTS))
	@$(PY) -m pip check
	@touch $@

# The site's own tools are installed when it is first built.
DOCS_STAMP := $(VENV)/.docs-$(shell cat constraints.txt docs/requirements.txt | cksum | tr -c '0-9\n' '-')
SITE ?= site

quickstart: $(STAMP)
	@rm -rf runs/gpt
	$(DSCORE) run --nproc 2 examples/gpt/train.py --stop-after 250 $(ARGS)
	$(DSCORE) run --nproc 2 examples/gpt/train.py $(ARGS)
	$(DSCORE) report runs/gpt

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports --no-logo
	$(PY) .ci/prose.py
	$(PYTEST) -q tests/docs/test_links.py tests/docs/test_install_lines.py

test: lint
	$(PYTEST) -m "not slow and not gpu and not integration and not hosts" $(ARGS)

test-all: lint $(DOCS_STAMP)
	$(PYTEST) -m "$$($(PY) -c 'import torch; print("" if torch.cuda.is_available() else "not gpu and ")')not integration and not hosts" $(ARGS)

changed: lint
	$(PY) tests/architecture/changed.py $(if $(BASE),--base $(BASE)) $(ARGS)

pytest: $(STAMP)
	$(PYTEST) $(ARGS)

# Rows that have run are kept in build/matrix.jsonl; one part of four: ARGS="--shard 1/4".
test-matrix: $(STAMP)
	PYTHONPATH=tests $(PY) tests/matrix/matrix.py --triples $(ARGS)

test-wheels: $(STAMP)
	$(PYTEST) tests/wheels $(ARGS)

test-versions: $(STAMP)
	PYTHONPATH=tests $(PY) tests/versions/run.py $(ARGS)

# The front-ends, and DeepSpeed to compare with, lie in an environment of their own, on top of .venv.
FRONTENDS := plugins/deepspeed_compat/tests/frontends
FRONT := .venv-frontends

test-frontends: $(STAMP)
	@$(PY) -m venv $(FRONT)
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(FRONT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ds_core_venv.pth
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(FRONT)/bin/python -m pip install -qq -c constraints.txt -r $(FRONTENDS)/requirements.txt
	@PIP_DISABLE_PIP_VERSION_CHECK=1 DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(FRONT)/bin/python -m pip install -qq --no-build-isolation deepspeed==0.19.8
	$(FRONT)/bin/python -m pytest -m integration plugins/deepspeed_compat/tests $(ARGS)

# Programs that others wrote, and a runner of them, which are not part of this repository.
PROGRAMS ?= ../shared/programs
PROGRAMS_VENV := .venv-programs

test-programs: $(STAMP)
	@test -f $(PROGRAMS)/run.py || { echo "test-programs: there is no $(PROGRAMS)/run.py; name its folder: make test-programs PROGRAMS=FOLDER"; exit 2; }
	@test -f $(PROGRAMS_VENV)/.ready || { sh $(PROGRAMS)/setup.sh $(PROGRAMS_VENV) $(PY) && touch $(PROGRAMS_VENV)/.ready; }
	$(PYTHON) $(PROGRAMS)/run.py --python $(CURDIR)/$(PROGRAMS_VENV)/bin/python $(ARGS)

# Like test-frontends: packages that are large, and not needed to build or test the rest.
MONITORS := .venv-monitors

test-monitors: $(STAMP)
	@$(PY) -m venv $(MONITORS)
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(MONITORS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ds_core_venv.pth
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(MONITORS)/bin/python -m pip install -qq -r tests/monitors/requirements.txt
	$(MONITORS)/bin/python -m pytest -m integration tests/monitors $(ARGS)

# On hosts that ds_testing_hosts.lab makes. Without apt-get, tests of what is missing are skipped and say what that is.
HOSTS := .venv-hosts
HOSTS_DEBIAN := iproute2 openssh-client openssh-server pdsh openmpi-bin mpich slurmctld slurmd slurm-client munge

test-hosts: $(STAMP)
	@missing=$$(dpkg-query -W -f='$${Package} $${Status}\n' $(HOSTS_DEBIAN) 2>/dev/null | sed -n 's/ install ok installed//p' \
	  | sort - <(tr ' ' '\n' <<< '$(HOSTS_DEBIAN)') | uniq -u); \
	if [ -n "$$missing" ] && command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "apt-get install" $$missing; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing > /dev/null; \
	fi
	@$(PY) -m venv $(HOSTS)
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(HOSTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ds_core_venv.pth
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(HOSTS)/bin/python -m pip install -qq -r tests/hosts/requirements.txt
	$(HOSTS)/bin/python -m pytest -m hosts $(ARGS)

# What must be green together before a release. Takes hours; logs in build/release-check, and how each ended in
# benchmarks/release-check.md. What was green at this commit is not run again (ARGS=--again: all).
RELEASE_CHECKS := lint docs test-all test-matrix test-wheels test-frontends test-monitors test-hosts test-programs test-versions

release-check: $(STAMP)
	@$(PY) .ci/release_check.py $(RELEASE_CHECKS) $(ARGS)

# Wheels to install from this clone need hatchling alone, not the whole set-up.
BUILD := .venv-build

$(BUILD)/.ready: constraints.txt
	@$(PYTHON) -m venv --clear $(BUILD)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BUILD)/bin/python -m pip install -qq -c constraints.txt hatchling 'tomli; python_version < "3.11"'
	@touch $@

wheels: $(BUILD)/.ready
	@$(BUILD)/bin/python .ci/build.py dist
	@echo 'pip install -c dist/constraints.txt "dscore-train[standard]"'

# What is not needed before a release: .ci/requirements.txt. DRY=1 leaves this tree as it is, SKIP_TESTS=1 runs no test-wheels.
RELEASE_STAMP := $(VENV)/.release-$(shell cat constraints.txt .ci/requirements.txt | cksum | tr -c '0-9\n' '-')

$(RELEASE_STAMP): $(STAMP)
	@$(PIP) -r .ci/requirements.txt
	@rm -f $(VENV)/.release-* && touch $@

release: $(RELEASE_STAMP)
	@test -n '$(VERSION)' || { echo "release: say which: make release VERSION=0.2.0"; exit 2; }
	@$(PY) .ci/release.py '$(VERSION)' $(if $(DRY),--dry-run) $(if $(SKIP_TESTS),--skip-tests) $(ARGS)

bench: $(STAMP)
	@for bench in $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))); do echo "== $$bench"; $(PY) $$bench; done

# ds_core/__init__.py says the version. Without WRITE=1 nothing is changed.
release-notes: $(STAMP)
	@$(BIN)/towncrier build --version $$(sed -n 's/^__version__ = "\(.*\)"/\1/p' ds_core/__init__.py) $(if $(WRITE),--yes,--draft)

catalogue: $(STAMP)
	PYTHONPATH=tests $(PY) tests/architecture/catalogue.py
	PYTHONPATH=tests $(PY) tests/architecture/engine_methods.py

$(DOCS_STAMP): $(STAMP)
	@$(PIP) -r docs/requirements.txt
	@rm -f $(VENV)/.docs-* && touch $@

docs: $(DOCS_STAMP)
	$(PY) -m sphinx -b html -W --keep-going -q -j auto -d build/doctrees docs $(SITE)
	@echo "$(SITE)/index.html"

clean:
	rm -rf $(VENV) $(BUILD) .venv-frontends .venv-programs .venv-monitors .venv-hosts dist site runs build examples/*/build versions-* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:
	@sed -n '3,/^$$/s/^# *//p' Makefile
