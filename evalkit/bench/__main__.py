"""``python -m evalkit.bench ttft``: what ``evalkit bench ttft`` runs, where only torch, triton and transformers are."""

from __future__ import annotations

import sys

from prefill_kernels.bench.command import main_with

from .settings import TtftBench
from .ttft import launch

if __name__ == "__main__":
    sys.exit(main_with("python -m evalkit.bench", {"ttft": TtftBench}, launch, sys.argv[1:]))
