"""A CUDA C++ source of this project as a library for the CPU, to run its kernel without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def problem() -> str | None:
    """Why nothing can be built, or None."""
    return None if shutil.which("g++") else "needs g++"


def build(source: Path, shared_memory: str, folder: Path) -> ctypes.CDLL:
    """Compile a kernel's source against ``cuda_runtime.h`` of this folder.

    Args:
        source: the ``.cu`` file.
        shared_memory: name of its ``extern __shared__`` array of uint4.
        folder: where the library is written.
    """
    library = folder / f"{source.stem}.so"
    subprocess.run(
        ["g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", f"-I{HERE}", f"-DSHARED_MEMORY={shared_memory}",
         "-x", "c++", str(source), str(HERE / "emulator.cpp"), "-o", str(library)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))
