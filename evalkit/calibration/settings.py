"""Settings of ``evalkit calibrate``, validated before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from ..config import CORPORA, CORPUS_SUFFIXES
from ..errors import InputError, near_matches

MEASURES = ("B", "B_block", "B_stage1", "B_stage1_block", "B_cost")
"""Budgets that can be a target, as a sample's record names them."""

CLOSE = 0.01
"""A target is reached within one point of budget or recall."""


@dataclass(frozen=True)
class Target:
    """What one calibrated value has to reach at one length.

    Attributes:
        length: tokens of the prompts.
        kind: ``budget`` or ``recall``.
        value: the budget or the recall, above 0, below 1.
    """

    length: int
    kind: str
    value: float


@dataclass(frozen=True)
class CalibrateConfig:
    """What is searched, and on what text.

    Attributes:
        lengths: prompt lengths in tokens; each is calibrated to every target.
        budgets: target budgets.
        recalls: target recalls: the share of the true attention mass in the blocks that the method visits.
        budget_at: one target budget a length, in place of ``lengths`` x ``budgets``. With ``lengths`` and no other
            target these lengths alone are searched, each to the budget of the longest length of the table that is not
            longer, or of its shortest.
        measure: which budget is meant; ``method.budget_target`` finds entries of ``B`` alone.
        per_head: search a table with one value for each layer and query head, of equal recall in all of them.
        text: ``essays`` or a local .txt, .json or .jsonl file; its second half is calibrated on.
        text_field: field that holds the text in JSON.
        windows: windows of each length.
        tolerance: distance from the target at which the search stops.
        steps: most values that are tried for a target.
    """

    lengths: tuple[int, ...] = ()
    budgets: tuple[float, ...] = ()
    recalls: tuple[float, ...] = ()
    budget_at: dict[int, float] = field(default_factory=dict)
    measure: str = "B"
    per_head: bool = False
    text: str = "essays"
    text_field: str = "text"
    windows: int = 16
    tolerance: float = 0.0025
    steps: int = 12

    @property
    def targets(self) -> list[Target]:
        """Everything that is asked for, by length."""
        kinds = [("budget", value) for value in self.budgets] + [("recall", value) for value in self.recalls]
        crossed = [Target(length, kind, value) for length in self.lengths for kind, value in kinds]
        of_table = () if not self.budget_at else self.lengths if self.lengths and not kinds else tuple(self.budget_at)
        single = [Target(length, "budget", self._of_table(length)) for length in of_table]
        return sorted({*crossed, *single}, key=lambda t: (t.length, t.kind, t.value))

    def _of_table(self, length: int) -> float:
        """The budget that ``budget_at`` has for a length."""
        return self.budget_at[max((key for key in self.budget_at if key <= length), default=min(self.budget_at))]

    def validate(self) -> None:
        """Raise InputError on the first bad value."""
        if self.lengths and not (self.budgets or self.recalls or self.budget_at):
            raise InputError("calibrate.budgets", list(self.budgets), "at least one target for calibrate.lengths")
        if not self.targets:
            raise InputError(
                "calibrate.lengths", list(self.lengths), "lengths with budgets or recalls, or calibrate.budget_at"
            )
        for target in self.targets:
            if target.length < 16:
                raise InputError("calibrate.lengths", target.length, "at least 16 tokens")
            if not (math.isfinite(target.value) and 0 < target.value < 1):
                raise InputError(f"calibrate.{target.kind}s", target.value, "above 0, below 1")
        if self.measure not in MEASURES:
            raise InputError("calibrate.measure", self.measure, near_matches(self.measure, MEASURES))
        if self.windows < 1:
            raise InputError("calibrate.windows", self.windows, "at least 1")
        if not 0 < self.tolerance <= CLOSE:
            raise InputError("calibrate.tolerance", self.tolerance, f"above 0, at most {CLOSE:g}")
        if self.steps < 2:
            raise InputError("calibrate.steps", self.steps, "at least 2")
        if self.text not in CORPORA:
            path = Path(self.text).expanduser()
            allowed = f"{', '.join(CORPORA)} or a local file ending in {', '.join(CORPUS_SUFFIXES)}"
            if path.suffix not in CORPUS_SUFFIXES or not path.is_file():
                raise InputError("calibrate.text", self.text, allowed)
