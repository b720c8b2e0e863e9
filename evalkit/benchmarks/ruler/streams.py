"""Private random streams: what sample i draws depends on (seed, task, length, i) and on nothing else."""

from __future__ import annotations

import hashlib
import random

import numpy as np
from numpy.typing import NDArray


def _number(*parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def stream(seed: int, task: str, length: int, index: int | str, purpose: str) -> random.Random:
    """Return a fresh generator for one purpose of one sample."""
    return random.Random(_number(seed, task, length, index, purpose))


def sort_keys(seed: int, task: str, length: int, index: int | str, purpose: str, count: int) -> NDArray[np.uint64]:
    """Return ``count`` random 64-bit keys; their argsort is a uniform permutation.

    A prefix of the keys does not depend on ``count``. Raw bits are used because NumPy promises to keep those streams,
    and not the ones of its distributions.
    """
    return np.random.PCG64(_number(seed, task, length, index, purpose)).random_raw(count)


def permutation(seed: int, task: str, length: int, index: int | str, purpose: str, count: int) -> NDArray[np.intp]:
    """Return a random permutation of ``range(count)``."""
    return np.argsort(sort_keys(seed, task, length, index, purpose, count))
