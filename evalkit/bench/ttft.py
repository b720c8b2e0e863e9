"""Time to first token of a Qwen3-8B-shaped model with random weights: ``python -m evalkit.bench.ttft --out FILE``.

The real transformers class runs one forward over the prompt and keeps the logits of the last position. Attention is
SDPA's flash or cuDNN kernel, or CoSA (proxy, selection and kernel, K and V laid out in pages inside the call).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from prefill_kernels import PagedKV, block_attention, kap_scores, select_blocks
from prefill_kernels.bench import COLUMNS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

STAGE1 = 0.2
PAGE = 128


def dense(backend: SDPBackend) -> Any:
    """An attention function that runs one SDPA kernel."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    return attend


def cosa(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
    """CoSA with a fixed Stage-1 budget and no vote."""
    length = q.shape[2]
    k_pages, v_pages = (x.transpose(1, 2).reshape(-1, PAGE, x.shape[1], x.shape[3]) for x in (k, v))
    table = torch.arange(length // PAGE, dtype=torch.int32, device=q.device)[None]
    kv = PagedKV(k_pages, v_pages, table, length)
    scores = kap_scores(q, kv, stride=8, scale=scaling)
    plan = select_blocks(scores, block_size=128, q_offset=0, q_len=length, prompt_len=length, budget=STAGE1)
    return block_attention(q, kv, plan, scale=scaling)[0].transpose(1, 2), None


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="time to first token of an 8B-shaped model")
    parser.add_argument("--out", type=Path, default=Path("results/h200/benchmarks.csv"))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768, 131072], help="multiples of 128")
    parser.add_argument("--variants", nargs="+", default=["fa2", "cudnn", "cosa"], help="the first is the base")
    parser.add_argument("--repeats", type=int, default=5, help="measured forwards, after one that warms up")
    arguments = parser.parse_args()
    functions = {
        "fa2": dense(SDPBackend.FLASH_ATTENTION),
        "cudnn": dense(SDPBackend.CUDNN_ATTENTION),
        "cosa": cosa,
    }
    for name, function in functions.items():
        AttentionInterface.register(f"bench_{name}", function)
        AttentionMaskInterface.register(f"bench_{name}", lambda *_, **__: None)
    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=1 << 18,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).eval()
    machine = [torch.cuda.get_device_name(), torch.__version__, triton.__version__, arguments.commit]
    command = " ".join(["python -m evalkit.bench.ttft", *sys.argv[1:]])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.out.exists():
        arguments.out.write_text(",".join(COLUMNS) + "\n")
    for tokens in arguments.tokens:
        ids = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")
        base = 0.0
        for name in arguments.variants:
            model.set_attn_implementation(f"bench_{name}")
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            times = []
            with torch.inference_mode():
                for _ in range(1 + arguments.repeats):
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda.synchronize()
                    start.record()
                    logits = model(ids, use_cache=True, logits_to_keep=1).logits
                    stop.record()
                    torch.cuda.synchronize()
                    times.append(start.elapsed_time(stop) / 1e3)
            assert torch.isfinite(logits).all()
            seconds = statistics.median(times[1:])
            base = base or seconds
            peak = torch.cuda.max_memory_allocated() / 2**30
            setting = "Stage-1 20 %, vote off, stride 8" if name == "cosa" else "dense"
            with arguments.out.open("a", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                for metric, value, unit in (
                    ("ttft", seconds, "s"),
                    ("peak_memory", peak, "GiB"),
                    (f"speedup_{arguments.variants[0]}", base / seconds, "ratio"),
                ):
                    if metric == f"speedup_{name}":
                        continue
                    writer.writerow(["ttft", name, tokens, setting, metric, f"{value:.5g}", unit, *machine, command])
            print("ttft", name, tokens, round(seconds, 4), "s", round(base / seconds, 3), f"{peak:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
