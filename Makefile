# `make demo` and `make test` are all a newcomer needs; both make .venv first and reuse it afterwards.

PYTHON := .venv/bin/python

.PHONY: help setup demo serve test lint

help:
	@echo "make demo    serve the tiny checkpoint, run an agent-shaped program against it, stop"
	@echo "make serve   serve the tiny checkpoint until interrupted"
	@echo "make test    run the tests"
	@echo "make lint    check lint and format"

setup:
	@bash launch/setup.sh

demo: setup
	@$(PYTHON) -m launch.demo

serve: setup
	@bash launch/serve.sh

test: setup
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
