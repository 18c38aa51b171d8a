# Two commands: `make demo` shows what the library does, `make test` checks that it does it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,data,train,report

# Some hosts advertise AMX but cannot use it: bf16 products would die with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-transformers lint format docs wheel fuzz kills clean

demo: $(VENV)/.installed
	$(BIN)/farspan demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=10

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# transformers' own model tests: FARSPAN_TRANSFORMERS names a checkout of its repository at the installed version.
test-transformers: $(VENV)/.installed
	$(BIN)/python -m pytest -o addopts= tests/transformers_suite

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site: build/site/index.html"

# The wheel and the source archive, and a smoke test of the wheel in an empty environment.
wheel: $(VENV)/.installed
	rm -rf dist build/wheel-test
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('dist')" > build/sdist.log
	$(PYTHON) -m venv build/wheel-test
	build/wheel-test/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[data,train]"
	cd build && wheel-test/bin/python -c "import torch, farspan; \
	  model = farspan.FarspanForCausalLM(farspan.FarspanConfig.preset('tiny', attention='hybrid')); \
	  print(model.generate(torch.ones(1, 100, dtype=torch.long), max_new_tokens=4).shape)"
	build/wheel-test/bin/farspan --version

fuzz: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.fuzz --commands 5000 --ops 20000

kills: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.kills --kills 200

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache
