"""lm-eval's flat model arguments as the settings of a run: composed and validated as ``evalkit run`` does it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ..config import Cell, ModelConfig, cell_from_config, methods_registry
from ..errors import InputError, MissingAsset, near_matches
from ..generation import THINK_CLOSE
from ..task_settings import GenerationConfig

MODEL = {"revision": "model.revision", "dtype": "model.dtype", "enable_thinking": "model.thinking"}
EXECUTION = {
    "backend": "execution.backend",
    "page_size": "execution.page_size",
    "chunk_size": "execution.chunk_size",
    "threads": "execution.threads",
}
OTHERS = ("pretrained", "method", "max_length", "max_gen_toks", "add_bos_token", "think_end_token", "seed")
FROM_LM_EVAL = ("device", "batch_size", "max_batch_size", "trust_remote_code")
"""What lm-eval passes of its own accord."""


@dataclass(frozen=True)
class AnyTask:
    """In the place of a task: lm-eval decides what is run, up to ``length`` tokens.

    Args:
        name: always ``lm-eval``.
        length: longest prompt plus output, tokens; the RoPE scaling is made for it.
        generation: as in a task of the harness; here the requests say how they are answered.
    """

    name: str = "lm-eval"
    length: int = 0
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    @property
    def label(self) -> str:
        """Short name."""
        return f"lm-eval up to {self.length} tokens"

    def validate(self) -> None:
        """Raise InputError on a length below 1."""
        if self.length < 1:
            raise InputError("max_length", self.length, "an integer of at least 1")

    def check(self, model: ModelConfig) -> None:
        """Nothing that a task and a model could disagree on."""


@dataclass(frozen=True)
class Settings:
    """What the model arguments ask for.

    Attributes:
        cell: model, method and execution; its task is an :class:`AnyTask`.
        max_gen_toks: output tokens of a request that names no number.
        add_bos_token: whether a text gets special tokens of the tokenizer; None leaves it to the tokenizer.
        think_end_token: text that ends a think block, which is cut off the answer; a block that it does not end
            leaves no answer, unless thinking is off. None keeps everything; a model told to think has ``</think>``.
        seed: seed of requests that sample.
    """

    cell: Cell
    max_gen_toks: int
    add_bos_token: bool | None
    think_end_token: str | None
    seed: int

    @property
    def requests(self) -> dict[str, Any]:
        """How requests are answered, beside the cell: everything else that can change an answer."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "cell"}


def settings(arguments: Mapping[str, Any]) -> Settings:
    """Compose and check model arguments.

    Args:
        arguments: ``pretrained`` (a model preset, a local directory or a hub id), ``method`` (a method preset), the
            method's knobs by their own names (``p``, ``skip_scale``, also dotted: ``select.p``, and in full where an
            argument has the name, ``method.page_size``), and those of
            :data:`MODEL`, :data:`EXECUTION` and :data:`OTHERS`.

    Raises:
        InputError: an unknown argument or a value that cannot be used; nothing was loaded.
        MissingAsset: the model's config cannot be had.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if "delta" in given:
        raise InputError("delta", given["delta"], "lm-eval reads this name as delta weights; use skip_scale")
    _check_batch(given)
    pretrained, max_length = given.get("pretrained"), given.get("max_length")
    if not isinstance(pretrained, str) or not pretrained:
        raise InputError("pretrained", pretrained, "a model preset, a local directory or a hub id")
    overrides = [f"method={_preset('method', given.get('method', 'dense'))}", "task=perplexity", *_model(pretrained)]
    overrides += [
        f"{dotted}={_quoted(given[name])}" for name, dotted in {**MODEL, **EXECUTION}.items() if name in given
    ]
    if "device" in given:
        overrides.append(f"execution.device={_device(str(given['device']))}")
    known = {*MODEL, *EXECUTION, *OTHERS, *FROM_LM_EVAL}
    knobs = {name: value for name, value in given.items() if name not in known}
    overrides += _knobs(str(given.get("method", "dense")), knobs, known)
    if any(item == "model=local" for item in overrides):
        overrides.append(f"model.native_context={_integer('max_length', max_length or _native_context(pretrained))}")
    composed = _compose(overrides)
    _refuse_calibration(composed.method)
    length = composed.model.native_context if max_length is None else _integer("max_length", max_length)
    cell = dataclasses.replace(composed, task=AnyTask(length=length), overrides=())  # type: ignore[arg-type]
    try:
        cell.validate()
    except InputError as error:
        raise InputError(_flat(error.field), error.value, error.allowed) from None
    bos, end = given.get("add_bos_token"), given.get("think_end_token")
    if bos is not None and not isinstance(bos, bool):
        raise InputError("add_bos_token", bos, "true or false")
    seed = given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError("seed", seed, "an integer of at least 0")
    if end is None and cell.model.thinking:
        end = THINK_CLOSE
    if end is not None and (not isinstance(end, str) or not end):
        raise InputError("think_end_token", end, "the text that ends a think block, such as </think>")
    limit = _integer("max_gen_toks", given.get("max_gen_toks", 256))
    return Settings(cell, limit, bos, end, seed)


def known_arguments() -> frozenset[str]:
    """Names of all model arguments, the knobs of every method among them."""
    registry = methods_registry()
    knobs = {dotted for name in registry for dotted in _leaves(registry.get(name))}
    flat = {dotted.rpartition(".")[2] for dotted in knobs}
    return frozenset({*MODEL, *EXECUTION, *OTHERS, *FROM_LM_EVAL, *knobs, *flat, *(f"method.{name}" for name in knobs)})


def counting_tokenizer(tokenizer: str | None, pretrained: str | None, revision: str | None) -> Any:
    """The tokenizer that a task's documents are made for: ``tokenizer``, else the model's own at its revision.

    Raises:
        InputError: neither is given.
    """
    name = tokenizer or pretrained
    if not isinstance(name, str) or not name:
        raise InputError("metadata.tokenizer", name, "give it, or pretrained in the model arguments")
    return named_tokenizer(name, revision if name == pretrained else None)


def named_tokenizer(pretrained: str, revision: str | None = None) -> Any:
    """Tokenizer of a model by the name that ``pretrained`` takes: a preset, a local directory or a hub id."""
    from transformers import AutoTokenizer

    from ..models.loading import load_tokenizer, locate

    if _model(pretrained)[0] == "model=local":
        folder = Path(pretrained).expanduser()
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else pretrained, revision=revision)
    model = settings({"pretrained": pretrained, "revision": revision}).cell.model
    return load_tokenizer(locate(model), model)


def _refuse_calibration(method: Any) -> None:
    """A calibrated value belongs to one length, and here the requests decide how long prompts are."""
    for name in ("calibration", "budget_target"):
        value = getattr(method, name, None)
        if value is not None:
            raise InputError(name, value, "null: a calibrated value is for one length; give the method's own knob")


def _check_batch(given: Mapping[str, Any]) -> None:
    if str(given.get("batch_size", 1)) not in ("1", "auto"):
        raise InputError("batch_size", given["batch_size"], "1: sparse prefill runs one unpadded sequence a call")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(name, value, "an integer of at least 1")
    return value


def _device(name: str) -> str:
    if name == "cuda:0":  # what lm-eval passes where nothing was asked, on machines without a GPU too
        return "auto"
    if name in ("cuda", "cpu", "auto"):
        return name
    raise InputError("device", name, "cuda, cpu or auto; CUDA_VISIBLE_DEVICES chooses among several GPUs")


def _presets(group: str) -> list[str]:
    return [item.name.removesuffix(".yaml") for item in (files("evalkit.conf") / group).iterdir() if _is_yaml(item)]


def _is_yaml(item: Any) -> bool:
    return str(item.name).endswith(".yaml")


def _preset(group: str, name: Any) -> str:
    known = _presets(group)
    if name not in known:
        raise InputError(group, name, near_matches(str(name), known))
    return str(name)


def _model(pretrained: str) -> list[str]:
    """Overrides that choose the model: a preset by its name or its hub id, else any directory or hub id."""
    if not Path(pretrained).expanduser().is_dir():
        for name in _presets("model"):
            preset = yaml.safe_load((files("evalkit.conf") / "model" / f"{name}.yaml").read_text())
            if name != "local" and pretrained in (name, preset.get("path")):
                return [f"model={name}"]
    return ["model=local", f"model.path={_quoted(pretrained)}"]


def _native_context(pretrained: str) -> int:
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(pretrained).max_position_embeddings)
    except (OSError, ValueError, AttributeError) as error:
        first = str(error).strip().splitlines()[0]
        known = ", ".join(name for name in sorted(_presets("model")) if name != "local")
        raise MissingAsset(
            f"pretrained={pretrained!r}: no model preset ({known}), no local directory with a config, and not to be "
            f"had from the hub ({first})"
        ) from None


def _knobs(method: str, asked: Mapping[str, Any], known: set[str]) -> list[str]:
    """The method's own settings as overrides, found by their last name."""
    fields = list(_leaves(_method_class(method)))
    by_name: dict[str, list[str]] = {}
    for dotted in fields:
        by_name.setdefault(dotted.rpartition(".")[2], []).append(dotted)
        by_name.setdefault(dotted, [dotted])
        by_name[f"method.{dotted}"] = [dotted]  # a name that is taken otherwise: page_size
    found = []
    for name, value in asked.items():
        if name not in by_name:
            raise InputError(name, value, f"method {method}: {near_matches(name, {*by_name, *known})}")
        if len(set(by_name[name])) > 1:
            raise InputError(name, value, f"say which: {', '.join(by_name[name])}")
        found.append(f"method.{by_name[name][0]}={_quoted(value)}")
    return found


def _method_class(preset: str) -> Any:
    """Class behind a method preset, which may inherit from another preset."""
    name, registry = preset, methods_registry()
    while name not in registry:
        defaults = yaml.safe_load((files("evalkit.conf") / "method" / f"{name}.yaml").read_text())["defaults"]
        name = next(item for item in defaults if isinstance(item, str) and item != "_self_")
        name = name.partition("@")[0].rpartition("/")[2]
    return registry.get(name)


def _leaves(cls: Any, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _leaves(hints[item.name], f"{prefix}{item.name}.")
        elif item.init:
            yield f"{prefix}{item.name}"


def _quoted(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)


def _compose(overrides: list[str]) -> Cell:
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from ..app import schema, sweeper
    from ..app.explain import CONFIG_ERRORS, explain

    schema.register()
    sweeper.register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("evalkit.conf", version_base="1.3"):
            return cell_from_config(compose("config", overrides=[*overrides, "task.length=16"]))
    except InputError as error:
        raise InputError(_flat(error.field), error.value, error.allowed) from None
    except CONFIG_ERRORS as error:
        raise InputError("model_args", ",".join(overrides), explain(error)) from None


def _flat(field: str) -> str:
    """A setting's name as it is written in the model arguments."""
    flat = {dotted: name for name, dotted in {**MODEL, **EXECUTION}.items()}
    flat |= {"task.length": "max_length", "model.path": "pretrained", "model.native_context": "max_length"}
    return flat.get(field, field.removeprefix("method."))
