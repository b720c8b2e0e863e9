"""One launch of each case of CoSA's kernels for Nsight Compute, in the order of :data:`CASES`.

ncu --set full --profile-from-start off --csv --page raw --log-file raw.csv python tests/kernels/ncu.py
python tests/kernels/ncu.py raw.csv COMMIT > results/h200/profiles/osk_32k.csv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from prefill_kernels import BlockPlan, block_attention, kap_scores
from prefill_kernels.bench.check import every_block
from prefill_kernels.bench.config import BLOCK
from prefill_kernels.bench.inputs import Inputs, Shape, from_dense, synthetic
from prefill_kernels.bench.measure import Bench, bisect_scale

TOKENS = 32768
CASES = (
    "attention, all blocks, vote off",
    "attention, all blocks, vote, none skipped",
    "proxy, stride 8",
    "attention, Stage-1 29 % to B 20 %",
    "attention, the same lists, vote off",
    "attention, all blocks visited, all but one a row skipped",
)
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
PROXY = ("sample_kernel", "kap_kernel")
STALLS = "smsp__average_warps_issue_stalled_"
"""Stall reasons: warps that wait for a reason, at each cycle that issues an instruction."""


class NoRows:
    """Takes the place of a benchmark's rows, which are not wanted here."""

    def add(self, *args: object, **values: object) -> None:
        """Drop a row."""


def cases(device: torch.device) -> Iterator[Callable[[], object]]:
    """The calls, in the order of :data:`CASES`."""

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


def profile() -> None:
    """Launch each case once within the profiled range, compiled beforehand."""
    for name, call in zip(CASES, cases(torch.device("cuda")), strict=True):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(name, flush=True)


def table(raw: Path, *origin: str) -> None:
    """Print the counters of a raw page as rows, for each kernel of a case; ``origin`` is device to commit."""
    lines = raw.read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    units, *launches = csv.DictReader(lines[head:])
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow("kernel setting metric value unit device torch triton commit command".split())
    command = "ncu --set full --profile-from-start off --csv --page raw python tests/kernels/ncu.py"
    case = -1
    for row in launches:
        kernel = row["Kernel Name"].split("(")[0]
        case += kernel != PROXY[1]  # the proxy gathers its samples in a launch of its own
        named = dict(METRICS)
        named |= {c: f"stall_{c.removeprefix(STALLS).split('_per_')[0]}" for c in row if c.startswith(STALLS)}
        for column, name in named.items():
            value = float(row[column].replace(",", ""))
            if name.startswith("stall_") and value < 0.2:
                continue
            unit = "warps" if name.startswith("stall_") else units[column]
            setting = f"{CASES[case]}, {TOKENS} tokens"
            out.writerow((kernel, setting, name, f"{value:.6g}", unit, *origin, command))
    assert case == len(CASES) - 1, [row["Kernel Name"] for row in launches]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        profile()
    else:
        table(Path(sys.argv[1]), *sys.argv[2:])
