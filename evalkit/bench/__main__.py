"""``python -m evalkit.bench attention|ttft``: what ``evalkit bench`` runs, where Hydra is not installed.

``attention`` needs torch and triton alone, ``ttft`` transformers too.
"""

from __future__ import annotations

import sys

from prefill_kernels.bench.command import main_with
from prefill_kernels.bench.config import BenchError

from .settings import MethodsBench, TtftBench


def launch(settings: MethodsBench | TtftBench, command: str) -> object:
    """Run the benchmark of the settings; what it needs is imported then.

    Raises:
        BenchError: ``ttft`` without transformers, or what the benchmark raises.
    """
    if isinstance(settings, MethodsBench):
        from .attention import launch as attention

        return attention(settings, command)
    try:
        from .ttft import launch as ttft
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise BenchError("benchmark", "ttft", "needs transformers, which cannot be imported: install it") from None

    return ttft(settings, command)


if __name__ == "__main__":
    classes = {"attention": MethodsBench, "ttft": TtftBench}
    sys.exit(main_with("python -m evalkit.bench", classes, launch, sys.argv[1:]))
