"""A look at the model and the tasks right before lm-eval evaluates, whichever command or version started it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Look = Callable[[Any, Mapping[str, Any]], None]
_LOOKS: dict[str, Look] = {}


def before_evaluation(name: str, look: Look) -> None:
    """Have lm-eval call ``look(model, tasks)`` before it builds the first request.

    Args:
        name: of the look; a second one of the same name takes the place of the first.
        look: given the model (not the response cache around it) and the tasks by name; may raise.
    """
    from lm_eval import evaluator  # slow to import, and a task is read without it too

    _LOOKS[name] = look
    plain = evaluator.evaluate
    if getattr(plain, "evalkit_looks", False):
        return

    @functools.wraps(plain)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        lm = kwargs.get("lm", args[0] if args else None)
        task_dict = kwargs.get("task_dict", args[1] if len(args) > 1 else None)
        if lm is not None and isinstance(task_dict, Mapping):
            for one in _LOOKS.values():
                # A response cache wraps the model.
                one(vars(lm).get("lm", lm), task_dict.get("tasks", task_dict))
        return plain(*args, **kwargs)

    evaluate.evalkit_looks = True  # type: ignore[attr-defined]
    evaluator.evaluate = evaluate
