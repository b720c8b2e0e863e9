"""CoSA's Ordered-Skipping Kernel: attention over an ordered list of key blocks (Algorithm A, lines 6-22)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .backends import choose_backend, hopper_problem, triton_refusal
from .capabilities import provides
from .checks import check_operands
from .paged import PagedKV
from .plans import BlockPlan, TileStats


@provides(physical_skip=True, in_kernel_skip=True, page_remap=True)
def block_attention(
    q: Tensor, kv: PagedKV, plan: BlockPlan, *, scale: float, backend: str = "auto"
) -> tuple[Tensor, TileStats]:
    """Visit each tile's blocks in the given order with an online softmax, skipping by exact logits.

    A visited block is skipped when for every voting row ``m_loc - m < ln(delta / N)`` (equation 5), ``m`` being the
    running maximum after the block. Rows beyond the sequence and rows with no causal key in the block do not vote;
    the first visited block is never skipped; a skipped block changes nothing. A tile with an empty list gives zeros.

    Args:
        q: [B, Hq, Lq, d].
        kv: keys and values of positions ``0 .. plan.kv_len - 1``; Hkv divides Hq.
        plan: the ordered block lists.
        scale: softmax scaling of the model.
        backend: see :func:`prefill_kernels.resolve_backend`.

    Returns:
        Output [B, Hq, Lq, d] in the dtype of ``q`` and the :class:`TileStats` of what was done. The reference backend
        accumulates in float32, or in float64 when ``q`` is.

    Raises:
        ValueError: shapes or geometry of ``q``, ``kv`` and ``plan`` do not belong together, or ``scale`` is not finite
            and above 0. What the lists hold is not read: see :meth:`BlockPlan.check`.
        BackendUnavailable: a backend asked for by name cannot run the call.
    """
    if q.shape[2] != plan.q_len or kv.kv_len != plan.kv_len:
        raise ValueError(f"q_len={q.shape[2]}, kv_len={kv.kv_len}: the plan is for {plan.q_len} and {plan.kv_len}")
    if plan.order.shape[:2] != q.shape[:2]:
        raise ValueError(f"plan.order {tuple(plan.order.shape)}: must lead with [B, Hq] = {tuple(q.shape[:2])}")
    plan.check_geometry()
    plan.check_lists(q.device)
    check_operands(q, kv, scale=scale, q_offset=plan.q_offset, block_size=plan.block_size)

    def hopper_refusal() -> str | None:
        return hopper_problem(q.device) or triton_refusal("hopper_osk", q, kv, plan)()

    refusals = {"hopper": hopper_refusal, "triton": triton_refusal("triton_osk", q, kv, plan)}
    chosen = choose_backend("attention", backend, q.device, refusals)
    if chosen == "hopper":
        from .hopper_osk import osk_hopper

        out, stats = osk_hopper(q, kv, plan, scale)
        return out, replace(stats, backend=chosen)
    if chosen == "triton":
        from .triton_osk import osk_triton

        out, stats = osk_triton(q, kv, plan, scale)
        return out, replace(stats, backend=chosen)
    return _osk_torch(q, kv, plan, scale)


def _osk_torch(q: Tensor, kv: PagedKV, plan: BlockPlan, scale: float) -> tuple[Tensor, TileStats]:
    """All tiles of all heads at once, one batched product a visiting step.

    Tiles are sorted by list length, so that the tiles still active at a step are a prefix.
    """
    batch, q_heads, q_len, dim = q.shape
    kv_heads, size = kv.num_kv_heads, plan.block_size
    tiles, blocks = plan.order.shape[2], -(-plan.kv_len // size)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32

    def to_blocks(x: Tensor, count: int) -> Tensor:  # [B, H, L, d] -> [B*H*count, size, d], zero padded
        padded = x.new_zeros(*x.shape[:2], count * size, dim, dtype=compute)
        padded[:, :, : x.shape[2]] = x
        return padded.view(-1, size, dim)

    k_dense, v_dense = kv.gather()
    k_blocks, v_blocks = to_blocks(k_dense, blocks), to_blocks(v_dense, blocks)

    counts = plan.count.flatten().long()
    counts, rank = counts.sort(descending=True, stable=True)
    queries = to_blocks(q, tiles)[rank]
    order = plan.order.flatten(0, 2)[rank].long()
    head = rank // tiles
    block_base = (head // q_heads * kv_heads + head % q_heads // (q_heads // kv_heads)) * blocks
    tile = plan.first_tile + rank % tiles
    rows = plan.tile_rows()[rank % tiles]
    beyond_sequence = torch.arange(size, device=q.device) >= rows[:, None]
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)

    running_max = q.new_full((len(rank), size), float("-inf"), dtype=compute)
    denominator = q.new_zeros(len(rank), size, dtype=compute)
    output = torch.zeros_like(queries)
    computed = torch.zeros_like(order, dtype=torch.bool)

    steps = int(counts[0]) if len(counts) else 0
    for step in range(steps):
        active = int((counts > step).sum())
        block = order[:active, step]
        source = block_base[:active] + block
        logits = torch.bmm(queries[:active], k_blocks[source].mT) * scale
        on_diagonal = (block == tile[:active]).nonzero().flatten()
        logits[on_diagonal] = logits[on_diagonal].masked_fill(future, float("-inf"))
        local_max = logits.amax(-1)
        new_max = torch.maximum(running_max[:active], local_max)

        # A slice keeps every block in place; an index picks the tiles whose vote let the block live.
        live: slice | Tensor = slice(0, active)
        if plan.log_threshold is not None and step > 0:
            abstain = beyond_sequence[:active] | (local_max == float("-inf"))
            gap = (local_max - new_max).masked_fill_(abstain, float("-inf"))
            # Written as "not below" so that NaN logits stay in and show in the output.
            live = (~(gap.amax(-1) < plan.log_threshold)).nonzero().flatten()
        computed[live, step] = True

        new_max = new_max[live]
        weights = logits[live].sub_(new_max[..., None]).exp_()
        decay = (running_max[live] - new_max).exp_()
        running_max[live] = new_max
        denominator[live] = decay * denominator[live] + weights.sum(-1)
        output[live] = output[live].mul_(decay[..., None]).baddbmm_(weights, v_blocks[source[live]])

    # An empty list leaves a zero denominator: its output is zero, not 0/0.
    output /= denominator.masked_fill(denominator == 0, 1.0)[..., None]
    unsort = rank.argsort()
    out = output[unsort].view(batch, q_heads, tiles * size, dim)[:, :, :q_len].to(q.dtype)
    return out, _stats(plan, computed[unsort].view(plan.order.shape))


def _stats(plan: BlockPlan, computed: Tensor) -> TileStats:
    cells, listed = plan.block_cells(), plan.order >= 0
    return TileStats(
        visited_cells=cells.sum(-1),
        computed_cells=(cells * computed).sum(-1),
        visited_blocks=listed.sum(-1),
        computed_blocks=(listed & computed).sum(-1),
        computed=computed,
    )
