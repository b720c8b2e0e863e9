"""Settings of ``evalkit capture``, validated before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prefill_kernels.bench.config import BLOCK

from .config import DEVICES, ModelConfig, PerplexityConfig
from .errors import InputError, near_matches


@dataclass(frozen=True)
class CaptureConfig:
    """What is recorded of dense prefills over one window of text a length.

    Attributes:
        lengths: tokens of the windows, one file each.
        layers: layers to keep, of every length; none named = three, early to late.
        layers_at: layers by length, in place of ``lengths`` and ``layers``; the command line adds to a set's.
        tensors: keep Q, K and V after RoPE.
        queries: keep the selected pages of the last queries alone, of a chunk that long; None = of all.
        corpus, text_field: as of the perplexity task; its first window is taken.
        device: where the model runs.
        out: directory of the files, ``<model>-<length>.safetensors``.
    """

    lengths: tuple[int, ...] = (8192,)
    layers: tuple[int, ...] = ()
    layers_at: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tensors: bool = True
    queries: int | None = None
    corpus: str = "essays"
    text_field: str = "text"
    device: str = "auto"
    out: str = "captures"

    @property
    def wanted(self) -> dict[int, tuple[int, ...]]:
        """Layers by length; none named = a spread of the model's."""
        return dict(sorted(self.layers_at.items())) if self.layers_at else dict.fromkeys(self.lengths, self.layers)

    def window(self, length: int) -> PerplexityConfig:
        """The text of a length as the perplexity task takes it."""
        return PerplexityConfig(corpus=self.corpus, text_field=self.text_field, length=length, limit=1)

    def validate(self, model: ModelConfig, *, selects: bool) -> None:
        """Raise InputError on the first bad value.

        Args:
            model: validated model.
            selects: a method's selections are recorded.
        """
        if self.layers_at and self.layers:
            raise InputError("capture.layers", list(self.layers), "none where capture.layers_at names them by length")
        if self.layers_at and self.lengths != CaptureConfig.lengths:
            allowed = f"not set where capture.layers_at names {sorted(self.layers_at)} with their layers"
            raise InputError("capture.lengths", list(self.lengths), allowed)
        least = BLOCK if self.tensors else 16
        lengths = "capture.layers_at" if self.layers_at else "capture.lengths"
        _each(lengths, list(self.wanted), least, f"token counts of at least {least}, each once")
        _each("capture.layers", self.layers, 0, "layer numbers from 0, each once", empty=True)
        for length, layers in self.layers_at.items():
            _each("capture.layers_at", layers, 0, f"layer numbers from 0, each once, at {length} tokens")
        for length in self.wanted:
            try:
                self.window(length).validate()
                model.rope_factor(length)
            except InputError as error:  # settings of the perplexity task go by other names here
                name = error.field.removeprefix("task.")
                raise InputError(
                    lengths if name == "length" else f"capture.{name}", error.value, error.allowed
                ) from None
        if not (self.tensors or selects):
            raise InputError("capture.tensors", False, "true, or method=<name>: nothing would be recorded")
        if self.queries is not None and self.queries < 1:
            raise InputError("capture.queries", self.queries, "1 or more, or null")
        if self.device not in DEVICES:
            raise InputError("capture.device", self.device, near_matches(self.device, DEVICES))

    def check_model(self, layers: int, name: str) -> None:
        """Raise InputError where a named layer is none of a model's.

        Args:
            layers: how many it has.
            name: its name.
        """
        allowed = f"below {layers}, the layers of {name}"
        for length, wanted in self.layers_at.items():
            if max(wanted) >= layers:
                raise InputError("capture.layers_at", {length: list(wanted)}, allowed)
        if max(self.layers, default=0) >= layers:
            raise InputError("capture.layers", list(self.layers), allowed)


def _each(field_name: str, values: Iterable[int], least: int, allowed: str, *, empty: bool = False) -> None:
    given = list(values)
    if not (given or empty) or len(set(given)) != len(given) or any(value < least for value in given):
        raise InputError(field_name, given, allowed)
