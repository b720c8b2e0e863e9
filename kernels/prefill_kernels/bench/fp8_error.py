"""The error of FP8 attention on captured Q, K and V, which synthetic normal ones understate: runs on any device.

The torch backend is measured: it rounds what the kernels round, and takes any number of heads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..fp8 import quantize_kv, quantize_rows
from ..page_attention import attend_pages, page_attention
from ..paged import PagedKV
from ..pages import PagePlan
from .captures import CapturedLayer, captured_layers
from .config import BenchError
from .rows import Rows

VARIANT = "fp8_error"
QUERIES = 1024
"""Most queries of a layer that are compared, its last: the reference computes every logit."""


def measurable(paths: Iterable[str], queries: int) -> list[CapturedLayer]:
    """Layers that have Q, K and V, of files that are measured for nothing else.

    Args:
        paths: of captures.
        queries: as of :func:`run`.

    Raises:
        BenchError: a file has none of them, or nothing is selected under a KV head: the error of nothing would be 0.
    """
    found = []
    for path in paths:
        layers = [layer for layer in captured_layers(path) if layer.tensors() is not None]
        if not layers:
            raise BenchError("captures", path, "a file of evalkit capture capture.tensors=true (it has no Q, K and V)")
        for layer in layers:
            for head in range(layer.pages.shape[1]):
                layer.check_selects(head, min(queries, QUERIES))
        found += layers
    return found


def run(layers: Iterable[CapturedLayer], rows: Rows, device: torch.device, queries: int = QUERIES) -> None:
    """One row set a layer that has Q, K and V, over all its heads; others are passed over.

    Args:
        layers: of any captures.
        rows: where numbers go, under bench ``pageweaver``.
        device: where they are computed.
        queries: most of the last queries, themselves at most :data:`QUERIES`.
    """
    for layer in layers:
        if (tensors := layer.tensors()) is None:
            continue
        count = min(queries, QUERIES, len(layer.positions))
        q, k, _ = tensors
        setting = ", ".join(
            [
                f"{layer.model} {layer.tokens}/{layer.layer}",
                f"last {count} queries",
                f"captured Q, K, V, {q.shape[1]} heads on {k.shape[1]} KV heads, d {q.shape[2]}",
                f"page {layer.page_size}, top {layer.pages.shape[2]}",
                "fp8 KV",
                "torch",
            ]
        )
        rows.add("pageweaver", VARIANT, layer.tokens, setting, **fp8_errors(layer, *tensors, count, device))


def fp8_errors(
    layer: CapturedLayer, q: Tensor, k: Tensor, v: Tensor, queries: int, device: torch.device
) -> dict[str, float]:
    """Relative L2 distances of the last queries' outputs.

    Args:
        layer: pages, positions and scale.
        q: [L, Hq, d].
        k, v: [L, Hkv, d].
        queries: how many of the layer's last.
        device: where to compute.

    Returns:
        ``rel_err``: FP8 attention from float32 on the dequantised keys and values; ``worst_head_err``: that of the
        worst head; ``query_err``: the part that rounding Q leaves when all else is float32; ``quantization_err``:
        float32 on dequantised from float32 on given keys and values, all as in the other rows of this bench.
    """
    positions = layer.positions[-queries:]
    plan = PagePlan(
        pages=layer.pages[None, -queries:].to(device).contiguous(),
        page_size=layer.page_size,
        positions=positions.to(device),
        kv_lens=torch.tensor([layer.tokens], dtype=torch.int32, device=device),
        cu_seqlens=(0, len(positions)),
        max_kv_len=layer.tokens,
        kv_dtype="fp8",
    )
    q = q[positions.long()].transpose(0, 1)[None].to(device)
    k, v = (x.transpose(0, 1)[None].to(device) for x in (k, v))
    quantized = quantize_kv(PagedKV.from_dense(k, v, layer.page_size))
    given = PagedKV.from_dense(k.float(), v.float(), layer.page_size)

    numbers, scales = quantize_rows(q)
    out, _ = page_attention(q, quantized, plan, scale=layer.scale, backend="torch", stats=False)
    rounded = attend_pages(numbers.float() * scales, quantized, plan, layer.scale)
    expected = attend_pages(q.float(), quantized, plan, layer.scale)
    exact = attend_pages(q.float(), given, plan, layer.scale)
    return {
        "rel_err": distance(out.float(), expected),
        "worst_head_err": max(distance(a.float(), b) for a, b in zip(out[0], expected[0], strict=True)),
        "query_err": distance(rounded, expected),
        "quantization_err": distance(expected, exact),
    }


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance of ``a`` from ``b``."""
    return float((a - b).norm() / b.norm().clamp(min=1e-20))
