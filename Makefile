# Each target does all its own set-up: a virtual environment, the packages it lacks, the build.
# PYTHON chooses the Python to start from; its torch is used when it has one.
PYTHON ?= python3
VENV ?= .venv

.PHONY: demo test build clean

demo: build
	$(VENV)/bin/python -m dash_attn.demo

test: build
	$(VENV)/bin/python -m pytest -ra

build:
	$(PYTHON) build_support/prepare.py $(VENV)

clean:
	rm -rf $(VENV) build demo_output dash_attn/*.so dash_attn/_build_report.json
