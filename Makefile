# Each target does all its own set-up: a virtual environment, the packages it lacks, the build.
# PYTHON chooses the Python to start from; its torch is used when it has one, and TORCH is installed when it has none.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

.PHONY: demo test build clean

demo: build
	$(VENV)/bin/python -m dash_attn.demo

test: build
	$(VENV)/bin/python -m pytest -ra

build:
	$(PYTHON) build_support/prepare.py $(VENV) $(TORCH)

clean:
	rm -rf $(VENV) build demo_output dash_attn/*.so
