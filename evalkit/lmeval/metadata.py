"""A task's metadata: the keys that are its own, those that are model arguments, and those that are neither.

lm-eval hands a task the model arguments and ``--metadata`` as one mapping. So a misspelt key looks like an argument of
the model, and the task would run with its default.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import InputError, near_matches
from .hook import before_evaluation

LM_EVAL = ("version", "config_source", "mode", "docs", "ruler_task")
"""What task files, lm-eval and `evalkit run` put there."""
CLOSE = 0.8
"""From this similarity on a key is taken for a misspelt one, whichever model runs."""
OWN = "own_metadata"


def keys_of(function: Callable[..., Any]) -> frozenset[str]:
    """Names that a function takes, its ``**rest`` aside."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, item in inspect.signature(function).parameters.items() if item.kind in kinds)


def takes(own: Collection[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark an lm-eval ``custom_dataset`` whose metadata has the keys ``own``: others are refused.

    Those that are near to one of them at once, as they cannot be meant for a model; the rest where the model is known
    to take none of them, see :func:`install`.
    """

    def mark(dataset: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(dataset)
        def checked(**metadata: Any) -> Any:
            for name, value in _unknown(metadata, own).items():
                if metadata.get("docs") is None and difflib.get_close_matches(name, own, cutoff=CLOSE):
                    raise _refused(name, value, own)
            return dataset(**metadata)

        setattr(checked, OWN, frozenset(own))
        return checked

    return mark


def install(applies: Callable[[Any], bool]) -> None:
    """Refuse every unknown key, however far from the task's own, where a model of ours runs; may be called again.

    Args:
        applies: whether a model is one; it was made, so that it knows each of its arguments.
    """

    def look(model: Any, tasks: Mapping[str, Any]) -> None:
        for task in tasks.values() if applies(model) else ():
            config = getattr(task, "config", None)
            own = getattr(getattr(config, "custom_dataset", None), OWN, None)
            metadata = getattr(config, "metadata", None) or {}
            if own is not None and metadata.get("docs") is None:
                for name, value in _unknown(metadata, own).items():
                    raise _refused(name, value, own)

    before_evaluation("metadata", look)


def integer(name: str, value: Any, least: int = 1) -> int:
    """A whole number of the metadata.

    Raises:
        InputError: it is none, or below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"metadata.{name}", value, f"an integer of at least {least}")
    return value


def text(name: str, value: Any) -> str:
    """A text of the metadata.

    Raises:
        InputError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise InputError(f"metadata.{name}", value, "a text")
    return value


def _unknown(metadata: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    rest = {name: value for name, value in metadata.items() if name not in own and name not in LM_EVAL}
    return {name: value for name, value in rest.items() if name not in _model_arguments()} if rest else {}


def _refused(name: str, value: Any, own: Collection[str]) -> InputError:
    return InputError(f"metadata.{name}", value, near_matches(name, {*own} - {*LM_EVAL}))


@functools.cache
def _model_arguments() -> frozenset[str]:
    """Of the model here, and of lm-eval's own for the hub and for servers."""
    from lm_eval.models.api_models import TemplateAPI
    from lm_eval.models.huggingface import HFLM

    from .settings import known_arguments

    return known_arguments() | keys_of(HFLM) | keys_of(TemplateAPI)
