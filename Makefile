# Every target builds what it needs; a second call finds the stamps and starts at once.
PYTHON ?= python3
MINUTES ?= 10
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt

.PHONY: serve test test-gpu check fuzz bench docs clean

serve: .venv/.stamp-run
	$(BIN)/samebit serve nano

test: .venv/.stamp-dev
	$(BIN)/python -m pytest -n $(WORKERS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu and not slow" tests/kernels/triton

# On a machine with a CUDA device.
test-gpu: .venv/.stamp-dev
	PYTHON=$(BIN)/python .ci/gpu

check: .venv/.stamp-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

fuzz: .venv/.stamp-dev
	end=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
	    $(BIN)/python -m pytest -q -n $(WORKERS) tests/hash tests/scheduler tests/exactness/test_small_model.py \
	        -k "fuzz or machine or mixture" -m "slow or not slow" --hypothesis-profile=fuzz || exit 1; \
	done

bench: .venv/.stamp-dev
	$(BIN)/python -m benchmarks.cpu --output benchmarks/results/cpu.json

docs: .venv/.stamp-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site

.venv/.stamp-venv:
	$(PYTHON) -m venv .venv
	touch $@

# torch first and by its exact version: left to the resolver it can bring gigabytes of GPU libraries.
.venv/.stamp-torch: .venv/.stamp-venv constraints.txt
	$(INSTALL) torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	touch $@

.venv/.stamp-run: .venv/.stamp-torch pyproject.toml
	$(INSTALL) -e .
	touch $@

.venv/.stamp-dev: .venv/.stamp-torch pyproject.toml
	$(INSTALL) -e '.[dev,clients]'
	touch $@ .venv/.stamp-run

.venv/.stamp-docs: .venv/.stamp-torch pyproject.toml
	$(INSTALL) -e '.[docs]'
	touch $@
