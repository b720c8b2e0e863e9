"""lm-eval's cache of built prompts (``--cache_requests``), keyed by the task's metadata and documents too.

Its own key is the task's name, number of examples and tokenizer; documents that are made of the metadata (a length, a
number of samples, a local file) would be those of an earlier command. Where a task makes its documents itself, what
they hold is in the key: a data file that was edited, or another revision of a hub's set, is then another key.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
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
            task.build_all_requests = functools.partial(_build, task.build_all_requests, task, metadata)


def digest(metadata: Mapping[str, Any], documents: Iterable[Any] = ()) -> str:
    """What is added to the key."""
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True, default=str).encode())
    for document in documents:
        found.update(json.dumps(document, sort_keys=True, default=str).encode())
    return found.hexdigest()[:16]


def _build(build: Any, task: Any, metadata: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> None:
    if not kwargs.get("cache_requests"):
        build(*args, **kwargs)
        return
    made_here = getattr(task.config, "custom_dataset", None) is not None
    with _keyed(digest(metadata, task.eval_docs if made_here else ())):
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
