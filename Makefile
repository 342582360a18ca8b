# `make demo` and `make test` are all a newcomer needs; both make .venv first and reuse it afterwards.

PYTHON := .venv/bin/python
# malloc keeps what the references' large temporaries needed: handed back and zeroed anew by the kernel each
# time, they cost more than the arithmetic in them.
PYTEST := OMP_NUM_THREADS=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 $(PYTHON) -m pytest
# In the order in which they are collected, which puts the servers first.
TWO_AT_A_TIME := -n 2 --dist loadgroup --no-loadscope-reorder

.PHONY: help setup demo serve test test-long lint

help:
	@echo "make demo    serve the tiny checkpoint, run an agent-shaped program against it, stop"
	@echo "make serve   serve the tiny checkpoint until interrupted"
	@echo "         FLAGS='--attention-backend triton' hands SGLang further flags, in demo and serve"
	@echo "make test    run the tests (minutes)"
	@echo "make test-long    run the tests that take long"
	@echo "make lint    check lint and format"

setup:
	@bash launch/setup.sh

demo: setup
	@$(PYTHON) -m launch.demo $(FLAGS)

serve: setup
	@bash launch/serve.sh $(FLAGS)

test: setup
	@$(PYTEST) $(TWO_AT_A_TIME) -m "not long"

# The demo's start is timed: nothing else runs meanwhile.
test-long: setup
	@$(PYTEST) -m long tests/launch
	@$(PYTEST) $(TWO_AT_A_TIME) -m long --ignore tests/launch

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
