# Every target creates what it needs: the first one to run builds .venv from PyPI.
# Nothing outside this folder is changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
KERNEL := $(wildcard src/penstock/kernel/*.pyx src/penstock/kernel/*.pxd)
PYTEST := $(BIN)/python -m pytest
SPREAD := -n auto --maxprocesses 4 --dist loadfile

.PHONY: help env demo test quick style types unit crash fuzz soak models spark-full bench docs wheel clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(VENV)/.ready  ## .venv with everything the project uses

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Penstock needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.ready: $(VENV)/.created pyproject.toml setup.py constraints.txt $(KERNEL)
	@echo "installing penstock and its tools (a few minutes the first time)"
	@PIP_CONSTRAINT=constraints.txt $(PIP) install --group dev --group bench -e '.[all]'
	@$(BIN)/python -c 'import penstock.kernel as k, sys; sys.exit(None if k.native else k.reason)'
	@touch $@

demo: env  ## the main job on embedded defaults, bounded
	@$(BIN)/python -m penstock.cli.main demo

quick: style types unit  ## style, types, unit

style: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: env
	@$(BIN)/mypy

unit: env
	@$(PYTEST) -q $(SPREAD) tests/unit

test: env style types  ## everything, with the short forms of the long tests
	@$(PYTEST) -q $(SPREAD) --ignore tests/integration/spark
	@$(PYTEST) -q tests/integration/spark

crash: env  ## kill -9 loops, long form
	@$(PYTEST) -q -s tests/crash -m "long or not long" --long --timeout 7200

fuzz: env  ## every decoder, 10 million inputs each
	@for target in fuzz/[!_]*.py; do $(BIN)/python $$target --inputs 10000000 || exit 1; done

soak: env  ## hours of load, bounded
	@$(PYTEST) -q -s tests/soak --long --timeout 7200

models: env  ## the models of the guards on large bounds
	@$(PYTEST) -q -s tests/models --long --timeout 7200

spark-full: env  ## cluster and pipelines
	@$(PYTEST) -q -s tests/integration/spark tests/crash/test_spark_kill.py tests/integration/test_examples.py tests/integration/test_howto.py --long --timeout 7200

bench: env  ## every bench/*.py, tables into docs/benchmarks.md
	@$(BIN)/python bench/_all.py

docs: env  ## check the docs: links, names, examples
	@$(PYTEST) -q tests/unit/test_docs.py

wheel: env  ## a wheel in dist/
	@PIP_CONSTRAINT=constraints.txt $(PIP) wheel --no-deps -w dist .

clean:  ## remove what was built, .venv included
	@rm -rf $(VENV) build dist src/*.egg-info
	@find src tests -name __pycache__ -prune -exec rm -rf {} +
	@rm -f src/penstock/kernel/*.so
