# Each target does all its own set-up: a virtual environment, the packages it lacks, the build.
# PYTHON chooses the Python to start from; its torch is used when it has one, and TORCH is installed when it has none.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PREPARE = $(PYTHON) build_support/prepare.py $(VENV) $(TORCH)
PREPARE_TESTS = $(PREPARE) test test-frameworks

# Without a GPU, `make demo` and `make test` leave out the kernels, which take long to compile; DASH_ATTN_SKIP_CUDA=0
# compiles them. Other targets that build compile them wherever nvcc is.
demo test: export DASH_ATTN_SKIP_CUDA ?= $(if $(wildcard /dev/nvidiactl),0,1)

# Test files run side by side. A GPU has one process, since some tests need the GPU alone.
test test-slow test-all: export OMP_NUM_THREADS ?= 1
PROCESSES = $(if $(wildcard /dev/nvidiactl),,-n logical --maxprocesses 8 --dist loadfile)
PYTEST = $(VENV)/bin/python -m pytest -ra $$($(VENV)/bin/python -c "import xdist" && printf '%s' '$(PROCESSES)')

.PHONY: demo test test-slow test-all build lint docs wheel clean

demo:
	$(PREPARE) demo
	$(VENV)/bin/python -m dash_attn.demo

# Every part in about ten minutes on two cores; tests that take long or are one of many of a kind are marked slow.
test:
	$(PREPARE_TESTS)
	$(PYTEST) -m "not slow"

# `make test-slow` runs what `make test` leaves out, with all kernels. `make test-all` runs all tests.
test-slow:
	$(PREPARE_TESTS)
	$(PYTEST) -m slow

test-all:
	$(PREPARE_TESTS)
	$(PYTEST)

build:
	$(PREPARE_TESTS)

lint:
	$(PREPARE) lint --no-build
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# The documentation as a site in site/.
docs: export NO_MKDOCS_2_WARNING = 1
docs:
	$(PREPARE) docs --no-build --no-torch
	$(VENV)/bin/mkdocs build --strict --quiet
	@echo "site/ is built: $(VENV)/bin/python -m http.server -d site"

# A source distribution and a wheel for other machines, in dist/.
wheel:
	$(PREPARE) wheel
	rm -f dist/dash_attn-*
	$(VENV)/bin/python tools/build_wheel.py

clean:
	rm -rf $(VENV) build dist dash_attn.egg-info site demo_output dash_attn/*.so dash_attn/without_kernels.txt
