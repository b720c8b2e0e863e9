"""Imported once by the server process that cells are forked from, so that a cell does not pay for the imports.

Nothing here may start a thread or touch CUDA: a forked child would inherit it broken.
"""

from __future__ import annotations

import contextlib
import importlib

MODULES = (
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "datasets",
    "lm_eval",
    "evalkit.runner",
)

for _name in MODULES:
    # A broken import is reported by the cell that needs it; here it would end the server without a word.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
