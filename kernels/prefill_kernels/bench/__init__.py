"""Benchmarks of the kernels on a CUDA device: ``python -m prefill_kernels.bench kernel|attention|pageweaver [--help]``.

* :mod:`.config`: settings of a benchmark, checked before anything is loaded,
* :mod:`.inputs`: synthetic inputs of the 8B shape, and inputs captured from a model,
* :mod:`.check`: what is timed is first compared with float32 on a few tiles,
* :mod:`.measure`: one kernel, one proxy, one whole call: time, executed TF/s, speedups,
* :mod:`.planned`: the whole call of any method,
* :mod:`.kernel` and :mod:`.attention`: what is measured at each length,
* :mod:`.pages`: PageWeaver's call on page ids of :mod:`.page_inputs`, beside FlashInfer's in :mod:`.native`,
* :mod:`.captures`: files of page ids, checked; :mod:`.fp8_error`: FP8 on the Q, K and V of those that hold them,
* :mod:`.rows`: one number a row, appended to a CSV file as it comes.

TF/s count executed products: 4 * 128 * 128 * d for a computed block, half of that for a skipped one, the causal half
of the square for dense attention, 2 * d a sampled pair for the proxy.
"""

from .config import BENCHES, AttentionBench, BenchError, KernelBench, PageBench
from .rows import COLUMNS, Rows

__all__ = ["BENCHES", "COLUMNS", "AttentionBench", "BenchError", "KernelBench", "PageBench", "Rows"]
