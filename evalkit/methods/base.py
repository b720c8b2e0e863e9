"""What a method is: a small validated dataclass that turns queries and keys into a plan."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from prefill_kernels import Capabilities, DensePlan, PagedKV, SparsePlan, TileStats
from torch import Tensor

from ..errors import InputError

Plan = SparsePlan | DensePlan


@dataclass(frozen=True)
class Knob:
    """The setting through which a method's budget is steered, monotonely: what ``evalkit calibrate`` turns.

    Attributes:
        field: dotted name inside the method, ``select.p`` for ``method.select.p``.
        low, high: range that is searched; the budget is smallest at one end and largest at the other.
        rises: the budget grows with the value.
        scale: how the range is divided: ``linear``, ``log``, or ``tail`` (by the logarithm of 1 - value, for a share
            whose budget rises steeply just below 1).
        high_per_token: ``high`` is a multiple of the prompt length in tokens.
        integer: only whole values.
        table_field: dotted name of the setting that names a table file with one value for each layer and query head
            (see :mod:`evalkit.methods.tables`); None where the method has no such table.
    """

    field: str
    low: float
    high: float
    rises: bool = True
    scale: Literal["linear", "log", "tail"] = "linear"
    high_per_token: bool = False
    integer: bool = False
    table_field: str | None = None


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
    #: What calibration turns; None for a method whose budget no single knob steers.
    knob: ClassVar[Knob | None] = None
    #: Fields (dotted) that name a file: a cell's identity holds the file's content, not its name.
    file_fields: ClassVar[tuple[str, ...]] = ("calibration",)
    #: Tokens in a query tile; chunk boundaries are multiples of it.
    block_size: int = 128
    #: File of ``evalkit calibrate`` that the knob's value is taken from.
    calibration: str | None = None
    #: Budget B that the knob's calibrated value reaches; above 0, below 1.
    budget_target: float | None = None

    @abstractmethod
    def validate(self) -> None:
        """Raise :class:`evalkit.errors.InputError` naming ``method.<field>`` for a value out of range.

        A method checks its own fields and calls this one, which refuses a setting that was given and cannot act.
        """
        for dotted, by in self.inert().items():
            if setting(self, dotted) != default_setting(type(self), dotted):
                raise taken(self, dotted, f"method.{by}={setting(self, by)!r}, beside which it cannot act")

    def inert(self) -> dict[str, str]:
        """Settings (dotted) that cannot act as the method is set, each with the setting that is in their way.

        They must be left at their defaults. By default: the knob where a table holds its values.
        """
        table = self.knob.table_field if self.knob else None
        return {self.knob.field: table} if self.knob and table and setting(self, table) is not None else {}

    @abstractmethod
    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> Plan:
        """Choose what each query tile attends to.

        Args:
            q: [1, Hq, Lq, d] queries after RoPE and QK-norm.
            kv: paged keys and values of positions ``0 .. context.q_offset + Lq - 1``.
            context: position in the prompt.
        """

    @property
    def features(self) -> Capabilities:
        """What this method, as it is set, asks of the kernel that executes its plans.

        By default: a method selects blocks, skips inside the kernel where it has a ``skip_scale`` above 0, and visits
        the blocks out of order where it has an ``order`` that is neither ascending nor descending.
        """
        return Capabilities(
            physical_skip=True,
            in_kernel_skip=getattr(self, "skip_scale", -1.0) > 0,
            page_remap=getattr(self, "order", "ascending") not in ("ascending", "descending"),
        )

    def check_model(self, layers: int, heads: int) -> None:  # noqa: B027 - most methods fit any model
        """Raise :class:`evalkit.errors.InputError` where a setting is for a model of another shape.

        Args:
            layers: decoder layers of the model.
            heads: query heads of each layer.
        """

    def check_device(self, device: torch.device, dtype: torch.dtype, backend: str, page_size: int) -> None:  # noqa: B027
        """Raise :class:`evalkit.errors.InputError` where a named kernel cannot run the method; any can by default.

        Args:
            device, dtype: of the model.
            backend: ``execution.backend``.
            page_size: ``execution.page_size``.
        """

    @property
    def recordable(self) -> bool:
        """Whether plans may hold lists of blocks or pages, which is what ``evalkit capture`` keeps of a selection."""
        return True

    @property
    def chunk_problem(self) -> str | None:
        """Why a prompt cannot be cut into chunks under the method as it is set, or None where it can."""
        return None if self.chunkable else "plans from the whole prompt"

    def estimator_cells(self, q_offset: int, q_len: int) -> int:
        """QK products the selection itself costs, per layer and query head, in cells."""
        return 0

    def kernel_backend(self, backend: str) -> str:
        """The backend that executes this method's plans, where it is not that of the run."""
        return backend

    def work(self, stats: TileStats) -> dict[str, int | Tensor]:
        """What a kernel executed beyond the cells of the budget, by name; a sample's calls are added up.

        Args:
            stats: of one call.

        Returns:
            Counters, scalars on the device of the run or whole numbers, the same names in each call; none by default.
        """
        return {}

    def work_ratios(self, total: Mapping[str, int]) -> dict[str, float]:
        """What the sums of :meth:`work` over a sample say, by name, for its record and the report."""
        return {}

    def warnings(self, prompt_len: int) -> list[str]:
        """Settings that act differently at this prompt length than they read; stored with each sample."""
        return []


def setting(method: Method, dotted: str) -> Any:
    """The value of a (nested) setting."""
    return functools.reduce(getattr, dotted.split("."), method)


def default_setting(cls: type[Any], dotted: str) -> Any:
    """What a (nested) setting is where it is not given."""
    first, _, rest = dotted.partition(".")
    item = next(item for item in dataclasses.fields(cls) if item.name == first)
    made = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return functools.reduce(getattr, rest.split("."), made) if rest else made


def taken(method: Method, dotted: str, beside: str) -> InputError:
    """The error of a setting that was given although something else stands in its place."""
    default = default_setting(type(method), dotted)
    shown = "null" if default is None else f"{default}, its default,"
    return InputError(f"method.{dotted}", setting(method, dotted), f"{shown} with {beside}")


def skip_warnings(skip_scale: float, prompt_len: int) -> list[str]:
    """Report a skip threshold delta/N that is clamped, or so high that it says little about a method."""
    ratio = skip_scale / prompt_len
    if ratio > 1:
        return [f"delta/N = {ratio:.2f} clamped to 1 (skip_scale={skip_scale:g}, N={prompt_len})"]
    if ratio > 0.5:
        return [f"delta/N = {ratio:.2f} above 0.5 (skip_scale={skip_scale:g}, N={prompt_len})"]
    return []
