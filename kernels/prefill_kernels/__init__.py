"""Sparse-prefill attention operations: one function each, with a ``backend`` argument.

This package needs torch alone (and triton for the GPU backends) and can be used without the harness. ``backend`` is
``auto``, ``torch``, ``triton`` or ``hopper``: see :func:`resolve_backend`. GPU backends run bfloat16 and float16, and
give tile counts as int32 without waiting for the device.

=====================  =====================================================================
:func:`kap_scores`      CoSA's Kernel-Aware Proxy: block scores and HRM flags (equations 8-12)
:func:`order_blocks`    flag-grouped sort (equation 13)
:func:`select_blocks`   Stage-1 selection and visiting order (equation 14) as a :class:`BlockPlan`
:func:`block_attention` CoSA's Ordered-Skipping Kernel (Algorithm A, lines 6-22) over a paged KV cache
:func:`dense_attention` causal attention with a query offset through torch's SDPA
=====================  =====================================================================
"""

from .backends import BACKENDS, BackendUnavailable, resolve_backend
from .dense import dense_attention
from .kap import KapScores, kap_scores, sampled_pairs, sampled_positions
from .osk import block_attention
from .paged import PagedKV
from .plans import BlockPlan, DensePlan, TileStats, causal_blocks, causal_cells
from .select import budget_counts, order_blocks, select_blocks, top_p_counts

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "BlockPlan",
    "DensePlan",
    "KapScores",
    "PagedKV",
    "TileStats",
    "block_attention",
    "budget_counts",
    "causal_blocks",
    "causal_cells",
    "dense_attention",
    "kap_scores",
    "order_blocks",
    "resolve_backend",
    "sampled_pairs",
    "sampled_positions",
    "select_blocks",
    "top_p_counts",
]
