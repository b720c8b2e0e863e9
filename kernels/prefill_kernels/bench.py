"""Benchmark the kernels on a CUDA device: ``python -m prefill_kernels.bench --out results/h200/benchmarks.csv``.

Shape: 32 query heads, 8 KV heads, head_dim 128, bfloat16, causal, shuffled pages of 128 tokens, standard normal
inputs. Times are medians of device time with inputs that rotate past L2. TF/s count executed products: 4 * 128 * 128 *
d for a computed block, half for a skipped one, and the causal half of the square for dense attention.

The operating point needs blocks that differ: one query channel is held at 4 and each key block is lifted by a normal
deviate times ``sigma`` (in logits); the threshold is bisected to the wanted realized budget.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import kap_scores, select_blocks
from .osk import block_attention
from .paged import PagedKV
from .plans import BlockPlan
from .timing import milliseconds
from .triton_osk import block_mask, logical_skip_attention

COLUMNS = "bench,variant,tokens,setting,metric,value,unit,device,torch,triton,commit,command".split(",")
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
BUDGETS = (0.25, 0.5, 0.75)
HEADS, KV_HEADS, DIM, BLOCK, STRIDE = 32, 8, 128, 128, 8
SCALE = DIM**-0.5

Inputs = tuple[Tensor, PagedKV, Tensor, Tensor]


def inputs(tokens: int, seed: int, sigma: float = 0.0) -> Inputs:
    """Q, paged KV, and the same K and V dense."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=g)
    q = normal(1, tokens, HEADS, DIM).transpose(1, 2)
    k, v = normal(1, tokens, KV_HEADS, DIM), normal(1, tokens, KV_HEADS, DIM)
    if sigma:
        q[..., 0] = 4.0
        lift = torch.randn(tokens // BLOCK, KV_HEADS, device="cuda", generator=g) * sigma / (4 * SCALE)
        k[0, :, :, 0] = lift.repeat_interleave(BLOCK, 0).to(k.dtype)
    pages = tokens // BLOCK
    places = torch.randperm(pages, device="cuda", generator=g)
    k_pages, v_pages = (
        torch.empty_like(k).view(pages, BLOCK, KV_HEADS, DIM),
        torch.empty_like(v).view(pages, BLOCK, KV_HEADS, DIM),
    )
    k_pages[places], v_pages[places] = k.view_as(k_pages), v.view_as(v_pages)
    kv = PagedKV(k_pages, v_pages, places.int()[None], tokens)
    return q, kv, k.transpose(1, 2), v.transpose(1, 2)


def geometry(tokens: int) -> dict[str, Any]:
    """Geometry of an unchunked prompt."""
    return {"block_size": BLOCK, "q_offset": 0, "q_len": tokens, "prompt_len": tokens}


def executed(visited: int, computed: int) -> float:
    """Floating-point operations of a sparse call."""
    return 2.0 * BLOCK * BLOCK * DIM * (visited + computed)


class Rows:
    """Collects rows and appends them to a CSV file as they come."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path = path
        self.machine = [torch.cuda.get_device_name(), torch.__version__, triton.__version__, commit]
        self.command = " ".join(["python -m prefill_kernels.bench", *sys.argv[1:]])
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(",".join(COLUMNS) + "\n")

    def add(self, bench: str, variant: str, tokens: int, setting: str, **values: float) -> None:
        """Append one row a value; the unit is the metric's last part, or a ratio."""
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for metric, value in values.items():
                unit = {"ms": "ms", "tflops": "TF/s"}.get(metric, "ratio")
                writer.writerow(
                    [bench, variant, tokens, setting, metric, f"{value:.5g}", unit, *self.machine, self.command]
                )
        print(bench, variant, tokens, setting, {k: float(f"{v:.4g}") for k, v in values.items()}, flush=True)


def dense(rows: Rows, tokens: int, sets: list[Inputs]) -> dict[str, float]:
    """FlashAttention 2 and cuDNN through SDPA: milliseconds."""
    times = {}
    for name, backend in (("fa2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            attend = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
            times[name] = milliseconds([functools.partial(attend, q, k, v) for q, _, k, v in sets])
        flops = 2.0 * tokens * tokens * DIM * HEADS
        rows.add("kernel", name, tokens, "dense", ms=times[name], tflops=flops / times[name] / 1e9)
    return times


def run_plans(
    rows: Rows,
    bench: str,
    variant: str,
    setting: str,
    sets: list[Inputs],
    plans: list[BlockPlan],
    base: dict[str, float],
    backend: str = "auto",
) -> float:
    """Time one kernel over given plans; returns milliseconds."""
    tokens = plans[0].q_len
    causal = HEADS * (tokens // BLOCK) * (tokens // BLOCK + 1) // 2

    def call(q: Tensor, kv: PagedKV, plan: BlockPlan) -> Any:
        return block_attention(q, kv, plan, scale=SCALE, backend=backend)

    stats = call(sets[0][0], sets[0][1], plans[0])[1]
    visited, computed = int(stats.visited_blocks.sum()), int(stats.computed_blocks.sum())
    ms = milliseconds([functools.partial(call, q, kv, p) for (q, kv, *_), p in zip(sets, plans, strict=True)])
    rate = executed(visited, computed) / ms / 1e9
    dense_rate = 2.0 * tokens * tokens * DIM * HEADS / base["cudnn"] / 1e9
    rows.add(
        bench, variant, tokens, setting, ms=ms, tflops=rate, B_stage1_block=visited / causal,
        B_block=computed / causal, share_of_cudnn_rate=rate / dense_rate, speedup_fa2=base["fa2"] / ms,
        speedup_cudnn=base["cudnn"] / ms,
    )  # fmt: skip
    return ms


def with_scale(plans: Iterable[BlockPlan], skip_scale: float) -> list[BlockPlan]:
    """The same lists under another skip scale."""
    return [dataclasses.replace(plan, skip_scale=skip_scale) for plan in plans]


def whole_call(
    rows: Rows, setting: str, sets: list[Inputs], base: dict[str, float], budget: float, skip_scale: float, stride: int
) -> None:
    """Proxy, selection and attention, apart and as one call."""
    tokens = sets[0][0].shape[2]

    def proxy(q: Tensor, kv: PagedKV) -> Any:
        return kap_scores(q, kv, stride=stride, scale=SCALE)

    def select(scores: Any) -> BlockPlan:
        return select_blocks(scores, budget=budget, skip_scale=skip_scale, **geometry(tokens))

    def whole(q: Tensor, kv: PagedKV) -> Any:
        return block_attention(q, kv, select(proxy(q, kv)), scale=SCALE)

    scores = [proxy(q, kv) for q, kv, *_ in sets]
    plans = [select(s) for s in scores]
    kap = milliseconds([functools.partial(proxy, q, kv) for q, kv, *_ in sets])
    sort = milliseconds([functools.partial(select, s) for s in scores])
    rows.add("attention", "kap", tokens, setting, ms=kap)
    rows.add("attention", "select", tokens, setting, ms=sort)
    run_plans(rows, "attention", "osk", setting, sets, plans, base)
    ms = milliseconds([functools.partial(whole, q, kv) for q, kv, *_ in sets])
    rows.add(
        "attention", "call", tokens, setting, ms=ms, speedup_fa2=base["fa2"] / ms, speedup_cudnn=base["cudnn"] / ms,
        kap_select_share=(kap + sort) / ms,
    )  # fmt: skip


def bisect_scale(one: Inputs, plan: BlockPlan, wanted: float) -> float:
    """The skip scale at which the realized block budget is ``wanted``."""
    tokens = plan.q_len
    causal = HEADS * (tokens // BLOCK) * (tokens // BLOCK + 1) // 2
    low, high = 1e-6, 1.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        (trial,) = with_scale([plan], middle * tokens)
        computed = int(block_attention(one[0], one[1], trial, scale=SCALE)[1].computed_blocks.sum())
        low, high = (middle, high) if computed / causal > wanted else (low, middle)
    return high * tokens


def skipped_block(rows: Rows, tokens: int, base: dict[str, float]) -> None:
    """All blocks in ascending order, the first of which outweighs the others, so that all others are skipped."""
    q, kv, k, v = inputs(tokens, 7)
    q[..., 0] = 8.0
    kv.k_pages[..., 0] = 0
    kv.k_pages[kv.page_table[0, 0].long(), :, :, 0] = 60.0
    blocks = tokens // BLOCK
    count = torch.arange(1, blocks + 1, device="cuda", dtype=torch.int32).expand(1, HEADS, -1).contiguous()
    block = torch.arange(blocks, device="cuda", dtype=torch.int32)
    order = torch.where(block < count[..., None], block, -1).int()
    plan = BlockPlan(order, count, BLOCK, 0, tokens, tokens, tokens)
    for setting, skip_scale in (("vote off", -1.0), ("none skipped", 1e-30), ("all but one skipped", 0.5 * tokens)):
        run_plans(rows, "skip", "osk", setting, [(q, kv, k, v)], with_scale([plan], skip_scale), base)


def length(rows: Rows, tokens: int) -> None:
    """Everything at one length."""
    sets = [inputs(tokens, seed) for seed in range(4 if tokens <= 8192 else 2 if tokens <= 16384 else 1)]
    base = dense(rows, tokens, sets)
    scores = [kap_scores(q, kv, stride=STRIDE, scale=SCALE) for q, kv, *_ in sets]

    def make(budget: float) -> list[BlockPlan]:
        return [select_blocks(s, budget=budget, **geometry(tokens)) for s in scores]

    every = make(1.0)
    run_plans(rows, "kernel", "osk", "all blocks", sets, every, base)
    run_plans(rows, "kernel", "osk", "all blocks, vote, none skipped", sets, with_scale(every, 1e-30), base)
    for budget in BUDGETS:
        plans, setting = make(budget), f"budget {budget:.0%}"
        run_plans(rows, "kernel", "osk", setting, sets, plans, base)
        run_plans(rows, "kernel", "osk_triton", setting, sets, plans, base, backend="triton")
        masks = [block_mask(p) for p in plans]
        ms = milliseconds(
            [
                functools.partial(logical_skip_attention, q, kv, m, p, scale=SCALE)
                for (q, kv, *_), m, p in zip(sets, masks, plans, strict=True)
            ]
        )
        rows.add("kernel", "logical_triton", tokens, setting, ms=ms, speedup_fa2=base["fa2"] / ms)
        del masks, plans
    del every
    whole_call(rows, "Stage-1 20 %, vote off, stride 8", sets, base, 0.2, -1.0, 8)
    whole_call(rows, "Stage-1 20 %, vote off, stride 16", sets, base, 0.2, -1.0, 16)
    if tokens == 4096:
        whole_call(rows, "Stage-1 36 %, vote off, stride 8", sets, base, 0.36, -1.0, 8)
    if tokens == 32768:
        skipped_block(rows, tokens, base)
    for sigma in (1.0, 2.0):
        one = inputs(tokens, 5, sigma)
        plan = select_blocks(kap_scores(one[0], one[1], stride=STRIDE, scale=SCALE), budget=0.29, **geometry(tokens))
        setting = f"Stage-1 29 % to B 20 %, stride 8, sigma {sigma:g}"
        whole_call(rows, setting, [one], base, 0.29, bisect_scale(one, plan, 0.2), 8)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="benchmark the kernels on a CUDA device")
    parser.add_argument("--out", type=Path, default=Path("results/h200/benchmarks.csv"), help="CSV file to append to")
    parser.add_argument("--commit", default="unknown", help="commit of the measured code")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="prompt lengths, multiples of 128")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    rows = Rows(arguments.out, arguments.commit)
    for tokens in arguments.tokens:
        length(rows, tokens)


if __name__ == "__main__":
    main()
