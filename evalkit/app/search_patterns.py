"""The Hydra application behind ``evalkit search-patterns``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from ..config import ExecutionConfig, ModelConfig, build
from .single import require_given, run_single, section

TOP_LEVEL = ("model", "search", "execution", "out")

HELP = """usage: evalkit search-patterns [model=<name>] [search.length=<tokens>] [key=value ...]

Find the sparse pattern of each layer and head of a model for MInference: of candidates that cost the same in the
kernel, the one whose output is nearest to dense attention on calibration text. Writes a table and goes on where an
interrupted search stopped, layer by layer.

Settings: search.windows search.text search.initial search.local (the A-shape that sets the cost) search.columns
  search.block_size execution.device execution.backend
  out=<file>      the table to write (default: results/patterns/<model>-<length>.yaml)
  --cfg job       print the composed config and run nothing

Then: evalkit run method=minference method.table=<file> ...

Exit code: 0 table written, 1 the search failed, 2 bad input (nothing was run), 130 interrupted."""


def run(argv: Sequence[str]) -> int:
    """Run the application.

    Args:
        argv: arguments after ``evalkit search-patterns``.

    Returns:
        Exit code.
    """
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    return run_single("evalkit search-patterns", "search_patterns", TOP_LEVEL, argv, _search)


def _search(cfg: DictConfig) -> int:
    from ..calibration.pattern_run import search_patterns

    search_patterns(request_from_config(cfg))
    return 0


def request_from_config(cfg: DictConfig) -> Any:
    """The composed config as a :class:`evalkit.calibration.pattern_run.PatternRequest`, not yet validated."""
    from ..calibration.pattern_run import PatternRequest
    from ..calibration.pattern_settings import PatternSearchConfig

    require_given(cfg)
    return PatternRequest(
        build(ModelConfig, section(cfg, "model"), "model"),
        build(PatternSearchConfig, section(cfg, "search"), "search"),
        build(ExecutionConfig, section(cfg, "execution"), "execution"),
        None if cfg.out is None else str(cfg.out),
    )
