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

SANITIZED := build/sanitized
SANITIZERS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all

ANALYSIS := $(VENV)/.analysis

.PHONY: help demo quality bench analysis test lint sanitize clean

help:
	@echo "make demo   a pretrained encoder calibrated and converted, before and after: a table, a page with pictures in demo/ (ARGS='--budget 1/4')"
	@echo "            ARGS='--data process1 minilm': errors and times of attention at equal budgets instead"
	@echo "make quality what a user of converted models notices, beside every baseline at one budget: records/quality.json (about an hour; goes on if stopped)"
	@echo "make bench  time, memory and error beside SDPA and other packages: tables, bench/*.png, bench/bench.json (ARGS='--quick' takes two minutes)"
	@echo "make analysis  the paper's observations, theorems and figures, measured: records/*.json, records/figures/*, report.html (about 12 minutes)"
	@echo "make test   ruff, mypy and pytest (ARGS='-k lsh' passes options to pytest)"
	@echo "make lint   ruff and mypy"
	@echo "make sanitize  the native engine's tests under AddressSanitizer and UndefinedBehaviorSanitizer, each instruction set"
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

analysis: $(ANALYSIS)
	$(BIN)/scatterbrain analyze all $(ARGS)
	$(BIN)/scatterbrain report

# lint is a step of this recipe, not a prerequisite, so that it always comes first, under -j too.
test: $(CHECKS)
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(CHECKS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Python is not built with the sanitizers, so their runtime is loaded before it; what Python never frees is not ours to report.
sanitize: $(CHECKS)
	$(BIN)/python hatch_build.py $(SANITIZED) $(SANITIZERS)
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	UBSAN_OPTIONS=print_stacktrace=1 SCATTERBRAIN_ENGINE_FOLDER=$(SANITIZED) \
	$(BIN)/python -m pytest -n auto --dist worksteal -k "not compile" tests/test_native.py tests/test_native_random.py tests/test_native_rules.py tests/test_native_threads.py $(ARGS)

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

$(ANALYSIS): $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet $(TORCH) -e ".[analysis]"
	@touch $@

$(CHECKS): $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet $(TORCH) -e ".[test,dev]"
	@touch $@
