"""``python -m evalkit.bench attention|ttft|pageweaver-model``: ``evalkit bench`` where Hydra is not installed.

``attention`` needs torch and triton alone, the others transformers too.
"""

from __future__ import annotations

import sys

from prefill_kernels.bench.command import main_with
from prefill_kernels.bench.config import BenchError

from .settings import MethodsBench, PageModelBench, TtftBench


def launch(settings: MethodsBench | TtftBench | PageModelBench, command: str) -> object:
    """Run the benchmark of the settings; what it needs is imported then.

    Raises:
        BenchError: transformers is needed and not installed, or what the benchmark raises.
    """
    if isinstance(settings, MethodsBench):
        from .attention import launch as attention

        return attention(settings, command)
    try:
        if isinstance(settings, PageModelBench):
            from .pageweaver_model import launch as pageweaver_model

            return pageweaver_model(settings, command)
        from .ttft import launch as ttft
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        name = "pageweaver-model" if isinstance(settings, PageModelBench) else "ttft"
        raise BenchError("benchmark", name, "needs transformers, which cannot be imported: install it") from None
    return ttft(settings, command)


if __name__ == "__main__":
    classes = {"attention": MethodsBench, "ttft": TtftBench, "pageweaver-model": PageModelBench}
    sys.exit(main_with("python -m evalkit.bench", classes, launch, sys.argv[1:]))
