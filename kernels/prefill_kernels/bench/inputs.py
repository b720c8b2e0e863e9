"""What is measured on: synthetic inputs of the 8B shape, and Q, K and V captured from a model."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..paged import PagedKV
from .config import BLOCK, BenchError

L2_BYTES = 192 << 20
"""Inputs taken in turn are together as large: several times the L2 of any GPU, so that a call finds none of its own."""
FORMAT = "prefill-capture-1"


@dataclass(frozen=True)
class Shape:
    """Heads of a model's attention."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


@dataclass(frozen=True)
class Inputs:
    """One attention call's inputs.

    Attributes:
        q: [1, Hq, L, d], a transposed [1, L, Hq, d] as transformers hands it over.
        kv: the same keys and values in shuffled pages of 128 tokens.
        k, v: [1, Hkv, L, d].
        scale: softmax scaling.
        name: what they are, for settings of rows; empty for synthetic ones.
        layer: of the model they were captured from; 0 for synthetic ones.
    """

    q: Tensor
    kv: PagedKV
    k: Tensor
    v: Tensor
    scale: float
    name: str = ""
    layer: int = 0

    @property
    def tokens(self) -> int:
        """L."""
        return self.q.shape[2]

    @property
    def bytes(self) -> int:
        """Bytes that a sparse call may read."""
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v))


def from_dense(q: Tensor, k: Tensor, v: Tensor, scale: float, seed: int, name: str = "", layer: int = 0) -> Inputs:
    """Inputs from Q [1, L, Hq, d] and K, V [1, L, Hkv, d]; pages are shuffled, and zero beyond the sequence."""
    tokens, pages = k.shape[1], math.ceil(k.shape[1] / BLOCK)
    places = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(k.device)

    def pool(x: Tensor) -> Tensor:
        padded = x.new_zeros(pages * BLOCK, *x.shape[2:])
        padded[:tokens] = x[0]
        laid_out = torch.empty_like(padded).view(pages, BLOCK, *x.shape[2:])
        laid_out[places] = padded.view_as(laid_out)
        return laid_out

    kv = PagedKV(pool(k), pool(v), places.int()[None], tokens)
    return Inputs(q.transpose(1, 2), kv, k.transpose(1, 2), v.transpose(1, 2), scale, name, layer)


def prefix(one: Inputs, tokens: int, seed: int = 0) -> Inputs:
    """The first tokens alone: under causal attention what a model would have given for the shorter prompt."""
    q, k, v = (x[:, :, :tokens].transpose(1, 2).clone() for x in (one.q, one.k, one.v))
    return from_dense(q, k, v, one.scale, seed, one.name, one.layer)


def synthetic(
    shape: Shape,
    tokens: int,
    seed: int,
    *,
    sigma: float = 0.0,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    """Standard normal inputs. With ``sigma`` key blocks differ, alike for all rows, so that a tile can agree on a skip.

    One query channel is then held at 4 and each key block lifted by a normal deviate times ``sigma``, in logits.
    """
    g = torch.Generator(device=device).manual_seed(seed)
    normal = functools.partial(torch.randn, device=device, dtype=dtype, generator=g)
    q = normal(1, tokens, shape.heads, shape.dim)
    k, v = normal(1, tokens, shape.kv_heads, shape.dim), normal(1, tokens, shape.kv_heads, shape.dim)
    scale = shape.dim**-0.5
    if sigma:
        q[..., 0] = 4.0
        lift = torch.randn(math.ceil(tokens / BLOCK), shape.kv_heads, device=device, generator=g) * sigma / (4 * scale)
        k[0, :, :, 0] = lift.repeat_interleave(BLOCK, 0)[:tokens].to(dtype)
    return from_dense(q, k, v, scale, seed)


def synthetic_sets(
    shape: Shape, tokens: int, seed: int, device: torch.device, dtype: torch.dtype, sigma: float = 0.0
) -> list[Inputs]:
    """As many synthetic inputs as together leave the L2 cache behind (on a CPU, one)."""
    first = synthetic(shape, tokens, seed, sigma=sigma, device=device, dtype=dtype)
    more = range(1, rotation(first.bytes, device))
    return [first, *(synthetic(shape, tokens, seed + i, sigma=sigma, device=device, dtype=dtype) for i in more)]


def rotation(size: int, device: torch.device) -> int:
    """How many inputs of ``size`` bytes to take in turn."""
    return max(1, math.ceil(L2_BYTES / size)) if device.type == "cuda" else 1


def captured(path: str | Path, device: torch.device, seed: int = 0) -> list[Inputs]:
    """Inputs of each layer of a capture, repeated until they leave the L2 cache behind.

    The file is what ``evalkit bench capture`` writes: tensors ``layer.<n>.q`` [L, Hq, d], ``.k`` and ``.v``
    [L, Hkv, d] after RoPE, and metadata ``format``, ``model`` and ``scaling`` (a JSON object, softmax scaling by
    layer).

    Raises:
        BenchError: not such a file, or safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise BenchError("inputs", str(path), f"reading captures needs the safetensors package ({error})") from None
    sets = []
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise BenchError("inputs", str(path), f"a file of evalkit bench capture (format {FORMAT})")
            for layer, scale in json.loads(metadata["scaling"]).items():
                q, k, v = (file.get_tensor(f"layer.{layer}.{name}")[None] for name in "qkv")
                if q.dtype not in (torch.bfloat16, torch.float16):
                    raise BenchError("inputs", str(path), f"a capture in bfloat16 or float16, not {q.dtype}")
                sets.append(from_dense(q, k, v, float(scale), seed, metadata["model"], int(layer)))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, BenchError):
            raise
        raise BenchError("inputs", str(path), f"a readable capture ({error})") from None
    if not sets:
        raise BenchError("inputs", str(path), "a capture of at least one layer")
    copies = rotation(sum(one.bytes for one in sets), device)
    return sets + [_clone(one) for _ in range(copies - 1) for one in sets]


def _clone(one: Inputs) -> Inputs:
    kv = PagedKV(one.kv.k_pages.clone(), one.kv.v_pages.clone(), one.kv.page_table.clone(), one.kv.kv_len)
    # Strides are part of what a kernel sees.
    q, k, v = (x.transpose(1, 2).clone().transpose(1, 2) for x in (one.q, one.k, one.v))
    return Inputs(q, kv, k, v, one.scale, one.name, one.layer)
