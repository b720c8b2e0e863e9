"""Sparse-prefill attention operations: one function each, with a ``backend`` argument.

This package needs torch alone (and triton for the GPU backends) and can be used without the harness. ``backend`` is
``auto``, ``torch``, ``triton`` or ``hopper``: see :func:`resolve_backend`. GPU backends run bfloat16 and float16, and
give tile counts as int32 without waiting for the device. :func:`executed` tells which backends ran, and why not others.

=====================  =====================================================================
:func:`kap_scores`      CoSA's Kernel-Aware Proxy: block scores and HRM flags (equations 8-12)
:func:`xattn_scores`    XAttention's antidiagonal block masses
:func:`block_mass`      exact softmax mass of each block, for the oracle and for recall
:func:`flash_scores`    FlashPrefill's masses of mean keys; :func:`flash_select` its threshold
:func:`flex_select`     FlexPrefill's query-aware and vertical-slash heads
:func:`sparge_select`   SpargeAttn's compressed blocks and self-similarity
:func:`order_blocks`    flag-grouped sort (equation 13)
:func:`select_blocks`   Stage-1 selection and visiting order (equation 14) as a :class:`BlockPlan`
:func:`plan_from_mask`  ascending lists of the blocks that a mask keeps
:func:`block_attention` CoSA's Ordered-Skipping Kernel (Algorithm A, lines 6-22) over a paged KV cache
:func:`vertical_slash_attention` attention over whole columns and diagonals (MInference), exact to the token
:func:`page_attention` attention over selected pages by unions of eight queries (PageWeaver), made of
                        :func:`regroup_queries`, :func:`prepare_unions` (:func:`search_unions` is both) and
                        :func:`union_attention`
:func:`kv_union_attention` the same pages, each gathering its queries, partial results reduced
:func:`sparse_attention` the kernel for a plan of any kind
:func:`dense_attention` causal attention with a query offset through torch's SDPA
=====================  =====================================================================
"""

from .backends import BACKENDS, BackendUnavailable, Executed, executed, resolve_backend
from .capabilities import Capabilities, kernels
from .dense import dense_attention
from .execute import HeadwisePlan, SparsePlan, sparse_attention
from .flash_prefill import flash_scores, flash_select
from .flex import flex_select
from .fp8 import Fp8KV, quantize_kv, quantize_rows
from .kap import KapScores, kap_scores, sampled_pairs, sampled_positions
from .kv_union import kv_union_attention
from .masks import plan_from_mask
from .mass import block_mass
from .osk import block_attention
from .page_attention import attend_pages, page_attention, union_attention
from .page_search import search_unions
from .page_stats import PageStats
from .paged import PagedKV
from .pages import PagePlan, page_support
from .patterns import causal_plan, random_scores, sink_window_plan
from .plans import BlockPlan, DensePlan, TileStats, causal_blocks, causal_cells
from .regroup import regroup_queries, regroups
from .select import budget_counts, order_blocks, select_blocks, top_p_counts
from .sparge import sparge_select
from .unions import Unions, prepare_unions
from .vertical_slash import VerticalSlashPlan, vertical_slash_attention
from .vertical_slash_select import block_sparse_lists, vertical_slash_scores
from .xattn import xattn_pairs, xattn_scores

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "BlockPlan",
    "Capabilities",
    "DensePlan",
    "Executed",
    "Fp8KV",
    "HeadwisePlan",
    "KapScores",
    "PagePlan",
    "PageStats",
    "PagedKV",
    "SparsePlan",
    "TileStats",
    "Unions",
    "VerticalSlashPlan",
    "attend_pages",
    "block_attention",
    "block_mass",
    "block_sparse_lists",
    "budget_counts",
    "causal_blocks",
    "causal_cells",
    "causal_plan",
    "dense_attention",
    "executed",
    "flash_scores",
    "flash_select",
    "flex_select",
    "kap_scores",
    "kernels",
    "kv_union_attention",
    "order_blocks",
    "page_attention",
    "page_support",
    "plan_from_mask",
    "prepare_unions",
    "quantize_kv",
    "quantize_rows",
    "random_scores",
    "regroup_queries",
    "regroups",
    "resolve_backend",
    "search_unions",
    "sampled_pairs",
    "sampled_positions",
    "select_blocks",
    "sink_window_plan",
    "sparge_select",
    "sparse_attention",
    "top_p_counts",
    "union_attention",
    "vertical_slash_attention",
    "vertical_slash_scores",
    "xattn_pairs",
    "xattn_scores",
]
