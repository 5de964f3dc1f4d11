# Every target makes its own environment: nothing but python3 and pip is assumed.
PYTHON ?= python3
VENV ?= .venv
TORCH := torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SCATTERBRAIN_DATA ?= $(if $(wildcard ../shared/data),$(abspath ../shared/data))
export SCATTERBRAIN_DATA

DEMO := $(VENV)/.demo
BENCH := $(VENV)/.bench
CHECKS := $(VENV)/.checks

.PHONY: help demo quality bench test lint clean

help:
	@echo "make demo   a pretrained encoder calibrated and converted, before and after: a table, a page with pictures in demo/ (ARGS='--budget 1/4')"
	@echo "            ARGS='--data process1 minilm': errors and times of attention at equal budgets instead"
	@echo "make quality what a user of converted models notices, beside every baseline at one budget: records/quality.json (about an hour; goes on if stopped)"
	@echo "make bench  time, memory and error beside SDPA and other packages: tables, bench/*.png, bench/bench.json (ARGS='--quick' takes two minutes)"
	@echo "make test   ruff, mypy and pytest (ARGS='-k lsh' passes options to pytest)"
	@echo "make lint   ruff and mypy"
	@echo "make clean  remove the environment, caches and outputs"
	@echo "SCATTERBRAIN_DATA names a folder of real data; without one the demo reads Python's own documentation"

demo: $(DEMO)
	$(BIN)/scatterbrain demo $(ARGS)

# openai-whisper asks for triton, which CPUs have no use for, so it is installed without its dependencies.
quality: $(BENCH)
	$(PIP) install --quiet --no-deps openai-whisper==20250625
	$(PIP) install --quiet numba tiktoken more-itertools
	$(BIN)/scatterbrain quality $(ARGS)

bench: $(BENCH)
	$(BIN)/scatterbrain bench $(ARGS)

# lint is a step of this recipe, not a prerequisite, so that it always comes first, under -j too.
test: $(CHECKS)
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(CHECKS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo bench build dist .pytest_cache .mypy_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and pinned, so that nothing that depends on it picks another.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(TORCH)
	@touch $@

$(DEMO): $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet $(TORCH) -e ".[demo]"
	@touch $@

$(BENCH): $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet $(TORCH) -e ".[bench]"
	@touch $@

$(CHECKS): $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet $(TORCH) -e ".[test,dev]"
	@touch $@
