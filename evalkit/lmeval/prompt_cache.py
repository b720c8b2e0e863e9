"""lm-eval's cache of built prompts (``--cache_requests``), keyed by the task's metadata too.

Its own key is the task's name, number of examples and tokenizer; documents that are made of the metadata (a length, a
number of samples) would be those of an earlier command.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from .hook import before_evaluation


def install() -> None:
    """Key the prompts of every task that lm-eval evaluates in this process; may be called again."""
    before_evaluation("prompt cache", key_by_metadata)


def key_by_metadata(model: Any, tasks: Mapping[str, Any]) -> None:
    """Have each task build its requests under a key of its metadata."""
    for task in tasks.values():
        metadata = getattr(getattr(task, "config", None), "metadata", None)
        if metadata:
            task.build_all_requests = functools.partial(_build, task.build_all_requests, digest(metadata))


def digest(metadata: Mapping[str, Any]) -> str:
    """What is added to the key."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _build(build: Any, key: str, /, *args: Any, **kwargs: Any) -> None:
    with _keyed(key):
        build(*args, **kwargs)


@contextlib.contextmanager
def _keyed(key: str) -> Iterator[None]:
    from lm_eval.api import task

    load, save = task.load_from_cache, task.save_to_cache  # as the module that builds requests knows them

    def load_keyed(file_name: str, cache: bool = False) -> Any:
        return load(file_name=f"{file_name}-{key}", cache=cache)

    def save_keyed(file_name: str, obj: Any) -> None:
        save(file_name=f"{file_name}-{key}", obj=obj)

    task.load_from_cache, task.save_to_cache = load_keyed, save_keyed
    try:
        yield
    finally:
        task.load_from_cache, task.save_to_cache = load, save
