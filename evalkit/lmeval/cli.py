"""The console command ``evalkit-lm-eval``: lm_eval with the model ``evalkit``.

lm-eval 0.4.13 looks for no plug-ins, so its own command cannot know a model of another package. Later versions read
the entry point ``lm_eval.models`` and need this command no more.
"""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from pathlib import Path

from ..errors import EvalkitError, InputError
from . import NAME, prompt_cache, register

INCLUDE = "--include_path"


def main() -> int:
    """Run lm-eval's command line on the arguments of the process.

    ``--include_path evalkit`` stands for the tasks of this package, wherever it is installed.

    Returns:
        Exit code: 0 fine, 1 something failed, 2 bad input.
    """
    # Waiting OpenMP threads would spin on the cores that other processes need; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.argv[1:] = with_own_tasks(sys.argv[1:])
    try:
        from lm_eval.__main__ import cli_evaluate

        register()
        prompt_cache.install()
        cli_evaluate()
    except EvalkitError as error:
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def with_own_tasks(argv: list[str]) -> list[str]:
    """Arguments with ``--include_path evalkit`` replaced by the folder of this package's tasks."""
    found = list(argv)
    for i, text in enumerate(argv):
        option, equals, value = text.partition("=")
        if option != INCLUDE:
            continue
        if equals and _stands_for_own(value):
            found[i] = f"{INCLUDE}={_tasks()}"
        elif not equals and i + 1 < len(argv) and _stands_for_own(argv[i + 1]):
            found[i + 1] = _tasks()
    return found


def _stands_for_own(value: str) -> bool:
    return value == NAME and not Path(value).exists()


def _tasks() -> str:
    return str(files("evalkit.tasks"))
