"""Small cases of every GPU kernel for Compute Sanitizer, and a control that says what its race checker cannot follow.

    compute-sanitizer --tool memcheck  python tests/kernels/sanitize.py
    compute-sanitizer --tool synccheck python tests/kernels/sanitize.py
    compute-sanitizer --tool racecheck python tests/kernels/sanitize.py triton
    compute-sanitizer --tool racecheck python tests/kernels/sanitize.py control
    compute-sanitizer --tool racecheck python tests/kernels/sanitize.py hopper
    compute-sanitizer --tool memcheck  python tests/kernels/sanitize.py pages-triton pages-hopper pages-cluster
    compute-sanitizer --tool memcheck  python tests/kernels/sanitize.py search
    compute-sanitizer --tool racecheck python tests/kernels/sanitize.py search
    compute-sanitizer --tool initcheck python tests/kernels/sanitize.py search

Plain Triton must come out clean. The control is a kernel of two partitions that hand one value after another through
shared memory, ordered by mbarriers alone as the memory model allows; what the race checker reports there (the
hand-over of arguments to a partition, and reads ordered by an mbarrier) it also reports of the Hopper kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from prefill_kernels import (
    PagedKV,
    block_attention,
    kap_scores,
    page_attention,
    prepare_unions,
    quantize_kv,
    regroup_queries,
    search_unions,
    select_blocks,
)
from prefill_kernels.triton_osk import block_mask, logical_skip_attention
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SHAPES = ((4, 2, 128, 640, 128), (2, 1, 64, 300, 16))
"""Query heads, KV heads, head_dim, tokens, page."""


@gluon.jit
def _writer(ring, full, free, steps, first):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    for i in range(steps):
        mbarrier.wait(free.index(i % 2), ((i // 2) & 1) ^ 1)
        ring.index(i % 2).store(gl.full([8], first + i, gl.int32, layout))
        mbarrier.arrive(full.index(i % 2), count=1)


@gluon.jit
def _reader(ring, full, free, steps, out):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    total = gl.full([8], 0, gl.int32, layout)
    for i in range(steps):
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        total += ring.index(i % 2).load(layout)
        mbarrier.arrive(free.index(i % 2), count=1)
    gl.store(out + gl.arange(0, 8, layout), total)


@gluon.jit
def control_kernel(out, steps, first):
    """Sum of ``first .. first + steps - 1``, sent from one partition to the other."""
    ring = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(2):
        mbarrier.init(full.index(j), count=1)
        mbarrier.init(free.index(j), count=1)
    gl.warp_specialize(
        [(_reader, (ring, full, free, steps, out)), (_writer, (ring, full, free, steps, first))], [4], [64]
    )


def control() -> None:
    """Run the control and check its sum, so that a report of it is known to be wrong."""
    out = torch.empty(8, dtype=torch.int32, device="cuda")
    control_kernel[(1,)](out, 20, 7, num_warps=4)
    assert out.tolist() == [sum(range(7, 27))] * 8
    print("control: every value arrived")


def kernels(backend: str) -> None:
    """Proxy, selection and attention without and with skipping."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    for heads, kv_heads, dim, tokens, page in SHAPES:
        scale = dim**-0.5
        q = torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        pages = -(-tokens // page)
        k = torch.randn(pages, page, kv_heads, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        v = torch.randn(k.shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        q[..., 0] = 4
        k[..., 0] = torch.randn(pages, 1, kv_heads, device="cuda", generator=generator) * 2 * dim**0.5 / 4
        places = torch.randperm(pages, device="cuda", generator=generator).int()
        kv = PagedKV(k, v, places[None], tokens)
        for skip_scale in (-1.0, 0.3 * tokens):
            scores = kap_scores(q, kv, stride=8, scale=scale, backend="triton")
            plan = select_blocks(
                scores, block_size=128, q_offset=0, q_len=tokens, prompt_len=tokens, p=0.98, skip_scale=skip_scale,
                backend="triton",
            )  # fmt: skip
            out, stats = block_attention(q, kv, plan, scale=scale, backend=backend)
            assert out.isfinite().all()
            print(backend, dim, tokens, int(stats.visited_blocks.sum()), int(stats.computed_blocks.sum()))
            if backend == "triton":
                logical_skip_attention(q, kv, block_mask(plan), plan, scale=scale)
    torch.cuda.synchronize()


def pages(backend: str) -> None:
    """The complete call over selected pages: several requests, empty supports, a half without members, a tail.

    Then the Hopper kernel in two programs, so that each goes from group to group: queues of sorted and unsorted groups.
    """
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))
    from page_cases import make

    for kv_dtype in ("fp8",) if backend == "cluster" else ("model", "fp8"):
        for window in (0, 64):
            case = make(
                [(70, 700), (5, 130), (8, 128)], heads=(32, 2), dim=128, page_size=128, width=3, seed=window,
                dtype=torch.bfloat16, device="cuda", regroup=window, kv_dtype=kv_dtype,
            )  # fmt: skip
            out, stats = page_attention(case.q, case.kv, case.plan, scale=case.scale, backend=backend)
            assert out.isfinite().all()
            print(f"pages {backend} {kv_dtype} {window}", stats.union_pages.tolist())
            if backend == "hopper":
                from prefill_kernels.hopper_page_attention import union_attention

                kv = quantize_kv(case.kv, kv_lens=case.plan.kv_lens) if kv_dtype == "fp8" else case.kv
                ids = regroup_queries(case.plan, backend="triton")
                for prepared in ("cuda", "triton"):
                    again = torch.full_like(out, float("nan"))
                    unions = prepare_unions(case.plan, ids, backend=prepared)
                    union_attention(case.q, kv, case.plan, unions, case.scale, again, programs=2)
                    assert torch.equal(again, out)
                    print(f"two programs, unions by {prepared}", unions.count.numel(), "groups")
    torch.cuda.synchronize()


def search() -> None:
    """Search and union preparation in one kernel: both windows, every width of its table, requests that do not fit."""
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))
    from page_cases import make

    for window in (64, 128):
        for width in (3, 20, 64):
            for capacity in (32, 512):
                plan = make(
                    [(70, 700), (5, 130), (129, 640)], heads=(2, 2), width=width, seed=window + width, device="cuda",
                    local=True, regroup=window, capacity=capacity,
                ).plan  # fmt: skip
                got, want = (search_unions(plan, backend=backend) for backend in ("cuda", "triton"))
                assert all(torch.equal(getattr(got, n), getattr(want, n)) for n in ("ids", "pages", "members", "count"))
                got = prepare_unions(plan, want.ids, backend="cuda")
                assert all(torch.equal(getattr(got, n), getattr(want, n)) for n in ("ids", "pages", "members", "count"))
                print(f"search {window} {width} {capacity}", int(got.count.sum()))
    torch.cuda.synchronize()


if __name__ == "__main__":
    for name in sys.argv[1:] or ["control", "triton", "hopper"]:
        if name.startswith("pages-"):
            pages(name.removeprefix("pages-"))
        elif name == "control":
            control()
        elif name == "search":
            search()
        else:
            kernels(name)
