"""One launch of each case of CoSA's or PageWeaver's kernels for Nsight Compute, in the order of :data:`CASES`.

ncu --set full --profile-from-start off --csv --page raw --log-file raw.csv python tests/kernels/ncu.py cosa
python tests/kernels/ncu.py cosa raw.csv DEVICE TORCH TRITON COMMIT > results/h200/profiles/cosa_32k.csv

For ``pages``, the environment's CAPTURE names a capture of page ids, and LAYER one of its layers as 65536/20.
"""

from __future__ import annotations

import csv
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from prefill_kernels import (
    BlockPlan,
    block_attention,
    kap_scores,
    prepare_unions,
    quantize_kv,
    regroup_queries,
    search_unions,
    union_attention,
)
from prefill_kernels.bench.captures import captured_layers
from prefill_kernels.bench.check import every_block
from prefill_kernels.bench.config import BLOCK
from prefill_kernels.bench.inputs import Inputs, Shape, from_dense, synthetic
from prefill_kernels.bench.measure import Bench, bisect_scale
from prefill_kernels.bench.page_inputs import page_inputs, selections

TOKENS = 32768
CASES = {
    "cosa": (
        "attention, all blocks, vote off",
        "attention, all blocks, vote, none skipped",
        "proxy, stride 8",
        "attention, Stage-1 29 % to B 20 %",
        "attention, the same lists, vote off",
        "attention, all blocks visited, all but one a row skipped",
    ),
    "pages": (
        "unions of the original order",
        "search and unions, W = 64",
        "search and unions, W = 128",
        "attention, original order, bf16",
        "attention, W = 64, bf16",
        "attention, original order, FP8",
        "attention, W = 64, FP8",
    ),
}
METRICS = {
    "gpu__time_duration.sum": "duration",
    "sm__cycles_elapsed.max": "elapsed_cycles",
    "smsp__inst_executed.sum": "executed_instructions",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor_pipe",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_slots",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "l1_and_shared_memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "l2",
    "lts__t_sector_hit_rate.pct": "l2_hit_rate",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "dram__bytes_read.sum": "dram_bytes_read",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "launch__registers_per_thread": "registers_a_thread",
    "launch__shared_mem_per_block_dynamic": "shared_memory_a_block",
}
SECOND = "kap_kernel"
"""Of a case of two kernels: the proxy gathers its samples in a launch of its own."""
CLEARING = "vectorized_elementwise_kernel"
"""Zeros for a queue, in no case's rows."""
STALLS = "smsp__average_warps_issue_stalled_"
"""Stall reasons: warps that wait for a reason, at each cycle that issues an instruction."""


class NoRows:
    """Takes the place of a benchmark's rows, which are not wanted here."""

    def add(self, *args: object, **values: object) -> None:
        """Drop a row."""


def page_cases(device: torch.device) -> Iterator[Callable[[], object]]:
    """The calls of PageWeaver, in the order of :data:`CASES`, on a captured layer."""
    layers = captured_layers(Path(os.environ["CAPTURE"]))
    chosen = [one for layer in layers for one in selections(layer, 0, 8192) if one.name == os.environ["LAYER"]][0]
    plans = {window: chosen.plan(device, regroup=window, kv_dtype="model") for window in (0, 64, 128)}
    original = prepare_unions(plans[0], regroup_queries(plans[0]), backend="cuda")
    yield functools.partial(prepare_unions, plans[0], original.ids, backend="cuda")
    for window in (64, 128):
        yield functools.partial(search_unions, plans[window], backend="cuda")
    one = page_inputs(chosen, heads=16, kv_heads=1, dim=128, device=device, dtype=torch.bfloat16, seed=0)
    orders = {0: original, 64: search_unions(plans[64], backend="cuda")}
    for kv in (one.kv, quantize_kv(one.kv)):
        for window, unions in orders.items():
            yield functools.partial(
                union_attention, one.q, kv, plans[window], unions, scale=one.scale, backend="hopper"
            )


def block_cases(device: torch.device) -> Iterator[Callable[[], object]]:
    """The calls of CoSA, in the order of :data:`CASES`."""

    def attention(one: Inputs, plan: BlockPlan) -> Callable[[], object]:
        return lambda: block_attention(one.q, one.kv, plan, scale=one.scale)

    plain = synthetic(Shape(), TOKENS, 7, device=device, dtype=torch.bfloat16)
    yield attention(plain, every_block(plain))
    yield attention(plain, replace(every_block(plain), skip_scale=1e-30))
    yield lambda: kap_scores(plain.q, plain.kv, scale=plain.scale, stride=8)

    spread = synthetic(Shape(), TOKENS, 5, device=device, dtype=torch.bfloat16, sigma=2.0)
    bench = Bench(NoRows(), device, lambda calls: [1.0 for _ in calls])  # type: ignore[arg-type]
    plan = bench.select(bench.scores(spread, 8), TOKENS, budget=0.29)
    yield attention(spread, replace(plan, skip_scale=bisect_scale(bench, [spread], [plan], 0.2)))
    yield attention(spread, plan)

    # The first visited block holds a maximum that no other comes near, so that every other is skipped.
    q, k, v = (x.transpose(1, 2).contiguous() for x in (plain.q, plain.k, plain.v))
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :BLOCK, :, 0] = 42.0 / (8.0 * plain.scale)
    peaked = from_dense(q, k, v, plain.scale, 7)
    yield attention(peaked, replace(every_block(peaked), skip_scale=0.5 * TOKENS))


def profile(which: str) -> None:
    """Launch each case once within the profiled range, compiled beforehand."""
    cases = {"cosa": block_cases, "pages": page_cases}[which]
    for name, call in zip(CASES[which], cases(torch.device("cuda")), strict=True):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(name, flush=True)


def table(which: str, raw: Path, *origin: str) -> None:
    """Print the counters of a raw page as rows, for each kernel of a case; ``origin`` is device to commit."""
    lines = raw.read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    units, *launches = csv.DictReader(lines[head:])
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow("kernel setting metric value unit device torch triton commit command".split())
    command = f"ncu --set full --profile-from-start off --csv --page raw python tests/kernels/ncu.py {which}"
    inputs = {"cosa": f"{TOKENS} tokens", "pages": f"smollm2-yarn {os.environ.get('LAYER')}, last 8192 queries"}[which]
    case = -1
    for row in launches:
        if CLEARING in row["Kernel Name"]:
            continue
        kernel = re.split("[<(]", re.sub(r"^void |<unnamed>::|\(anonymous namespace\)::", "", row["Kernel Name"]))[0]
        case += kernel != SECOND
        named = dict(METRICS)
        named |= {c: f"stall_{c.removeprefix(STALLS).split('_per_')[0]}" for c in row if c.startswith(STALLS)}
        for column, name in named.items():
            value = float(row[column].replace(",", ""))
            if name.startswith("stall_") and value < 0.2:
                continue
            unit = "warps" if name.startswith("stall_") else units[column]
            setting = f"{CASES[which][case]}, {inputs}"
            out.writerow((kernel, setting, name, f"{value:.6g}", unit, *origin, command))
    assert case == len(CASES[which]) - 1, [row["Kernel Name"] for row in launches]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        profile(sys.argv[1])
    else:
        table(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
