"""ID-aware union attention for Hopper (sm_90) in Gluon: each page is loaded once for a group of eight queries.

One program works through execution groups: 8 slots x 16 query heads (heads beyond the real ones are padding) = 128
rows. Four partitions share it: two consumers of four warps with four slots each; a loader of one warp, which walks the
groups' page unions and keeps a ring of K and one of V pages filled, also beyond the end of a group, and fetches the
next group's queries by their ids; and a scheduler of one warp, which takes the next group from the queue
(:class:`prefill_kernels.unions.GroupQueue`) and describes it in a note to the others. It does so a few pages before
the loader needs it: as late as latency allows, since a group taken early waits here while another program may be idle.
Steps are counted through all groups of a program.

A consumer works in runs: pages in a row that one of its four slots selected. Inside a run the QK product of the next
page is in flight together with the PV product of this one while this one's softmax is done. A page that none of its
slots selected costs the consumer no product and no softmax; it waits for the loads and gives the page back, as for
any other. One barrier a step tells the loader that a consumer is done with it: its QK product is read, and so is every
V page of two steps before.

What a row computes depends on the pages that its own query selected and on nothing else: on any other page its weights
are exact zeros, its decay an exact one. So the output does not depend on how queries were grouped, bit for bit.

FP8 pages: queries are quantised a row in the prologue; scores come from E4M3 products, the weights go through E4M3 at
448 times their value, and the denominator sums them before that rounding. A PV product starts from zero and is added
in float32, since the tensor core keeps fewer bits of an accumulator with FP8 operands. The keys of a page lie in
shared memory in the order in which the product leaves the weights in registers as the next product wants them.

Gluon changed between Triton releases, so this module is imported only when the backend is asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
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

from .backends import multiprocessors
from .fp8 import Fp8KV
from .paged import PagedKV
from .pages import PagePlan
from .unions import BINS, GroupQueue, Unions

_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_Shared = gl.shared_memory_descriptor
_reinterpret = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret

PAGE = 128
HEAD_ROWS = 16
"""Rows of a slot; query heads beyond the real ones are padding."""
STAGES: dict[bool, tuple[int, int]] = {False: (2, 3), True: (3, 6)}
"""K pages and V pages in their rings, by whether the pages are FP8."""
AHEAD = 4
"""Pages before a group's end at which the next group is taken."""
PREDICATE = False
"""Whether warps without a member leave out their exponentials by a branch."""
KEY_BOX = [8, 2, 4, 2]
"""FP8 keys of a page as token = 16 h + 4 c + 2 b + e in the order (h, b, c, e): see :func:`_token`."""


@gluon.jit
def _load_keys(desc, ring, full, step, page, head, D: gl.constexpr, FP8: gl.constexpr, STAGES: gl.constexpr):
    """Start the load of a page of keys."""
    barrier = full.index(step % STAGES)
    mbarrier.expect(barrier, desc.block_type.nbytes)
    if FP8:
        _load_tile(desc, [page * 8, 0, 0, 0, head * D], barrier, ring.index(step % STAGES))
    else:
        _load_tile(desc, [page * 128, head * D], barrier, ring.index(step % STAGES))


@gluon.jit
def _load_values(
    desc, tail, ring, full, step, page, is_tail, request, head, heads,
    D: gl.constexpr, FP8: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the load of a page of values; a request's short last page comes from a copy with zeros at its end."""
    barrier = full.index(step % STAGES)
    mbarrier.expect(barrier, desc.block_type.nbytes)
    if FP8:
        _load_tile(desc, [(page * heads + head) * D, 0], barrier, ring.index(step % STAGES))
    else:
        if is_tail:
            _load_tile(tail, [request * 128, head * D], barrier, ring.index(step % STAGES))
        else:
            _load_tile(desc, [page * 128, head * D], barrier, ring.index(step % STAGES))


@gluon.jit
def _noted(note, part: gl.constexpr, place: gl.constexpr, WARPS: gl.constexpr):
    """One number of a note; every thread holds all eight of a part."""
    every: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    eight = note.slice(part * 8, 8).load(every)
    return gl.sum(gl.where(gl.arange(0, 8, every) == place, eight, 0), 0)


@gluon.jit
def _load_queries(desc, tile, full, note, head, D: gl.constexpr, HEADS: gl.constexpr, HALF: gl.constexpr):
    """Start the loads of a half's four slots, 64 columns at a time, as the layout of a tile of 64 rows has them.

    Rows of padding heads are whatever follows, those of empty slots query 0; neither is ever stored.
    """
    panels: gl.constexpr = D // 64
    boxes = _reinterpret(tile, tile.dtype, [panels * 4, 1, 16, 64], desc.layout)
    for slot in gl.static_range(4):
        query = gl.maximum(_noted(note, 1, HALF * 4 + slot, 1), 0)
        for panel in gl.static_range(panels):
            _load_tile(desc, [query, head * HEADS, panel * 64], full, boxes.index(panel * 4 + slot))


@gluon.jit
def _describe_group(
    line, ids, positions, pages, members, counts, requests, kv_lens, table, groups, width, table_stride,
):  # fmt: skip
    """The note of a group, 32 numbers.

    Its line (head * G + group; -1: no more groups), |U_G|, the members of its first page, its request and its first
    page, logical and physical; from place 8 on the query of each slot, from 16 on the last token that the slot may see.
    """
    place = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    list_at = line.to(gl.int64) * width
    request = gl.load(requests + line % groups)
    logical = gl.load(pages + list_at)
    query = gl.load(ids + line * 8 + place % 8)
    first = gl.where(place == 1, gl.load(counts + line), gl.where(place == 2, gl.load(members + list_at), line))
    page = gl.load(table + request * table_stride + gl.maximum(logical, 0))
    last = gl.load(kv_lens + request) - 1
    limit = gl.minimum(gl.where(query >= 0, gl.load(positions + gl.maximum(query, 0)), last), last)
    first = gl.where(place == 3, request, gl.where(place == 4, logical, gl.where(place == 5, page, first)))
    return gl.where(place < 8, first, gl.where(place < 16, query, limit))


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _scheduler(
    notes, claim, noted, free,
    ids, positions, pages, members, counts, requests, kv_lens, table, sizes, lines,
    items, groups, width, table_stride, BINS: gl.constexpr,
):  # fmt: skip
    """Take groups from the queue and describe them, each when the loader claims it.

    A ticket is a place in the queue. All programs together draw as many as there are groups, the last of each in vain:
    whoever draws the last one leaves the count at 0 for the next call.
    """
    ends = gl.associative_scan(
        gl.load(sizes + gl.arange(0, BINS, gl.BlockedLayout([BINS // 32], [32], [1], [0]))), 0, _plus
    )
    ticket = gl.program_id(0)
    turn = 0
    while ticket < items:
        passed = ends <= ticket
        place = ticket - gl.max(gl.where(passed, ends, 0), 0)
        line = gl.load(lines + gl.sum(passed.to(gl.int32), 0) * items + place)
        note = _describe_group(
            line, ids, positions, pages, members, counts, requests, kv_lens, table, groups, width, table_stride
        )
        mbarrier.wait(free.index(turn % 2), ((turn // 2) & 1) ^ 1)
        notes.index(turn % 2).store(note)
        mbarrier.arrive(noted.index(turn % 2), count=1)
        mbarrier.wait(claim, turn & 1)
        drawn = gl.atomic_add(sizes + BINS, 1, sem="relaxed")
        if drawn == items - 1:
            gl.store(sizes + BINS, 0)
        ticket = gl.num_programs(0) + drawn
        turn += 1
    mbarrier.wait(free.index(turn % 2), ((turn // 2) & 1) ^ 1)
    notes.index(turn % 2).store(gl.full([32], -1, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(noted.index(turn % 2), count=1)


@gluon.jit
def _load_page(
    k_desc, v_desc, v_tail, k_ring, v_ring, k_full, v_full, done, pages, lookup,
    logical, page, j, count, step, tail_page, request, head, heads,
    D: gl.constexpr, FP8: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Load page j of a group when the steps are done that held its places; returns the group's next page."""
    # RING steps are added to what is waited for: before the first ones, an older phase that never was.
    freed = step + RING - KS
    mbarrier.wait(done.index(freed % RING), ((freed // RING) & 1) ^ 1)
    _load_keys(k_desc, k_ring, k_full, step, page, head, D, FP8, KS)
    freed = step + RING - VS + 2
    mbarrier.wait(done.index(freed % RING), ((freed // RING) & 1) ^ 1)
    _load_values(
        v_desc, v_tail, v_ring, v_full, step, page, logical == tail_page, request, head, heads, D, FP8, VS)  # fmt: skip
    logical = gl.load(pages + gl.minimum(j + 1, count - 1))
    return logical, gl.load(lookup + logical)


@gluon.jit
def _loader(
    q_desc, k_desc, v_desc, v_tail, q_ring, k_ring, v_ring, notes, q_full, claim, noted, k_full, v_full, done,
    pages, kv_lens, table, groups, width, table_stride, heads,
    D: gl.constexpr, HEADS: gl.constexpr, FP8: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr, RING: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Fill the rings. When both halves are done with step j, K of j and V of j - 2 are free."""
    gl.static_assert(VS >= 3)
    gl.static_assert(RING >= KS)
    gl.static_assert(RING > VS - 2)
    gl.static_assert(AHEAD >= 1)
    first_step = 0
    turn = 0
    mbarrier.wait(noted.index(0), 0)
    line = _noted(notes.index(0), 0, 0, 1)
    while line >= 0:
        note = notes.index(turn % 2)
        count = _noted(note, 0, 1, 1)
        request = _noted(note, 0, 3, 1)
        logical = _noted(note, 0, 4, 1)
        page = _noted(note, 0, 5, 1)
        head = line // groups
        mbarrier.expect(q_full.index(turn % 2), 128 * D * 2)
        for half in gl.static_range(2):
            tile = q_ring.index(turn % 2 * 2 + half)
            _load_queries(q_desc, tile, q_full.index(turn % 2), note, head, D, HEADS, half)
        kv_len = gl.load(kv_lens + request)
        tail_page = gl.where(kv_len % 128 == 0, -1, kv_len // 128)
        list_at = line.to(gl.int64) * width
        lookup = table + request * table_stride
        if count == 0:
            mbarrier.arrive(claim, count=1)
        for j in range(count):
            if j == gl.maximum(count - AHEAD, 0):
                mbarrier.arrive(claim, count=1)
            logical, page = _load_page(
                k_desc, v_desc, v_tail, k_ring, v_ring, k_full, v_full, done, pages + list_at, lookup,
                logical, page, j, count, first_step + j, tail_page, request, head, heads,
                D, FP8, KS, VS, RING)  # fmt: skip
        first_step += count
        turn += 1
        mbarrier.wait(noted.index(turn % 2), (turn // 2) & 1)
        line = _noted(notes.index(turn % 2), 0, 0, 1)


@gluon.jit
def _nan_max(a, b):
    """Maximum that keeps NaN, so that a broken key shows in the output."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _token(column, FP8: gl.constexpr):
    """Token of a column of scores.

    A thread of the QK product holds columns 2 c and 2 c + 1 of each 8; as operand of the FP8 PV product it must hold
    tokens 4 c .. 4 c + 3 of each 16. Column 8 b + 2 c + e of 16 is therefore token 4 c + 2 b + e.
    """
    if FP8:
        return column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2
    else:
        return column


@gluon.jit
def _exp2_if(x, on):
    """2^x of the rows that are on, 0 of others: rows of a warp share a slot, and a slot that is off costs no exp2."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred off;
        setp.eq.b32 off, $32, 0;
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0;
        mov.b32 $8, 0; mov.b32 $9, 0; mov.b32 $10, 0; mov.b32 $11, 0;
        mov.b32 $12, 0; mov.b32 $13, 0; mov.b32 $14, 0; mov.b32 $15, 0;
        @off bra.uni skip;
        ex2.approx.ftz.f32 $0, $16; ex2.approx.ftz.f32 $1, $17;
        ex2.approx.ftz.f32 $2, $18; ex2.approx.ftz.f32 $3, $19;
        ex2.approx.ftz.f32 $4, $20; ex2.approx.ftz.f32 $5, $21;
        ex2.approx.ftz.f32 $6, $22; ex2.approx.ftz.f32 $7, $23;
        ex2.approx.ftz.f32 $8, $24; ex2.approx.ftz.f32 $9, $25;
        ex2.approx.ftz.f32 $10, $26; ex2.approx.ftz.f32 $11, $27;
        ex2.approx.ftz.f32 $12, $28; ex2.approx.ftz.f32 $13, $29;
        ex2.approx.ftz.f32 $14, $30; ex2.approx.ftz.f32 $15, $31;
        skip:
        }""",
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,"
        "f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,"
        "r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [x, on],
        dtype=gl.float32,
        is_pure=True,
        pack=16,
    )


@gluon.jit
def _pack_fp8(x):
    """E4M3 of four neighbours [64, 128] in one int32 [64, 32].

    Single bytes carried around a loop take a register each.
    """
    packed = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $5, $4;
        cvt.rn.satfinite.e4m3x2.f32 high, $7, $6;
        mov.b32 $0, {low, high};
        mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,f,f,f,f",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )
    packed, _ = gl.split(packed.reshape(64, 32, 2, 2))
    packed, _ = gl.split(packed)
    return packed


@gluon.jit
def _unpack_fp8(packed, layout: gl.constexpr):
    """What :func:`_pack_fp8` packed, as an operand [64, 128]."""
    four = gl.join(packed, packed)
    four = gl.join(four, four).reshape(64, 128)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r,r,r",
        [gl.convert_layout(four, layout)],
        dtype=gl.float8e4nv,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _weights(
    s, m, total, bits, page, limit, low, scale, o_layout: gl.constexpr,
    FP8: gl.constexpr, PREDICATE: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Weights of one page by the running softmax (the sum over A_i in equation 2), new maximum, denominator, decay.

    Maxima are unscaled. Rows whose slot did not select the page get weight 0, decay 1 and keep maximum and denominator.
    """
    layout: gl.constexpr = s.type.layout
    row: gl.constexpr = gl.SliceLayout(1, layout)
    if page * 128 + 127 > low:
        key = page * 128 + _token(gl.arange(0, 128, gl.SliceLayout(0, layout)), FP8)
        s = gl.where(key[None, :] <= limit[:, None], s, float("-inf"))
    member = (bits >> (WG * 4 + gl.arange(0, 64, row) // 16)) & 1
    top = gl.where(member != 0, gl.reduce(s, 1, _nan_max), float("-inf"))
    new = _nan_max(m, top)
    base = gl.where(new == float("-inf"), 0.0, new)
    # The difference is exactly 0 where the maximum stays, and 2^0 exactly 1.
    decay = gl.exp2((m - base) * scale)
    shift = base * scale
    if FP8:
        shift = shift - 8.807354922057604  # log2(448): weights come out at 448 times their value
    if PREDICATE:
        p = _exp2_if(s * scale[:, None] - shift[:, None], member[:, None].broadcast_to([64, 128]))
    else:
        p = gl.exp2(s * scale[:, None] - gl.where(member != 0, shift, float("inf"))[:, None])
    total = total * decay + gl.sum(p, 1)
    decay = gl.convert_layout(decay, gl.SliceLayout(1, o_layout))
    return p, new, total, decay


@gluon.jit
def _operand(p, layout: gl.constexpr, FP8: gl.constexpr, dtype: gl.constexpr):
    """Weights as the PV product takes them; FP8 ones are packed (:func:`_pack_fp8`)."""
    if FP8:
        # The same numbers of the same thread, named by token instead of by column.
        p = p.reshape(64, 8, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(64, 128)
        return _pack_fp8(gl.convert_layout(p, layout))
    else:
        return gl.convert_layout(p.to(dtype), layout)


@gluon.jit
def _qk(q, ring, full, step, zero, page_layout: gl.constexpr, STAGES: gl.constexpr):
    """Issue the QK product of a step."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    keys = _reinterpret(ring.index(step % STAGES), ring.dtype, [128, q.shape[1]], page_layout)
    return warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _pv(p, ring, full, step, acc, FP8: gl.constexpr, STAGES: gl.constexpr):
    """Issue the PV product of a step; FP8 values lie transposed and their product starts from zero."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    values = ring.index(step % STAGES)
    if FP8:
        return warpgroup_mma(p, values.permute((1, 0)), acc, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(p, values, acc, is_async=True)


@gluon.jit
def _add(acc, product, decay, FP8: gl.constexpr):
    """The accumulator after a PV product: FP8 adds the product here, others did in the tensor core."""
    if FP8:
        return acc * decay[:, None] + product
    else:
        return product


@gluon.jit
def _skip(members, bits, step, count, first_step, k_full, v_full, done, WG: gl.constexpr,
          KS: gl.constexpr, VS: gl.constexpr, RING: gl.constexpr):  # fmt: skip
    """Give back pages that none of this half's slots selected; returns the next page that one did, and its bits.

    The loads are waited for, else this half could be done with a step before the other is with the one that used
    the same barrier before.
    """
    while (step < count) & (((bits >> (4 * WG)) & 15) == 0):
        at = first_step + step
        mbarrier.wait(k_full.index(at % KS), (at // KS) & 1)
        mbarrier.wait(v_full.index(at % VS), (at // VS) & 1)
        mbarrier.arrive(done.index(at % RING), count=1)
        step += 1
        bits = gl.load(members + gl.minimum(step, count - 1))
    return step, bits


@gluon.jit
def _of_slot(note, part: gl.constexpr, WG: gl.constexpr, layout: gl.constexpr):
    """The number of each row's slot [64]."""
    slot = gl.arange(0, 64, layout) // 16
    low = gl.where(slot == 0, _noted(note, part, WG * 4, 4), _noted(note, part, WG * 4 + 1, 4))
    high = gl.where(slot == 2, _noted(note, part, WG * 4 + 2, 4), _noted(note, part, WG * 4 + 3, 4))
    return gl.where(slot < 2, low, high)


@gluon.jit
def _quantize(raw, tile, row: gl.constexpr, D: gl.constexpr):
    """Rows of queries as E4M3 in shared memory; returns their scales, amax / 448, 1 where that is 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    numbers = raw.load(layout).to(gl.float32)
    amax = gl.max(gl.abs(numbers), 1)
    scale = amax / 448.0
    scale = gl.where(scale == 0.0, 1.0, scale)  # of the quotient: it may underflow where amax does not
    tile.store((numbers / scale[:, None]).to(tile.dtype))
    fence_async_shared()
    return gl.convert_layout(scale, row)


@gluon.jit
def _consumer(
    q_ring, q8_tile, k_ring, v_ring, notes, q_full, noted, free, k_full, v_full, done,
    out, pages, members, k_scale, v_scale, groups, width, out_head_stride, out_stride, scale,
    D: gl.constexpr, HEADS: gl.constexpr, page_layout: gl.constexpr,
    FP8: gl.constexpr, PREDICATE: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr, RING: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    step_k: gl.constexpr = 32 if FP8 else 16
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, step_k])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, step_k])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4 if FP8 else 2)
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = k_ring.dtype
    zero = gl.zeros([64, 128], gl.float32, s_layout)
    nothing = gl.zeros([64, D], gl.float32, o_layout)
    first_step = 0
    turn = 0
    mbarrier.wait(noted.index(0), 0)
    line = _noted(notes.index(0), 0, 0, 4)
    while line >= 0:
        note = notes.index(turn % 2)
        count = _noted(note, 0, 1, 4)
        bits = _noted(note, 0, 2, 4)
        limit = _of_slot(note, 2, WG, row)
        query = _of_slot(note, 1, WG, o_row)
        low = gl.minimum(
            gl.minimum(_noted(note, 2, WG * 4, 4), _noted(note, 2, WG * 4 + 1, 4)),
            gl.minimum(_noted(note, 2, WG * 4 + 2, 4), _noted(note, 2, WG * 4 + 3, 4)))  # fmt: skip
        head = line // groups
        list_at = line.to(gl.int64) * width
        mbarrier.wait(q_full.index(turn % 2), (turn // 2) & 1)
        if FP8:
            tile = q8_tile.index(WG)
            row_scale = _quantize(q_ring.index(turn % 2 * 2 + WG), tile, row, D) * (scale * gl.load(k_scale + head))
            # Masked scores are -inf: times a factor that underflowed to 0 they would be NaN. Others are ~0 either way.
            row_scale = gl.where(row_scale < 1.1754943508222875e-38, 1.1754943508222875e-38, row_scale)
        else:
            tile = q_ring.index(turn % 2 * 2 + WG)
            row_scale = gl.full([64], 0.0, gl.float32, row) + scale

        m = gl.full([64], float("-inf"), gl.float32, row)
        total = gl.full([64], 0.0, gl.float32, row)
        acc = gl.zeros([64, D], gl.float32, o_layout)
        step = 0
        step, bits = _skip(members + list_at, bits, step, count, first_step, k_full, v_full, done, WG, KS, VS, RING)
        while step < count:
            page = gl.load(pages + list_at + step)
            next_bits = gl.load(members + list_at + gl.minimum(step + 1, count - 1))
            coming = _qk(tile, k_ring, k_full, first_step + step, zero, page_layout, KS)
            s = warpgroup_mma_wait(0, deps=(coming,))
            mbarrier.arrive(done.index((first_step + step) % RING), count=1)
            p, m, total, decay = _weights(
                s, m, total, bits, page, limit, low, row_scale, o_layout, FP8, PREDICATE, WG)  # fmt: skip
            p = _operand(p, p_layout, FP8, dtype)
            if not FP8:
                acc = acc * decay[:, None]
            step += 1
            while (step < count) & (((next_bits >> (4 * WG)) & 15) != 0):
                bits = next_bits
                page = gl.load(pages + list_at + step)
                if FP8:  # before the products, which nothing may define registers for once they are under way
                    p_operand = _unpack_fp8(p, p_layout)
                else:
                    p_operand = p
                coming = _qk(tile, k_ring, k_full, first_step + step, zero, page_layout, KS)
                pending = _pv(p_operand, v_ring, v_full, first_step + step - 1, nothing if FP8 else acc, FP8, VS)
                next_bits = gl.load(members + list_at + gl.minimum(step + 1, count - 1))
                s = warpgroup_mma_wait(1, deps=(coming,))
                mbarrier.arrive(done.index((first_step + step) % RING), count=1)
                before = decay
                p, m, total, decay = _weights(
                    s, m, total, bits, page, limit, low, row_scale, o_layout, FP8, PREDICATE, WG)  # fmt: skip
                if not FP8:
                    p = _operand(p, p_layout, FP8, dtype)
                acc = _add(acc, warpgroup_mma_wait(0, deps=(pending,)), before, FP8)
                if FP8:
                    p = _operand(p, p_layout, FP8, dtype)
                else:
                    acc = acc * decay[:, None]
                step += 1
            if FP8:
                p_operand = _unpack_fp8(p, p_layout)
            else:
                p_operand = p
            pending = _pv(p_operand, v_ring, v_full, first_step + step - 1, nothing if FP8 else acc, FP8, VS)
            acc = _add(acc, warpgroup_mma_wait(0, deps=(pending,)), decay, FP8)
            step, bits = _skip(
                members + list_at, next_bits, step, count, first_step, k_full, v_full, done, WG, KS, VS, RING
            )

        # Nothing of this group's note and queries is read any more.
        mbarrier.arrive(free.index(turn % 2), count=1)
        whole = gl.convert_layout(total, o_row)
        # A row without any page has an accumulator of zeros.
        inverse = gl.where(whole == 0.0, 0.0, 1.0 / whole)
        if FP8:
            inverse = inverse * gl.load(v_scale + head)
        acc = acc * inverse[:, None]
        rows = gl.arange(0, 64, o_row) % 16
        inside = (query >= 0) & (rows < HEADS)
        places = out + query.to(gl.int64) * out_stride + (head * HEADS + rows).to(gl.int64) * out_head_stride
        dims = gl.arange(0, D, gl.SliceLayout(0, o_layout))
        gl.store(places[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])
        first_step += count
        turn += 1
        mbarrier.wait(noted.index(turn % 2), (turn // 2) & 1)
        line = _noted(notes.index(turn % 2), 0, 0, 4)


@gluon.jit
def _union_attention(
    q_desc, k_desc, v_desc, v_tail, out, ids, positions, pages, members, counts, requests, kv_lens, table, sizes, lines,
    k_scale, v_scale, scale, items, groups, width, table_stride, out_head_stride, out_stride,
    D: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, page_layout: gl.constexpr,
    FP8: gl.constexpr, PREDICATE: gl.constexpr, KS: gl.constexpr, VS: gl.constexpr, RING: gl.constexpr,
    AHEAD: gl.constexpr, BINS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_dtype: gl.constexpr = q_desc.dtype
    lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], q_dtype)
    lay8: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_ring = gl.allocate_shared_memory(q_dtype, [4, 64, D], lay)
    if FP8:
        q8_tile = gl.allocate_shared_memory(dtype, [2, 64, D], lay8)
    else:
        q8_tile = q_ring
    k_ring = gl.allocate_shared_memory(dtype, [KS] + k_desc.block_type.shape, k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [VS] + v_desc.block_type.shape, v_desc.layout)
    notes = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    claim = gl.allocate_shared_memory(gl.int64, [1], bars)
    noted = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [VS, 1], bars)
    done = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    mbarrier.init(claim, count=1)
    for j in gl.static_range(2):
        mbarrier.init(q_full.index(j), count=1)
        mbarrier.init(noted.index(j), count=1)
        mbarrier.init(free.index(j), count=2)
    for j in gl.static_range(KS):
        mbarrier.init(k_full.index(j), count=1)
    for j in gl.static_range(VS):
        mbarrier.init(v_full.index(j), count=1)
    for j in gl.static_range(RING):
        mbarrier.init(done.index(j), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                q_ring, q8_tile, k_ring, v_ring, notes, q_full, noted, free, k_full, v_full, done,
                out, pages, members, k_scale, v_scale, groups, width, out_head_stride, out_stride, scale,
                D, HEADS, page_layout, FP8, PREDICATE, KS, VS, RING, 0)),
            (_consumer, (
                q_ring, q8_tile, k_ring, v_ring, notes, q_full, noted, free, k_full, v_full, done,
                out, pages, members, k_scale, v_scale, groups, width, out_head_stride, out_stride, scale,
                D, HEADS, page_layout, FP8, PREDICATE, KS, VS, RING, 1)),
            (_loader, (
                q_desc, k_desc, v_desc, v_tail, q_ring, k_ring, v_ring, notes, q_full, claim, noted, k_full, v_full,
                done, pages, kv_lens, table, groups, width, table_stride, KV_HEADS,
                D, HEADS, FP8, KS, VS, RING, AHEAD)),
            (_scheduler, (
                notes, claim, noted, free, ids, positions, pages, members, counts, requests, kv_lens, table,
                sizes, lines, items, groups, width, table_stride, BINS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@triton.jit
def _tails(
    v_pages, tails, kv_lens, table, table_stride,
    HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The short last page of values of one request and head, zeros after its end: a page may hold NaN there."""
    request, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_lens + request)
    if length % 128 != 0:
        page = tl.load(table + request * table_stride + length // 128).to(tl.int64)
        slot = tl.arange(0, 128)
        place = (slot * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
        values = tl.load(v_pages + page * (128 * HEADS * D) + place, mask=(slot < length % 128)[:, None], other=0.0)
        tl.store(tails + request.to(tl.int64) * (128 * HEADS * D) + place, values)


def problem(q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan) -> str | None:
    """Why this kernel cannot run the call, or None."""
    from .backends import half_problem, hopper_problem

    if reason := hopper_problem(q.device) or half_problem(q.device, q.dtype):
        return reason
    pools = (kv.k_pages, kv.vt_pages) if isinstance(kv, Fp8KV) else (kv.k_pages, kv.v_pages)
    if not isinstance(kv, Fp8KV) and (reason := half_problem(q.device, q.dtype, *(x.dtype for x in pools))):
        return reason
    if plan.page_size != PAGE or kv.page_size != PAGE:
        return f"page_size={plan.page_size}, physical pages of {kv.page_size}: both must be {PAGE}"
    if q.shape[3] not in (64, 128):
        return f"head_dim={q.shape[3]}: must be 64 or 128"
    if q.shape[1] > HEAD_ROWS * kv.num_kv_heads:
        return f"{q.shape[1] // kv.num_kv_heads} query heads a KV head: at most {HEAD_ROWS}"
    if not all(x.is_contiguous() for x in pools):
        return "key and value pages must be contiguous"
    return None


def union_attention(
    q: Tensor, kv: PagedKV | Fp8KV, plan: PagePlan, unions: Unions, scale: float, out: Tensor, **tuning: Any
) -> None:
    """:func:`prefill_kernels.union_attention` on sm_90 into ``out``, for calls that :func:`problem` accepts.

    Args:
        q: [1, Hq, N, d] with ``stride(3) == 1``.
        kv: pages of 128 tokens.
        plan: geometry.
        unions: what the groups walk.
        scale: softmax scaling of the model.
        out: [1, Hq, N, d] with ``stride(3) == 1``.
        tuning: ``stages`` (K and V pages in their rings), ``ahead``, ``predicate`` and ``programs`` (at most so many,
            else one a multiprocessor), for measurements and tests.
    """
    heads, dim = q.shape[1], q.shape[3]
    kv_heads, groups, fp8 = kv.num_kv_heads, plan.groups, isinstance(kv, Fp8KV)
    width = kv_heads * dim
    if isinstance(kv, Fp8KV):
        keys = kv.k_pages.view(-1, 4, 2, 2, width).transpose(1, 2)  # token = 16 h + 4 c + 2 b + e as (h, b, c, e)
        k_desc = _describe(keys, [*KEY_BOX, dim])
        v_desc = v_tail = _describe(kv.vt_pages.view(-1, PAGE), [dim, PAGE])
        k_scale, v_scale = kv.k_scale, kv.v_scale
    else:
        k_desc, v_desc = (_describe(x.view(-1, width), [PAGE, dim]) for x in (kv.k_pages, kv.v_pages))
        v_tail = v_desc
        if plan.requests > 1 or plan.max_kv_len % PAGE:
            tails = torch.empty(plan.requests * PAGE, width, dtype=q.dtype, device=q.device)
            _tails[(plan.requests, kv_heads)](
                kv.v_pages, tails, plan.kv_lens, kv.page_table, kv.page_table.stride(0), HEADS=kv_heads, D=dim
            )
            v_tail = _describe(tails, [PAGE, dim])
        k_scale = v_scale = plan.kv_lens  # not read
    k_stages, v_stages = tuning.get("stages", STAGES[fp8])
    if q.stride(1) % 8 or q.stride(2) % 8 or q.data_ptr() % 16:
        q = q.contiguous()
    items = groups * kv_heads
    queue = unions.queue or GroupQueue.in_turn(items, q.device)
    programs = min(items, tuning.get("programs", multiprocessors(q.device)))
    _union_attention[(programs,)](
        _describe(q[0].transpose(0, 1), [1, HEAD_ROWS, 64]),
        k_desc,
        v_desc,
        v_tail,
        out,
        unions.ids,
        plan.positions,
        unions.pages,
        unions.members,
        unions.count,
        unions.requests,
        plan.kv_lens,
        kv.page_table,
        queue.open(),
        queue.lines,
        k_scale,
        v_scale,
        scale * 1.4426950408889634,
        items,
        groups,
        unions.pages.shape[2],
        kv.page_table.stride(0),
        out.stride(1),
        out.stride(2),
        D=dim,
        HEADS=heads // kv_heads,
        KV_HEADS=kv_heads,
        page_layout=_layout((PAGE, dim), k_desc.base.dtype),
        FP8=fp8,
        PREDICATE=tuning.get("predicate", PREDICATE),
        KS=k_stages,
        VS=v_stages,
        RING=max(4, k_stages, v_stages - 1),
        AHEAD=tuning.get("ahead", AHEAD),
        BINS=BINS,
        num_warps=4,
    )


def _describe(matrix: Tensor, box: list[int]) -> Any:
    """Tensor-memory descriptor for boxes of a matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, _layout(tuple(box), matrix.dtype))


@cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
    return gl.NVMMASharedLayout.get_default_for(list(box), kinds[dtype])
