# Every target creates what it needs: the first one to run builds .venv from PyPI.
# Nothing outside this folder is changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
KERNEL := $(wildcard src/penstock/kernel/*.pyx src/penstock/kernel/*.pxd)
PYTEST := $(BIN)/python -m pytest
ASAN    = LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0:handle_segv=0:handle_sigbus=0 PYTHONMALLOC=malloc PYTHONPATH=$(CURDIR)/build/asan/src
SPREAD := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: help env demo test quick style types unit crash damage hostile asan fuzz soak models objects spark-full interop bench docs wheel clean

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
	@$(BIN)/python -m compileall -q src  # hundreds of processes are started: none compiles again, whatever the environment says
	@mkdir -p build; $(PYTEST) -q tests/integration/spark >build/spark.log 2>&1 & spark=$$!; \
	  $(PYTEST) -q $(SPREAD) --ignore tests/integration/spark; rest=$$?; \
	  echo "and Spark, in a process of its own beside these:"; wait $$spark; spark=$$?; cat build/spark.log; \
	  exit $$((rest || spark))

crash: env  ## kill -9 loops, long form
	@$(PYTEST) -q -s tests/crash --long --timeout 7200

fuzz: env  ## every decoder, 10 million inputs each
	@for target in fuzz/[!_]*.py; do $(BIN)/python $$target --inputs 10000000 || exit 1; done

damage: env  ## every byte flipped, every length cut, every file removed, doubled, zeroed, swapped
	@$(PYTEST) -q -s tests/damage --long --timeout 7200 --show-capture=no

hostile: env  ## crafted files of every format through every command, under limits of memory and time
	@$(PYTEST) -q -s tests/hostile --long --timeout 7200

asan: env  ## kernel tests and fuzzers with AddressSanitizer, in a copy of the sources
	@rm -rf build/asan && mkdir -p build/asan && cp -r src setup.py pyproject.toml README.md build/asan/
	@find build/asan \( -name '*.so' -o -name '*.c' \) -delete
	@cd build/asan && CFLAGS="-fsanitize=address -fno-omit-frame-pointer -g -O1" LDFLAGS=-fsanitize=address \
	  $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace
	@$(ASAN) $(BIN)/python -c 'import penstock.kernel as k, sys; sys.exit(None if k.native and "build/asan" in k.__file__ else "not the checked kernel")'
	@$(ASAN) $(PYTEST) -q -p no:faulthandler tests/unit/kernel tests/property/test_kernels_agree.py tests/property/test_pgss_kernel.py \
	  tests/property/test_filechannel_kernel.py tests/property/test_messagelog_kernel.py tests/property/test_fuzz_xchannel.py tests/property/test_lmdb_kernel.py tests/property/test_rockslog_kernels_agree.py \
	  tests/property/test_mqtt_kernels_agree.py tests/property/test_mqttcarry_kernels_agree.py tests/property/test_mqttrelay_kernels_agree.py \
	  tests/property/test_wsframes_kernels_agree.py tests/property/test_natswire_kernels_agree.py \
	  tests/hostile/test_shrinking.py
	@# A conversation is hundreds of packets or frames, and under AddressSanitizer each takes several times as long.
	@for target in fuzz/[!_]*.py; do \
	  case $$target in *conversation*) inputs=2000;; *) inputs=100000;; esac; \
	  $(ASAN) $(BIN)/python $$target --inputs $$inputs || exit 1; \
	done

soak: env  ## hours of load, bounded
	@$(PYTEST) -q -s tests/soak --long --timeout 7200

models: env  ## the models of the guards on large bounds
	@$(PYTEST) -q -s tests/models --long --timeout 7200

objects: env  ## artifacts and shipping under kills, long form
	@$(PYTEST) -q -s tests/integration/objects tests/unit/ship/test_edge_fleet.py tests/unit/artifact/test_tar.py --long --timeout 7200

spark-full: env  ## cluster and pipelines
	@$(PYTEST) -q -s tests/integration/spark tests/crash/test_spark_kill.py tests/integration/test_examples.py tests/integration/test_howto.py --long --timeout 7200

interop: env  ## against mosquitto, its clients and Azurite, installed by package name
	@missing=""; command -v mosquitto >/dev/null || missing="mosquitto"; \
	  command -v mosquitto_sub >/dev/null || missing="$$missing mosquitto-clients"; \
	  if [ -n "$$missing" ]; then \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q >/dev/null && apt-get install -y -q $$missing >/dev/null \
	    || { echo "interop needs $$missing: install the Debian packages of these names"; exit 1; }; \
	  fi
	@command -v azurite-blob >/dev/null || npm install --silent --no-package-lock --prefix build/azurite azurite >/dev/null \
	  || echo "interop needs azurite: the npm package of this name"
	@PATH="$(CURDIR)/build/azurite/node_modules/.bin:$$PATH" $(PYTEST) -q tests/interop --long --timeout 600

bench: env  ## every bench/*.py, tables into docs/benchmarks.md
	@$(BIN)/python bench/_all.py

docs: env  ## check the docs: links, names, examples
	@$(PYTEST) -q tests/unit/test_docs.py

wheel: env  ## a manylinux wheel in dist/, tried in an empty environment
	@rm -rf build/wheel && mkdir -p build/wheel dist
	@PIP_CONSTRAINT=constraints.txt $(PIP) wheel --no-deps -w build/wheel .
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair -w dist build/wheel/penstock-*.whl
	@$(PYTHON) -m venv --clear build/wheel/empty
	@build/wheel/empty/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt "$$(ls -t dist/penstock-*.whl | head -1)"
	@build/wheel/empty/bin/penstock --version
	@build/wheel/empty/bin/python -c 'import penstock.kernel as k, sys; sys.exit(None if k.native else k.reason)'
	@ls -t dist/penstock-*.whl | head -1

clean:  ## remove what was built, .venv included
	@rm -rf $(VENV) build dist src/*.egg-info
	@find src tests -name __pycache__ -prune -exec rm -rf {} +
	@rm -f src/penstock/kernel/*.so
