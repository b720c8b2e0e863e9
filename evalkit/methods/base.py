"""What a method is: a small validated dataclass that turns queries and keys into a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from prefill_kernels import BlockPlan, DensePlan, PagedKV
from torch import Tensor

Plan = BlockPlan | DensePlan


@dataclass(frozen=True)
class PlanContext:
    """Where an attention call stands in its prompt.

    Attributes:
        layer: index of the decoder layer.
        q_offset: absolute position of the chunk's first query.
        prompt_len: N, unpadded length of the whole prompt, also for a chunk of it.
        scale: the module's own softmax scaling.
        backend: kernel backend.
    """

    layer: int
    q_offset: int
    prompt_len: int
    scale: float
    backend: str


@dataclass(frozen=True)
class Method(ABC):
    """A sparse-prefill method. Fields are its knobs, named and validated as on the command line."""

    name: ClassVar[str]
    #: Planned block by block with absolute positions, so that a prompt may be cut into chunks.
    chunkable: ClassVar[bool]
    #: Tokens in a query tile; chunk boundaries are multiples of it.
    block_size: int = 128

    @abstractmethod
    def validate(self) -> None:
        """Raise :class:`evalkit.errors.InputError` naming ``method.<field>`` for a value out of range."""

    @abstractmethod
    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> Plan:
        """Choose what each query tile attends to.

        Args:
            q: [1, Hq, Lq, d] queries after RoPE and QK-norm.
            kv: paged keys and values of positions ``0 .. context.q_offset + Lq - 1``.
            context: position in the prompt.
        """

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """QK products the selection itself costs, per layer and query head, in cells."""
        return 0

    def warnings(self, prompt_len: int) -> list[str]:
        """Settings that act differently at this prompt length than they read; stored with each sample."""
        return []
