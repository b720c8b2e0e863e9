"""Ordered-Skipping Kernel for Hopper (sm_90) in Gluon: tensor-memory loads, warp specialisation, asynchronous wgmma.

One program computes one tile of 128 query rows. Three partitions share it: two consumers of four warps with 64 rows
each, and one warp that walks the tile's list and the page table and keeps a ring of K and one of V blocks filled.
Step i is the i-th block of the list. One barrier a step tells the loader and the other half that a consumer is done
with it: its QK product is read, and so is every V block of two steps before.

With skipping on, a consumer publishes with that barrier how far the block stays below its running maxima. The next
product is issued before the vote is asked for, and a half whose own rows keep the block does not ask at all. The
weights of a block are computed ahead of its vote and thrown away if it loses; inside a run of skipped blocks scores
alone are computed, and V is loaded after the vote.

Gluon changed between Triton releases, so this module is imported only when the backend is asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .paged import PagedKV
from .plans import BlockPlan, TileStats

_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

BLOCK = 128
K_STAGES, V_STAGES, RING = 2, 3, 4
"""Blocks in the K ring and in the V ring; steps in the ring of barriers and votes, more than K blocks."""
LONG = gl.constexpr(2)
"""Skipped blocks in a row after which neither V nor weights are made ahead of the vote."""
L2_BYTES = 32 << 20
"""K and V bytes of the heads that run side by side; larger caches are worked through in groups of heads."""


@gluon.jit
def _load_block(
    main, tail, buffer, barrier, table, block, tail_block, column,
    D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Start the loads of one block of 128 tokens, page by page."""
    mbarrier.expect(barrier, 128 * D * 2)
    for part in gl.static_range(128 // BOX):
        rows = buffer.slice(part * BOX, BOX)
        if block == tail_block:
            _load_tile(tail, [part * BOX, column], barrier, rows)
        else:
            token = block * 128 + part * BOX
            page = gl.load(table + token // PAGE)
            _load_tile(main, [page * PAGE + token % PAGE, column], barrier, rows)


@gluon.jit
def _loader(
    k_main, k_tail, v_main, v_tail, k_ring, v_ring, k_full, v_full, votes, done,
    order, table, steps, tail_block, column, threshold,
    D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr, SKIP: gl.constexpr,
    RING: gl.constexpr,
):  # fmt: skip
    """Fill both rings. When both halves are done with a step, its K and the V of two steps before are free.

    With skipping on, V of a block is loaded ahead of its vote, but inside a run of skipped blocks after it.
    """
    gl.static_assert(VS >= 3)
    for i in range(gl.minimum(steps, KS)):
        block = gl.maximum(gl.load(order + i), 0)
        _load_block(k_main, k_tail, k_ring.index(i), k_full.index(i), table, block, tail_block, column, D, PAGE, BOX)
    block = gl.maximum(gl.load(order), 0)
    _load_block(v_main, v_tail, v_ring.index(0), v_full.index(0), table, block, tail_block, column, D, PAGE, BOX)
    loaded = 1
    misses = 0
    for j in range(steps):
        # Read before the wait, which hides the latency.
        k_block = gl.load(order + gl.minimum(j + KS, steps - 1))
        v_block = gl.load(order + gl.minimum(j + 1, steps - 1))
        mbarrier.wait(done.index(j % RING), (j // RING) & 1)
        if SKIP:
            kept = _vote(votes, j, threshold, 1, RING)
            if kept & (misses >= LONG):
                block = gl.load(order + j)
                slot = loaded % VS
                _load_block(
                    v_main, v_tail, v_ring.index(slot), v_full.index(slot), table, block, tail_block, column,
                    D, PAGE, BOX)  # fmt: skip
                loaded += 1
            misses = gl.where(kept, 0, misses + 1)
        if (j + 1 < steps) & (misses < LONG):
            slot = loaded % VS
            _load_block(
                v_main, v_tail, v_ring.index(slot), v_full.index(slot), table, v_block, tail_block, column,
                D, PAGE, BOX)  # fmt: skip
            loaded += 1
        if j + KS < steps:
            slot = (j + KS) % KS
            _load_block(
                k_main, k_tail, k_ring.index(slot), k_full.index(slot), table, k_block, tail_block, column,
                D, PAGE, BOX)  # fmt: skip


@gluon.jit
def _nan_max(a, b):
    """Maximum that keeps NaN, so that a broken key shows in the output instead of being skipped."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _row_max(s):
    return gl.reduce(s, 1, _nan_max)


@gluon.jit
def _mask(s, block, tile, WG: gl.constexpr):
    """Hide keys after the query; only the diagonal block of a tile holds any."""
    if block >= tile:
        layout: gl.constexpr = s.type.layout
        row = tile * 128 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        key = block * 128 + gl.arange(0, 128, gl.SliceLayout(0, layout))
        s = gl.where(key[None, :] <= row[:, None], s, float("-inf"))
    return s


@gluon.jit
def _gap(top, m, valid):
    """How far a block stays below the running maximum. Rows beyond the sequence or without a key abstain."""
    return gl.where(valid & (top != float("-inf")), top - _nan_max(m, top), float("-inf"))


@gluon.jit
def _look(s, m, valid, votes, done, step, block, tile, threshold, WG: gl.constexpr, RING: gl.constexpr):
    """Masked scores and row maxima of a step, and this half's vote, put where the other partitions read it.

    The third result says whether this half alone keeps the block, which settles it without the other half's vote.
    """
    s = _mask(s, block, tile, WG)
    top = _row_max(s)
    mine = votes.index(step % RING).slice(WG * 4, 4)
    # The largest gap of each of this consumer's four warps.
    mine.store(gl.reduce(gl.reshape(_gap(top, m, valid), [4, 16]), 1, _nan_max))
    mbarrier.arrive(done.index(step % RING), count=1)
    every: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return s, top, (gl.reduce(mine.load(every), 0, _nan_max) < threshold).to(gl.int32) == 0


@gluon.jit
def _vote(votes, step, threshold, WARPS: gl.constexpr, RING: gl.constexpr):
    """The tile's decision on the block of a step that is done. "Not below" keeps NaN in."""
    every: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    gap = gl.reduce(votes.index(step % RING).load(every), 0, _nan_max)
    return (gap < threshold).to(gl.int32) == 0


@gluon.jit
def _decide(mine, votes, done, step, threshold, RING: gl.constexpr):
    """The tile's decision as a consumer learns it: the other half is asked only if its own half would skip."""
    kept = mine
    if not mine:
        mbarrier.wait(done.index(step % RING), (step // RING) & 1)
        kept = _vote(votes, step, threshold, 4, RING)
    return kept


@gluon.jit
def _weights(s, m, total, top, scale, o_layout: gl.constexpr, dtype: gl.constexpr):
    """Algorithm A, lines 13 and 17-18: weights, new maximum, denominator and decay; maxima are unscaled."""
    new = _nan_max(m, top)
    shift = gl.where(new == float("-inf"), 0.0, new * scale)
    p = gl.exp2(s * scale - shift[:, None])
    decay = gl.exp2(m * scale - shift)
    total = total * decay + gl.sum(p, 1)
    decay = gl.convert_layout(decay, gl.SliceLayout(1, o_layout))
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2)), new, total, decay


@gluon.jit
def _qk(q, ring, full, step, zero, STAGES: gl.constexpr):
    """Issue the QK product of a step."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    return warpgroup_mma(q, ring.index(step % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _pv(p, ring, full, turn, acc, STAGES: gl.constexpr):
    """Issue the PV product of the turn-th kept block."""
    mbarrier.wait(full.index(turn % STAGES), (turn // STAGES) & 1)
    return warpgroup_mma(p, ring.index(turn % STAGES), acc, is_async=True)


@gluon.jit
def _consumer(
    q_tile, k_ring, v_ring, q_full, k_full, v_full, votes, done,
    order, out, stats, stats_stride, count, tile, row0, q_len, out_stride, scale, threshold,
    D: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr, SKIP: gl.constexpr, RING: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dtype: gl.constexpr = k_ring.dtype
    q = q_tile.index(WG)
    steps = gl.maximum(count, 1)
    zero = gl.zeros([64, 128], gl.float32, s_layout)
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([64, D], gl.float32, o_layout)
    valid = row0 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout)) < q_len

    block = gl.load(order)
    mbarrier.wait(q_full, 0)
    coming = _qk(q, k_ring, k_full, 0, zero, KS)
    s = warpgroup_mma_wait(0, deps=(coming,))
    if not SKIP:
        mbarrier.arrive(done.index(0), count=1)
    on_diagonal = (block == tile).to(gl.int32)
    diagonal_seen = on_diagonal
    block = gl.maximum(block, 0)
    if SKIP:
        # Each round issues the QK product of block `step` and, while it runs, learns the vote on the block before.
        # In live rounds the weights of that one were computed ahead of its vote; inside a run of skipped blocks only
        # its scores are held. The first block's gap is zero, so it is never skipped.
        s, top, mine = _look(s, m, valid, votes, done, 0, block, tile, threshold, WG, RING)
        p, new, new_total, decay = _weights(s, m, total, top, scale, o_layout, dtype)
        turn = 0  # V blocks taken from the ring
        computed = 0
        diagonal_computed = 0
        misses = 0
        step = 1
        while step < steps:
            block = gl.load(order + step)
            coming = _qk(q, k_ring, k_full, step, zero, KS)
            kept = _decide(mine, votes, done, step - 1, threshold, RING)
            computed += kept.to(gl.int32)
            diagonal_computed += on_diagonal * kept.to(gl.int32)
            on_diagonal = (block == tile).to(gl.int32)
            diagonal_seen += on_diagonal
            if kept:
                misses = 0
                m = new
                total = new_total
                pending = _pv(p, v_ring, v_full, turn, acc * decay[:, None], VS)
                s = warpgroup_mma_wait(1, deps=(coming,))
                s, top, mine = _look(s, m, valid, votes, done, step, block, tile, threshold, WG, RING)
                p, new, new_total, decay = _weights(s, m, total, top, scale, o_layout, dtype)
                acc = warpgroup_mma_wait(0, deps=(pending,))
                turn += 1
                step += 1
            else:
                misses += 1
                s = warpgroup_mma_wait(0, deps=(coming,))
                s, top, mine = _look(s, m, valid, votes, done, step, block, tile, threshold, WG, RING)
                # V of the skipped block was loaded ahead of its vote.
                mbarrier.wait(v_full.index(turn % VS), (turn // VS) & 1)
                turn += 1
                step += 1
                if misses == LONG:
                    while (step < steps) & (misses != 0):
                        block = gl.load(order + step)
                        coming = _qk(q, k_ring, k_full, step, zero, KS)
                        kept = _decide(mine, votes, done, step - 1, threshold, RING)
                        computed += kept.to(gl.int32)
                        diagonal_computed += on_diagonal * kept.to(gl.int32)
                        on_diagonal = (block == tile).to(gl.int32)
                        diagonal_seen += on_diagonal
                        if kept:
                            misses = 0
                            p, m, total, decay = _weights(s, m, total, top, scale, o_layout, dtype)
                            pending = _pv(p, v_ring, v_full, turn, acc * decay[:, None], VS)
                            s = warpgroup_mma_wait(1, deps=(coming,))
                            s, top, mine = _look(s, m, valid, votes, done, step, block, tile, threshold, WG, RING)
                            acc = warpgroup_mma_wait(0, deps=(pending,))
                            turn += 1
                        else:
                            s = warpgroup_mma_wait(0, deps=(coming,))
                            s, top, mine = _look(s, m, valid, votes, done, step, block, tile, threshold, WG, RING)
                        step += 1
                p, new, new_total, decay = _weights(s, m, total, top, scale, o_layout, dtype)
        kept = _decide(mine, votes, done, steps - 1, threshold, RING)
        if kept:
            total = new_total
            pending = _pv(p, v_ring, v_full, turn, acc * decay[:, None], VS)
            acc = warpgroup_mma_wait(0, deps=(pending,))
        else:
            if misses < LONG:
                mbarrier.wait(v_full.index(turn % VS), (turn // VS) & 1)
        computed = gl.where(count > 0, computed + kept.to(gl.int32), 0)
        diagonal_computed += on_diagonal * kept.to(gl.int32)
    else:
        s = _mask(s, block, tile, WG)
        p, m, total, decay = _weights(s, m, total, _row_max(s), scale, o_layout, dtype)
        for step in range(1, steps):
            block = gl.load(order + step)
            coming = _qk(q, k_ring, k_full, step, zero, KS)
            pending = _pv(p, v_ring, v_full, step - 1, acc, VS)
            s = warpgroup_mma_wait(1, deps=(coming,))
            mbarrier.arrive(done.index(step % RING), count=1)
            s = _mask(s, block, tile, WG)
            diagonal_seen += (block == tile).to(gl.int32)
            p, m, total, decay = _weights(s, m, total, _row_max(s), scale, o_layout, dtype)
            acc = warpgroup_mma_wait(0, deps=(pending,))
            acc = acc * decay[:, None]
        pending = _pv(p, v_ring, v_full, steps - 1, acc, VS)
        acc = warpgroup_mma_wait(0, deps=(pending,))
        computed = count
        diagonal_computed = diagonal_seen

    whole = gl.convert_layout(total, gl.SliceLayout(1, o_layout))
    # An empty list still walked one block, so that the barriers pair up; its result is zero.
    acc = gl.where(count > 0, acc / whole[:, None], 0.0)
    out_rows = row0 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    dims = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    places = out + out_rows.to(gl.int64)[:, None] * out_stride + dims[None, :]
    gl.store(places, acc.to(dtype), mask=(out_rows < q_len)[:, None])
    if WG == 0:
        real = gl.minimum(q_len - row0, 128)
        below = real * 128
        on = real * (real + 1) // 2
        gl.store(stats, (count - diagonal_seen) * below + diagonal_seen * on)
        gl.store(stats + stats_stride, (computed - diagonal_computed) * below + diagonal_computed * on)
        gl.store(stats + 2 * stats_stride, count)
        gl.store(stats + 3 * stats_stride, computed)


@gluon.jit
def _osk(
    q_desc, k_main, v_main, k_tail, v_tail, out, order, counts, table, stats,
    scale, threshold, q_len, first_tile, tail_block, tiles, width, head_group,
    q_head_rows, q_head_columns, out_head_stride, out_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    KS: gl.constexpr, VS: gl.constexpr, SKIP: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    # Longest tiles first inside a group of heads whose K and V fit into L2 together.
    pid = gl.program_id(0)
    rest = pid % (tiles * head_group)
    head = pid // (tiles * head_group) * head_group + rest % head_group
    t = tiles - 1 - rest // head_group
    row0 = t * 128

    dtype: gl.constexpr = k_main.dtype
    q_tile = gl.allocate_shared_memory(dtype, [2, 64, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [KS, 128, D], k_main.layout)
    v_ring = gl.allocate_shared_memory(dtype, [VS, 128, D], v_main.layout)
    votes = gl.allocate_shared_memory(gl.float32, [RING, 8], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [VS, 1], bars)
    done = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    mbarrier.init(q_full, count=1)
    for j in gl.static_range(KS):
        mbarrier.init(k_full.index(j), count=1)
    for j in gl.static_range(VS):
        mbarrier.init(v_full.index(j), count=1)
    for j in gl.static_range(RING):
        mbarrier.init(done.index(j), count=2)
    fence_async_shared()

    mbarrier.expect(q_full, 128 * D * 2)
    for half in gl.static_range(2):
        place = [head * q_head_rows + row0 + half * 64, head * q_head_columns]
        _load_tile(q_desc, place, q_full, q_tile.index(half))

    item = head * tiles + t
    count = gl.load(counts + item)
    lists = order + item.to(gl.int64) * width
    out_head = out + head.to(gl.int64) * out_head_stride
    column = head // GROUP * D
    tile = first_tile + t
    steps = gl.maximum(count, 1)
    gl.warp_specialize(
        [
            (_consumer, (
                q_tile, k_ring, v_ring, q_full, k_full, v_full, votes, done,
                lists, out_head, stats + item, HEADS * tiles, count, tile, row0, q_len, out_stride, scale, threshold,
                D, KS, VS, SKIP, RING, 0)),
            (_consumer, (
                q_tile, k_ring, v_ring, q_full, k_full, v_full, votes, done,
                lists, out_head, stats + item, HEADS * tiles, count, tile, row0, q_len, out_stride, scale, threshold,
                D, KS, VS, SKIP, RING, 1)),
            (_loader, (
                k_main, k_tail, v_main, v_tail, k_ring, v_ring, k_full, v_full, votes, done, lists, table, steps,
                tail_block, column, threshold, D, PAGE, BOX, KS, VS, SKIP, RING)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def refusal(q: Tensor, kv: PagedKV, plan: BlockPlan) -> str | None:
    """Why this kernel cannot run the call, or None."""
    from .backends import half_problem, hopper_problem

    dim = q.shape[-1]
    if problem := hopper_problem(q.device) or half_problem(q.device, q.dtype, kv.k_pages.dtype, kv.v_pages.dtype):
        return problem
    if plan.block_size != BLOCK:
        return f"block_size={plan.block_size}: must be {BLOCK}"
    if dim not in (64, 128):
        return f"head_dim={dim}: must be 64 or 128"
    if kv.page_size not in (16, 32, 64, 128, 256):
        return f"page_size={kv.page_size}: must be 16, 32, 64, 128 or 256"
    if not (kv.k_pages.is_contiguous() and kv.v_pages.is_contiguous()):
        return "key and value pages must be contiguous"
    # Tensor memory access reads from addresses that are multiples of 16 bytes: a slice of a larger tensor may not be.
    for name, x in (("queries", q), ("key pages", kv.k_pages), ("value pages", kv.v_pages)):
        if x.data_ptr() % 16:
            return f"{name} at an address that is not a multiple of 16 bytes"
    return None


def osk_hopper(q: Tensor, kv: PagedKV, plan: BlockPlan, scale: float) -> tuple[Tensor, TileStats]:
    """:func:`prefill_kernels.block_attention` on sm_90, for calls that :func:`refusal` accepts."""
    batch, heads, q_len, dim = q.shape
    tiles, width = plan.order.shape[2:]
    out = torch.empty(batch, q_len, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    stats = torch.empty(4, batch, heads, tiles, dtype=torch.int32, device=q.device)
    if width == 0:
        return out.zero_(), TileStats(*stats.zero_())
    box = min(BLOCK, kv.page_size)
    head_rows, head_columns, rows = _flat_queries(q)
    k_main, v_main = (_describe(x.view(-1, kv.num_kv_heads * dim), box, dim) for x in (kv.k_pages, kv.v_pages))
    tail_block = plan.kv_len // BLOCK if plan.kv_len % BLOCK else -1
    group = heads // kv.num_kv_heads
    order, count = plan.order.contiguous(), plan.count.contiguous()
    skip = plan.log_threshold is not None
    kv_bytes = 2 * plan.kv_len * dim * q.element_size()
    head_group = group * _largest_divisor(kv.num_kv_heads, max(1, L2_BYTES // kv_bytes))
    for b in range(batch):  # one launch a sequence: prefill runs one sequence a call
        if tail_block >= 0:
            k_tail, v_tail = (_describe(x, box, dim) for x in _tail(kv, b, tail_block))
        else:
            k_tail, v_tail = k_main, v_main
        part = torch.empty_like(stats[:, b]) if batch > 1 else stats
        _osk[(tiles * heads,)](
            _describe(rows[b], 64, dim),
            k_main,
            v_main,
            k_tail,
            v_tail,
            out[b],
            order[b],
            count[b],
            kv.page_table[b],
            part,
            scale * 1.4426950408889634,
            # Maxima are compared unscaled.
            plan.log_threshold / scale if plan.log_threshold is not None else 0.0,
            q_len,
            plan.first_tile,
            tail_block,
            tiles,
            width,
            head_group,
            head_rows,
            head_columns,
            out.stride(1),
            out.stride(2),
            HEADS=heads,
            GROUP=group,
            D=dim,
            PAGE=kv.page_size,
            BOX=box,
            KS=K_STAGES,
            VS=V_STAGES,
            SKIP=skip,
            RING=RING,
            num_warps=4,
        )
        if batch > 1:
            stats[:, b] = part
    return out, TileStats(*stats)


def _flat_queries(q: Tensor) -> tuple[int, int, list[Tensor]]:
    """Queries as one matrix a sequence, and how many rows and columns lie between heads.

    A tile's rows past the last query run into the next head or past the end; they are never stored and do not vote.
    """
    batch, heads, q_len, dim = q.shape
    aligned = q.stride(2) % 8 == 0 and (batch == 1 or q.stride(0) % 8 == 0)
    if q.stride(3) == 1 and q.stride(1) == dim and aligned and q.stride(2) >= heads * dim:
        return 0, dim, [q[b].transpose(0, 1).flatten(1) for b in range(batch)]
    q = q.contiguous()
    return q_len, 0, [q[b].flatten(0, 1) for b in range(batch)]


def _tail(kv: PagedKV, b: int, block: int) -> tuple[Tensor, Tensor]:
    """Copies of the short last block of one sequence, padded with zeros: what pages hold beyond it may be NaN."""
    start, stop = block * BLOCK, kv.kv_len
    positions = torch.arange(start, stop, device=kv.device)
    pages, slots = kv.page_table[b, positions // kv.page_size].long(), positions % kv.page_size
    tails = torch.zeros(2, BLOCK, kv.num_kv_heads * kv.k_pages.shape[-1], dtype=kv.k_pages.dtype, device=kv.device)
    tails[0, : stop - start] = kv.k_pages[pages, slots].flatten(1)
    tails[1, : stop - start] = kv.v_pages[pages, slots].flatten(1)
    return tails[0], tails[1]


def _describe(matrix: Tensor, rows: int, dim: int) -> Any:
    """Tensor-memory descriptor for boxes of ``rows`` rows and one head's columns."""
    return TensorDescriptor(
        matrix,
        list(matrix.shape),
        list(matrix.stride()),
        [rows, dim],
        _layout(rows, dim, matrix.dtype),
    )


@cache
def _layout(rows: int, dim: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(1, limit))
