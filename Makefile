# make demo        the embedded model: a sweep of CoSA against dense, a table and a plot in $(OUT)
# make test        the CPU tests
# make test-gpu    the GPU tests
# make lint        ruff and mypy
# make bench       kernels, whole calls of all methods and time to first token on a CUDA device: half an hour on an H200;
#                  bench-kernel, bench-attention and bench-ttft are its parts, BENCH_ARGS goes to each of them
# make bench-pageweaver  captures of selected pages, and PageWeaver's call and a whole model on them; needs the environment
# make bench-ruler building RULER samples; needs no GPU
# make clean       remove the environment and build products; results and the download cache stay
#
# Each target makes the environment it needs. TORCH names the build to install first, for instance
#   make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# The GPU targets use $(PYTHON) as it is, with no network, where it has torch with CUDA and triton; transformers (for
# time to first token and whole-model tests) and pytest (for the tests) are then its own too.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
OUT ?= results/smollm2
RUNS ?= results/runs/demo
WORKERS ?= 2

BENCH_ARGS ?=

BIN := $(VENV)/bin
export OMP_WAIT_POLICY := passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

# A Python that has what the kernels need runs the GPU targets from the source tree; else the environment does.
ifneq ($(filter test-gpu bench bench-kernel bench-attention bench-ttft,$(MAKECMDGOALS)),)
HAS_CUDA := $(shell $(PYTHON) -c 'import torch, triton; print(int(torch.cuda.is_available()))' 2>/dev/null)
endif
ifeq ($(HAS_CUDA),1)
GPU_PYTHON := PYTHONPATH=kernels:. $(PYTHON)
GPU_NEEDS :=
else
GPU_PYTHON := $(BIN)/python
GPU_NEEDS := $(VENV)/.installed
endif
# Test files by what they import.
GPU_TESTS := from glob import glob; from importlib.util import find_spec; \
	dirs = ["kernels", "bench"] + ["attention"] * bool(find_spec("transformers")); \
	print(*sorted(f for d in dirs for f in glob(f"tests/{d}/test_gpu*.py")))

.PHONY: device demo test test-gpu lint bench bench-kernel bench-attention bench-ttft bench-pageweaver bench-ruler clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/evalkit run -m sweep=demo out=$(RUNS)
	$(BIN)/evalkit report $(RUNS) --out $(OUT)

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS)

# Without a device there is nothing to run, which is said before anything is installed.
device:
	@[ "$(HAS_CUDA)" = 1 ] || nvidia-smi -L >/dev/null 2>&1 || \
		{ echo "$(MAKECMDGOALS): a CUDA device is needed, and none is found here" >&2; exit 2; }

test-gpu: device $(GPU_NEEDS)
	$(GPU_PYTHON) -m pytest -m gpu -p no:cacheprovider $$($(GPU_PYTHON) -c '$(GPU_TESTS)')

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: bench-kernel bench-attention bench-ttft

bench-kernel: device $(GPU_NEEDS)
	$(GPU_PYTHON) -m prefill_kernels.bench kernel $(BENCH_ARGS)

bench-attention: device $(GPU_NEEDS)
	$(GPU_PYTHON) -m evalkit.bench attention $(BENCH_ARGS)

bench-ttft: device $(GPU_NEEDS)
	@if $(GPU_PYTHON) -c 'import transformers' 2>/dev/null; then \
		set -x; $(GPU_PYTHON) -m evalkit.bench ttft $(BENCH_ARGS); \
	else echo "time to first token is left out: $(PYTHON) has no transformers"; fi

bench-pageweaver: device $(VENV)/.installed
	$(BIN)/evalkit capture set=pageweaver
	$(BIN)/evalkit bench pageweaver
	$(BIN)/evalkit bench pageweaver-model

bench-ruler: $(VENV)/.installed
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
