"""Hydra's and OmegaConf's errors as one line that names the setting, the value and what is allowed."""

from __future__ import annotations

import re

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from ..errors import EvalkitError, near_matches
from .isolation import one_line

CONFIG_ERRORS = (HydraException, OmegaConfBaseException)


def explain(exc: BaseException) -> str:
    """Return one line for an error raised while a config was composed."""
    if isinstance(exc, EvalkitError):
        return one_line(exc)
    if isinstance(exc, MissingConfigException):
        return _unknown_option(exc)
    if isinstance(exc, OverrideParseException):
        return f"{exc.override}: cannot be read as an override ({_first_line(exc.message)})"
    cause = exc if isinstance(exc, OmegaConfBaseException) else exc.__cause__ or exc.__context__
    if isinstance(cause, OmegaConfBaseException):
        return _omegaconf(exc, cause)
    text = str(exc)
    group = re.search(r"You must specify '([^']+)'", text)
    if group:
        return f"{group[1]}: must be given, {group[1]}=<name>; {_listed(text)}"
    sweep = re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'(?: requires|\n)", text)
    if sweep:
        return f"{sweep[1]}: more than one value makes a sweep: add -m (a list is written [a,b])"
    return " ".join(line.strip() for line in text.splitlines() if line.strip()) or type(exc).__name__


def _unknown_option(exc: MissingConfigException) -> str:
    missing = exc.missing_cfg_file or ""
    if missing.startswith("hydra/launcher/submitit"):
        return f'{missing} is not installed: pip install "sparse-prefill-evalkit[slurm]"'
    if "/" in missing and exc.options is not None:
        group, _, name = missing.rpartition("/")
        return f"{group}={name}: {near_matches(name, exc.options)}"
    return " ".join(line.strip() for line in str(exc).splitlines() if line.strip())


def _omegaconf(outer: BaseException, cause: OmegaConfBaseException) -> str:
    key = str(cause.full_key or cause.key or "")
    unknown = re.search(r"Key '([^']*)' (?:is not in struct|not in )", str(cause))
    if unknown:
        asked = re.search(r"Could not override '([^']+)'", str(outer))
        known = _siblings(cause)
        source = re.match(r"In '([^']+)'", str(outer))
        where = f" (in {source[1]}.yaml)" if source else ""
        return f"{asked[1] if asked else key}: no such setting{where}; {near_matches(unknown[1], known)}"
    value = re.search(r"Error merging override (\S+)", str(outer))
    source = re.match(r"In '([^']+)'", str(outer))
    where = value[1] if value else f"{key} (in {source[1]}.yaml)" if source else key
    hint = "; a list is written [a,b]" if "is not a ListConfig" in str(cause) else ""
    return f"{where}: {_first_line(cause)}{hint}"


def _siblings(cause: OmegaConfBaseException) -> list[str]:
    node = cause.parent_node
    try:
        names = [str(key) for key in node.keys()] if node is not None else []
    except (AttributeError, OmegaConfBaseException):
        names = []
    return [name for name in names if name != "hydra"]


def _listed(text: str) -> str:
    options = [line.strip() for line in text.splitlines() if line.startswith("\t")]
    return f"known: {', '.join(options)}"


def _first_line(value: object) -> str:
    lines = [line.strip() for line in str(value).splitlines() if line.strip()]
    return lines[0] if lines else type(value).__name__
