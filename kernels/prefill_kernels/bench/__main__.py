"""The command line of the kernel benchmarks: needs torch and triton alone."""

from __future__ import annotations

import sys

from .command import launch, main_with
from .config import BENCHES

if __name__ == "__main__":
    sys.exit(main_with("python -m prefill_kernels.bench", dict(BENCHES), launch, sys.argv[1:]))
