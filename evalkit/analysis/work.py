"""What analyses of a model share: prompts, a dense model with a look at each layer, and parts that survive a kill."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch
from prefill_kernels import DensePlan, PagedKV, resolve_backend
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import Session, check_supported
from ..benchmarks import ruler
from ..benchmarks.perplexity import ids_sha256
from ..corpora import Corpora
from ..errors import InputError, StoreError
from ..identity import device_facts, provenance, versions
from ..methods.base import PlanContext
from ..methods.dense import Dense
from ..models.loading import load_config, load_model, load_tokenizer, locate, resolve_device, resolve_dtype
from ..prompts import PromptRenderer
from ..store import canonical_json
from .settings import PromptAnalysis, plain_settings

Look = Callable[[Tensor, PagedKV, PlanContext], None]
"""Called at each layer with queries [1, Hq, L, d], the KV and where the call stands."""

NOT_MEASURED = ("out", "samples", "tasks", "shown", "device")
"""Settings that change no part: a part is one prompt's, and its name says which."""


@dataclass(frozen=True)
class Prompt:
    """One needle prompt.

    Attributes:
        task, index: which RULER sample it is.
        ids: token ids.
    """

    task: str
    index: int
    ids: list[int]

    @property
    def name(self) -> str:
        """For progress lines and files."""
        return f"{self.task}-{self.index}"


class Probe:
    """Runs dense and lets someone look at the inputs of every layer.

    Args:
        look: called before a layer attends.
    """

    name = "dense"

    def __init__(self, look: Look) -> None:
        self._dense, self._look = Dense(), look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dense, name)

    def plan(self, q: Tensor, kv: PagedKV, context: PlanContext) -> DensePlan:
        """Attend to everything."""
        self._look(q, kv, context)
        return DensePlan("method")


class Parts:
    """Parts of an analysis on disk, one Parquet file each; a part is there whole or not at all.

    Args:
        out: directory of the analysis.
        name: of the analysis.
        identity: everything that can change a part; another identity has another folder.
    """

    def __init__(self, out: Path, name: str, identity: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]
        self.root = out / f"{name}.work"
        self.folder = self.root / digest

    def get(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """The part of this name; made and kept where it is missing."""
        file = self.folder / f"{name}.parquet"
        if not self.has(name):
            scratch = file.with_suffix(f".{os.getpid()}")
            make().to_parquet(scratch, index=False)
            os.replace(scratch, file)
        return pd.read_parquet(file)

    def has(self, name: str) -> bool:
        """Whether the part is there."""
        return (self.folder / f"{name}.parquet").exists()

    @contextmanager
    def locked(self) -> Iterator[Parts]:
        """Let one process work on the analysis.

        Raises:
            InputError: the directory cannot be written to.
            StoreError: another process is at it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = open(self.root / ".lock", "w")  # noqa: SIM115 - closed below
        except OSError as error:
            raise InputError("out", str(self.root.parent), f"a directory to write to ({error.strerror})") from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(f"{self.root}: another process is at this analysis") from None
            yield self


class Workbench:
    """The model, the prompts and the parts of one analysis. The model is loaded when a part is missing.

    Args:
        settings: validated settings.
        name: of the analysis.
        command: the command that reproduces it.
        modules: those whose code measures: their content is part of the identity.
        more: further sections of the identity: what decides a part and is not in the settings.

    Raises:
        InputError: the device is not there.
    """

    def __init__(
        self,
        settings: PromptAnalysis,
        name: str,
        command: str,
        modules: Sequence[ModuleType],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings, self.name, self.command = settings, name, command
        self.out = Path(settings.out).expanduser()
        self.device = resolve_device(settings.device, "device")
        self.dtype = resolve_dtype(settings.model.dtype, self.device)
        self.backend = resolve_backend(settings.backend, self.device, self.dtype)
        self.source = locate(settings.model)
        self.tokenizer = load_tokenizer(self.source, settings.model)
        self.renderer = PromptRenderer(self.tokenizer, chat=settings.model.chat, thinking=settings.model.thinking)
        asked = plain_settings(settings)
        self.identity: dict[str, Any] = {
            "settings": {key: value for key, value in asked.items() if key not in NOT_MEASURED},
            "weights": self.source.checksum,
            "prompt": self.renderer.fingerprint,
            "dtype": str(self.dtype),
            "backend": self.backend,
            "device": device_facts(self.device),
            "versions": versions(),
            "analysis": hashlib.sha256("\0".join(inspect.getsource(m) for m in modules).encode()).hexdigest()[:16],
            **(more or {}),
        }
        self.parts = Parts(self.out, name, self.identity)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, in the order of tasks and samples."""
        settings, found = self.settings, []
        for task in settings.tasks:
            samples = ruler.load(
                task,
                settings.length,
                settings.samples,
                seed=settings.seed,
                renderer=self.renderer,
                corpora=Corpora(),
                max_new_tokens=ruler.task_spec(task).max_new_tokens,
            )
            found += [Prompt(task, s.index, self.renderer.encode(s.prompt)) for s in samples]
        return found

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Layers and query heads of the model, without loading its weights."""
        config = load_config(self.source, self.settings.model)
        check_supported(config)
        return int(config.num_hidden_layers), int(config.num_attention_heads)

    @property
    def counted(self) -> str:
        """Number of prompts, for titles."""
        return f"{len(self.prompts)} prompt{'s' * (len(self.prompts) != 1)}"

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, loaded on first use."""
        print(f"loading {self.settings.model.name} on {self.device}", flush=True)
        loaded = load_model(self.settings.model, self.source, self.settings.length, self.device, self.dtype)
        return loaded.model

    def prefill(self, prompt: Prompt, method: Any) -> None:
        """Run one prompt's prefill under a method (or a :class:`Probe`) and check the account of its calls."""
        with Session(self.model, method, backend=self.settings.backend) as session:
            session.prefill(torch.tensor(prompt.ids), keep_from=len(prompt.ids) - 1)
            session.account()

    def each(self, make: Callable[[Prompt], pd.DataFrame]) -> pd.DataFrame:
        """Every prompt's part, joined, with columns ``task``, ``sample`` and ``prompt_tokens`` in front.

        One line a prompt says what was measured, what was there before, and how long is left.
        """
        frames, took = [], []
        for number, prompt in enumerate(self.prompts, start=1):
            name = f"{prompt.name}-{ids_sha256(prompt.ids)[:12]}"
            known, begin = self.parts.has(name), time.monotonic()
            frame = self.parts.get(name, lambda prompt=prompt: make(prompt))  # type: ignore[misc]
            seconds = time.monotonic() - begin
            took += [] if known else [seconds]
            left = sum(took) / len(took) * (len(self.prompts) - number) if took else 0.0
            what = "known" if known else f"{seconds:.1f} s, about {left:.0f} s left"
            print(f"[{number}/{len(self.prompts)}] {prompt.name}, {len(prompt.ids)} tokens: {what}", flush=True)
            for at, (column, value) in enumerate(
                (("task", prompt.task), ("sample", prompt.index), ("prompt_tokens", len(prompt.ids)))
            ):
                frame.insert(at, column, value)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def facts(self) -> dict[str, Any]:
        """Where the numbers come from, for the file beside them."""
        prompts = [{"task": p.task, "index": p.index, "sha256": ids_sha256(p.ids)} for p in self.prompts]
        return {
            "analysis": self.name,
            "command": self.command,
            "settings": plain_settings(self.settings),
            "prompts": prompts,
            **{key: self.identity[key] for key in ("weights", "dtype", "backend", "device", "versions")},
            "provenance": provenance(self.device),
        }


def layer_line(layer: int, layers: int, every: int = 8) -> None:
    """Say now and then which layer a long prompt is at."""
    if layers > every and (layer + 1) % every == 0:
        print(f"    layer {layer + 1}/{layers}", flush=True)


def write_table(frame: pd.DataFrame, file: Path) -> Path:
    """Write a table as CSV or Parquet, by the file's ending, and say so."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            frame.to_parquet(file, index=False)
        else:
            frame.to_csv(file, index=False, lineterminator="\n", float_format="%.8g")
    except OSError as error:
        raise InputError("out", str(file.parent), f"a directory to write to ({error.strerror})") from None
    print(f"wrote {file}", flush=True)
    return file


def write_facts(facts: Mapping[str, Any], file: Path) -> None:
    """Write what a table rests on beside it."""
    file.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {file}", flush=True)
