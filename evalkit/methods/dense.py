"""The dense twin: torch's SDPA over every causal key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from prefill_kernels import Capabilities, DensePlan, PagedKV
from torch import Tensor

from ..errors import InputError
from .base import Method, PlanContext


@dataclass(frozen=True)
class Dense(Method):
    """Full causal attention, the run every sparse cell is compared with."""

    name: ClassVar[str] = "dense"
    chunkable: ClassVar[bool] = True

    def validate(self) -> None:
        """There is nothing to set; two spellings of one dense run would make two twins."""
        if self.block_size != 128:
            raise InputError("method.block_size", self.block_size, "128: dense has no blocks to choose")
        super().validate()

    @property
    def features(self) -> Capabilities:
        """Nothing is left out."""
        return Capabilities()

    @property
    def recordable(self) -> bool:
        """Nothing is selected."""
        return False

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> DensePlan:
        """Attend to everything."""
        return DensePlan(reason="method")
