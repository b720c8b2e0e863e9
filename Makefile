# make demo      the embedded model: a sweep of CoSA against dense, a table and a plot in $(OUT)
# make test      the CPU tests
# make test-gpu  the GPU tests
# make lint      ruff and mypy
# make bench     the benchmarks that need no GPU: building RULER samples
# make clean     remove the environment and build products; results and the download cache stay
#
# Each target makes the environment it needs. TORCH names the build to install first, for instance
#   make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
OUT ?= results/smollm2
RUNS ?= results/runs/demo
WORKERS ?= 2

BIN := $(VENV)/bin
export OMP_WAIT_POLICY := passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

.PHONY: demo test test-gpu lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/evalkit run -m sweep=demo out=$(RUNS)
	$(BIN)/evalkit report $(RUNS) --out $(OUT)

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS)

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m evalkit.benchmarks.ruler.bench_build

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.git/*" -prune -exec rm -rf {} +

# torch comes first and under a stamp of its own, so that a change in the project's dependencies never fetches it again.
$(VENV)/.torch:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1): set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module: install it (Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on --upgrade pip
	$(BIN)/python -m pip install --progress-bar on $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py
	$(BIN)/python -m pip install --progress-bar on -e ".[dev]"
	@touch $@
