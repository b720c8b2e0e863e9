"""One entry for every kind of plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .fp8 import Fp8KV
from .osk import block_attention
from .page_attention import page_attention
from .paged import PagedKV
from .pages import PagePlan
from .plans import BlockPlan, TileStats
from .vertical_slash import VerticalSlashPlan, vertical_slash_attention


@dataclass(frozen=True)
class HeadwisePlan:
    """Plans for different heads of one layer.

    Attributes:
        parts: plans over all heads with one block size, each with empty lists for the heads that belong to another.
    """

    parts: tuple[BlockPlan | VerticalSlashPlan, ...]

    def check(self) -> None:
        """Raise ValueError unless every part is sound. Reads the plans back to the host."""
        if len({part.block_size for part in self.parts}) != 1:
            raise ValueError("parts: must share one block size")
        for part in self.parts:
            part.check()


SparsePlan = BlockPlan | VerticalSlashPlan | HeadwisePlan | PagePlan


def sparse_attention(
    q: Tensor, kv: PagedKV | Fp8KV, plan: SparsePlan, *, scale: float, backend: str = "auto"
) -> tuple[Tensor, TileStats]:
    """Attend as a plan says, with the kernel for its kind.

    Args:
        q: [B, Hq, Lq, d].
        kv: keys and values; Hkv divides Hq. E4M3 ones go with a :class:`PagePlan` alone.
        plan: of any sparse kind.
        scale: softmax scaling of the model.
        backend: see :func:`prefill_kernels.resolve_backend`; of a :class:`PagePlan` also those of
            :func:`prefill_kernels.page_attention`.

    Returns:
        Output [B, Hq, Lq, d] in the dtype of ``q`` and the :class:`TileStats`; of a :class:`HeadwisePlan` the sum over
        its parts, empty lists giving zeros; of a :class:`PagePlan` they are :class:`PageStats`.

    Raises:
        ValueError: shapes that do not belong together, or ``scale`` is not above 0.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if isinstance(plan, PagePlan):
        return page_attention(q, kv, plan, scale=scale, backend=backend)
    if isinstance(kv, Fp8KV):
        raise ValueError("E4M3 keys and values: only a PagePlan runs on them")
    if isinstance(plan, BlockPlan):
        return block_attention(q, kv, plan, scale=scale, backend=backend)
    if isinstance(plan, VerticalSlashPlan):
        return vertical_slash_attention(q, kv, plan, scale=scale, backend=backend)
    outputs, stats = zip(
        *(sparse_attention(q, kv, part, scale=scale, backend=backend) for part in plan.parts), strict=True
    )

    def added(name: str) -> Tensor:
        return torch.stack([getattr(part, name) for part in stats]).sum(0)

    masked = [part.masked_cells for part in stats if part.masked_cells is not None]
    return sum(outputs[1:], outputs[0]), TileStats(
        visited_cells=added("visited_cells"),
        computed_cells=added("computed_cells"),
        visited_blocks=added("visited_blocks"),
        computed_blocks=added("computed_blocks"),
        backend="+".join(sorted({part.backend for part in stats})),
        masked_cells=torch.stack(masked).sum(0) if masked else None,
    )
