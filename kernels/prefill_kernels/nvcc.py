"""Kernels in CUDA C++: a source of this package, built with nvcc when it is first used, never at import.

Libraries lie in the user's cache (``$XDG_CACHE_HOME`` or ``~/.cache``, below ``prefill_kernels``), under a name made of
the source and the compiler's version. Where there is no nvcc, one that was built before by any version serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from .backends import BackendUnavailable

FLAGS = ("-gencode", "arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")


@cache
def compiler() -> str | None:
    """Path of nvcc, or None."""
    if found := shutil.which("nvcc"):
        return found
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    return next((path for home in homes if home and os.access(path := f"{home}/bin/nvcc", os.X_OK)), None)


def problem(source: Path) -> str | None:
    """Why a source cannot be built here, or None. Builds nothing."""
    if compiler() or _built(source):
        return None
    return "nvcc, which builds this kernel on first use, is neither on PATH nor below CUDA_HOME or /usr/local/cuda"


def build(source: Path, backend: str) -> ctypes.CDLL:
    """The library of a source; compiled where the cache does not hold it yet (seconds).

    Args:
        source: a .cu file of this package.
        backend: what it implements, for messages.

    Raises:
        BackendUnavailable: there is no nvcc, or it failed.
    """
    nvcc = compiler()
    if nvcc is None:
        if found := _built(source):
            return ctypes.CDLL(str(found[-1]))
        raise BackendUnavailable(f"backend={backend!r}: nvcc was not found")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    path = _home() / f"{_stem(source)}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and moved there in one step: another process may be doing the same.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [nvcc, *FLAGS, "-o", str(made), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BackendUnavailable(f"backend={backend!r}: nvcc failed: {done.stderr.strip()[-2000:]}")
            made.replace(path)
    return ctypes.CDLL(str(path))


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefill_kernels"


def _stem(source: Path) -> str:
    """Of the library's name, whatever compiled it."""
    key = hashlib.sha256("\0".join((source.read_text(), *FLAGS)).encode()).hexdigest()[:20]
    return f"{source.stem}-{key}"


def _built(source: Path) -> list[Path]:
    """Libraries of a source by any compiler, the latest last."""
    return sorted(_home().glob(f"{_stem(source)}-*.so"), key=lambda path: path.stat().st_mtime)
