"""Sink and window, the same for every head: the pattern of StreamingLLM (Xiao et al. 2024), in whole blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from prefill_kernels import BlockPlan, PagedKV, sink_window_plan
from torch import Tensor

from ..errors import InputError
from .base import Knob, Method, PlanContext


@dataclass(frozen=True)
class Streaming(Method):
    """The first blocks of the prompt and the last ones before each tile.

    Sizes are in blocks, not tokens: with a window of w blocks of b tokens a query sees its last (w - 1) b + 1 to w b
    tokens, by its place in its tile.

    Attributes:
        block_size: tile and key block, tokens.
        sink_blocks: blocks from the start of the prompt.
        window_blocks: blocks up to the diagonal block, which is one of them.
    """

    name: ClassVar[str] = "streaming"
    chunkable: ClassVar[bool] = True
    #: Up to the blocks of 64 tokens that a prompt has: a window that holds all of them is dense.
    knob: ClassVar[Knob | None] = Knob("window_blocks", 1.0, 1.0 / 64, high_per_token=True, integer=True)

    sink_blocks: int = 1
    window_blocks: int = 8

    def validate(self) -> None:
        """Check every field."""
        if self.block_size not in (64, 128):
            raise InputError("method.block_size", self.block_size, "64 or 128 tokens")
        if self.sink_blocks < 0:
            raise InputError("method.sink_blocks", self.sink_blocks, "0 or more blocks")
        if self.window_blocks < 1:
            raise InputError(
                "method.window_blocks", self.window_blocks, "1 or more blocks: the diagonal is one of them"
            )
        super().validate()

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> BlockPlan:
        """Sink and window of each tile."""
        return sink_window_plan(
            q.shape[1],
            sink_blocks=self.sink_blocks,
            window_blocks=self.window_blocks,
            block_size=self.block_size,
            q_offset=context.q_offset,
            q_len=q.shape[2],
            prompt_len=context.prompt_len,
            device=q.device,
        )
