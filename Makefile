# Two commands: `make demo` shows what the library does, `make test` checks that it does it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,data,train,report

# Some hosts advertise AMX but cannot use it: bf16 products would die with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint format clean

demo: $(VENV)/.installed
	$(BIN)/farspan reproduce --preset cpu --out runs/demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=10

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache
