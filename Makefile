# Every target works from nothing, and again on top of an older .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-serve install test soak check bench clean

demo: install ## install, fetch the default model, answer a prompt
	$(BIN)/octavo pull smollm2-135m
	$(BIN)/octavo generate "Name the capital of France." --chat --temperature 0

demo-serve: $(VENV)/.test ## start a server, call it with the openai client, stream, stop
	$(BIN)/octavo pull smollm2-135m
	$(BIN)/python scripts/demo_serve.py

test: $(VENV)/.test ## what CI runs
	$(BIN)/python scripts/check
	$(BIN)/octavo pull smollm2-135m
	$(BIN)/python -m pytest -m "not slow" -o console_output_style=count --durations=15

soak: $(VENV)/.test ## the long tests too
	$(BIN)/octavo pull smollm2-135m
	$(BIN)/python -m pytest -s -rA --durations=15

check: $(VENV)/.test ## style, types, law of imports, size of the heart
	$(BIN)/python scripts/check

bench: install ## throughput, latency, start time, cost of the core
	$(BIN)/octavo pull smollm2-135m
	$(BIN)/octavo bench throughput --max-batch-size 64
	$(BIN)/octavo bench latency
	$(BIN)/python -m octavo.bench.start
	$(BIN)/python -m octavo.bench.core

install: $(VENV)/.installed

# The stamps hold what was installed from: a change of any of them installs anew.
$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard octavo/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group test --group check
	touch $@

clean:
	rm -rf $(VENV) build
