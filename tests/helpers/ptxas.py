"""What ptxas says of the kernels of a CUDA source of this package."""

from __future__ import annotations

import subprocess
from pathlib import Path

from prefill_kernels import nvcc


def registers(source: Path, folder: Path) -> tuple[list[int], str]:
    """Registers a thread of each kernel, and all that was said. No kernel may spill."""
    command = [nvcc.compiler() or "nvcc", *nvcc.FLAGS, "-Xptxas", "-v", "-o", str(folder / "k.so"), str(source)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = [int(line.split("Used ")[1].split()[0]) for line in told.splitlines() if "Used " in line]
    assert told.count("0 bytes spill stores, 0 bytes spill loads") == len(used)
    return used, told
