"""Where the bytes of a long prefill go: arithmetic on a model's shape, to be compared with measured peaks.

The table of an 8B model at 128K tokens, with perplexity, is ``results/h200/memory.md``; write it again with

    python -m evalkit.report.memory > results/h200/memory.md
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
BF16, FP32 = 2, 4
SCORED_ROWS = 256  # rows of logits that perplexity holds at a time


@dataclass(frozen=True)
class Shape:
    """What of a model decides its memory; the defaults are Qwen3-8B's."""

    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12288
    vocabulary: int = 151936

    @property
    def parameters(self) -> int:
        """Weights of a model with query and key norms and an LM head of its own."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


@dataclass(frozen=True)
class Part:
    """One line of the table.

    Attributes:
        name: what it is.
        how: the arithmetic.
        size: bytes.
    """

    name: str
    how: str
    size: int


def prefill_parts(shape: Shape, tokens: int, chunk: int | None = None) -> list[Part]:
    """What is held at the peak of a prefill in bfloat16, which lies in the MLP of a layer.

    Args:
        shape: the model's.
        tokens: length of the prompt.
        chunk: tokens of a prefill chunk; None = the prompt in one call.
    """
    rows = min(chunk or tokens, tokens)
    return [
        Part("weights", f"{shape.parameters / 1e9:.3f} G x 2 B", BF16 * shape.parameters),
        Part(
            "KV cache",
            f"{tokens} x {shape.layers} layers x 2 x {shape.kv_heads} x {shape.head_dim} x 2 B",
            tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim * BF16,
        ),
        Part(
            "hidden states: embeddings, layer input, residual, normed",
            f"4 x {rows} x {shape.hidden} x 2 B",
            4 * rows * shape.hidden * BF16,
        ),
        Part(
            "MLP: activated gate, up, product",
            f"3 x {rows} x {shape.intermediate} x 2 B",
            3 * rows * shape.intermediate * BF16,
        ),
        Part("RoPE: cos, sin", f"2 x {rows} x {shape.head_dim} x 2 B", 2 * rows * shape.head_dim * BF16),
        Part("cuBLAS workspace", "32 MiB", 32 * 2**20),
    ]


def scoring_parts(shape: Shape, tokens: int) -> list[Part]:
    """What perplexity over all tokens holds after the prefill, with the dense model's states beside it."""
    weights, cache, *_ = prefill_parts(shape, tokens)
    states = tokens * shape.hidden * BF16
    return [
        weights,
        cache,
        Part("final hidden states of the run", f"{tokens} x {shape.hidden} x 2 B", states),
        Part("final hidden states of the dense model (fidelity)", f"{tokens} x {shape.hidden} x 2 B", states),
        Part(
            "logits of a piece: both models, their log-softmax and products",
            f"8 x {SCORED_ROWS} x {shape.vocabulary} x 4 B",
            8 * SCORED_ROWS * shape.vocabulary * FP32,
        ),
    ]


def reference_parts(shape: Shape, tokens: int) -> list[Part]:
    """The peak of computing the dense model's states on the spot, while the sparse run's cache and states are held."""
    _, cache, *_ = prefill_parts(shape, tokens)
    held = [
        Part("KV cache of the sparse run", cache.how, cache.size),
        Part("its final hidden states", f"{tokens} x {shape.hidden} x 2 B", tokens * shape.hidden * BF16),
    ]
    return [*prefill_parts(shape, tokens), *held]


def total(parts: list[Part]) -> float:
    """GiB of all parts together."""
    return sum(part.size for part in parts) / GIB


def markdown(measured: float, scored: float, tokens: int = 131072) -> str:
    """The documented table.

    Args:
        measured: peak of a plain prefill on a GPU, GiB.
        scored: peak of a sparse prefill whose loss and fidelity are taken, the dense states made on the spot.
        tokens: length of the prompt.
    """
    shape = Shape()
    whole = tokens * shape.vocabulary * FP32 / GIB
    chunked = total(prefill_parts(shape, tokens, 8192))
    parts = [
        f"# Memory of a {tokens}-token prefill, 8B shape",
        "Qwen3-8B's shape in bfloat16, one prompt a call, nothing offloaded. `python -m evalkit.report.memory` writes "
        "this page; the measured peaks are in `benchmarks.csv` (random weights; the first of dense attention: a sparse "
        "plan adds its lists of blocks, below 0.1 GiB).",
        "## At the peak of the prefill, in a layer's MLP",
        _table(prefill_parts(shape, tokens)),
        f"Measured: {measured:.2f} GiB. With `execution.chunk_size=8192` the sum is {chunked:.1f} GiB.",
        "## While perplexity is scored, all tokens",
        _table(scoring_parts(shape, tokens)),
        f"The logits of the whole prompt would be {whole:.1f} GiB in float32 and are never made. The peak of a "
        "perplexity cell is therefore that of its prefill.",
        "## When fidelity needs the dense states and they are not on disk",
        _table(reference_parts(shape, tokens)),
        f"Measured: {scored:.2f} GiB (`evalkit bench ttft 'variants=[fa2,harness]' loss=true`, CoSA at 20 %). The "
        "most a perplexity cell holds: it fits one GPU of 80 GB (74.5 GiB). Running the dense twin first leaves its "
        "states on disk and the peak at the first table's; `task.fidelity=false` does too.",
    ]
    return "\n\n".join(parts)


def _table(parts: list[Part]) -> str:
    lines = ["| what | arithmetic | GiB |", "|:--|:--|--:|"]
    lines += [f"| {part.name} | {part.how} | {part.size / GIB:.2f} |" for part in parts]
    return "\n".join([*lines, f"| sum | | {total(parts):.2f} |"])


if __name__ == "__main__":
    print(markdown(measured=46.354, scored=65.354))
