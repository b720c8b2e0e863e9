"""Perplexity windows: pieces of documents with a fixed set of scored positions.

``disjoint`` windows are consecutive pieces of equal length; documents shorter than a window are left out, and so is the
remainder of a longer one. ``first`` windows are the first tokens of each document, a shorter document whole.

The loss of the last quarter of a window is taken by default, where damage to the prefill shows most; ``all`` scores
every token but the first. Each token is predicted from all tokens before it in the window.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..config import PerplexityConfig
from ..corpora import Corpora
from ..errors import InputError, MissingAsset
from ..task_settings import LONGBENCH_HUB, LONGBENCH_SMALL
from .longbench_v2.data import read_items

RECORDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Endings of local files that hold records, and the loader of the datasets library that reads them."""


SPARE_TOKENS = 64


@dataclass(frozen=True)
class Windows:
    """Windows of one corpus for one tokenizer.

    Attributes:
        ids: token ids of each window.
        starts: first scored position of each window.
        length: the configured length, of which no window is longer.
        checksum: sha256 over the token ids and the first scored positions.
    """

    ids: list[list[int]]
    starts: list[int]
    length: int
    checksum: str


def build_windows(
    config: PerplexityConfig, tokenizer: PreTrainedTokenizerBase, *, bos: bool, corpora: Corpora
) -> Windows:
    """Cut ``config.limit`` windows of ``config.length`` tokens.

    Args:
        config: validated settings.
        tokenizer: the model's tokenizer.
        bos: begin each window with the BOS token (counted in its length, never scored).
        corpora: where the essays come from.

    Raises:
        InputError: fewer windows than asked for, or a tokenizer without BOS where one is wanted.
    """
    prefix: list[int] = []
    if bos:
        if tokenizer.bos_token_id is None:
            raise InputError("model.perplexity_bos", True, "false: this tokenizer has no BOS token")
        prefix = [tokenizer.bos_token_id]
    body = config.length - len(prefix)
    windows: list[list[int]] = []
    for text in _in_order(config, corpora):
        if len(windows) == config.limit:
            break
        if config.windows == "first":
            ids = _leading_tokens(tokenizer, text, body)
            if len(prefix) + len(ids) > 1:  # something to predict, and something to predict it from
                windows.append(prefix + ids)
            continue
        # Tokenise no more of a long document than the windows still missing can need.
        wanted = (config.limit - len(windows)) * body
        ids = _leading_tokens(tokenizer, text, wanted)
        for start in range(0, len(ids) - body + 1, body):
            windows.append(prefix + ids[start : start + body])
    windows = windows[: config.limit]
    if len(windows) < config.limit:
        more = "disjoint windows" if config.windows == "disjoint" else "documents for windows"
        raise InputError(
            "task.limit",
            config.limit,
            f"at most {len(windows)}: corpus {config.corpus} has no more {more} of {config.length} tokens",
        )
    quarter = config.score == "last_quarter"
    starts = [max(1, len(ids) - len(ids) // 4) if quarter else 1 for ids in windows]
    checksum = hashlib.sha256(json.dumps([windows, starts]).encode()).hexdigest()
    return Windows(windows, starts, config.length, checksum)


def _leading_tokens(tokenizer: PreTrainedTokenizerBase, text: str, wanted: int) -> list[int]:
    # Most tokens are well below 16 characters, but a run of spaces or dashes is one of many. The spare tokens keep the
    # cut, which may split what would be one token, away from the wanted ones.
    size = wanted * 16 + 1024
    while True:
        ids = tokenizer(text[:size], add_special_tokens=False)["input_ids"]
        if len(ids) >= wanted + SPARE_TOKENS or size >= len(text):
            return list(ids[:wanted])
        size *= 4


def _in_order(config: PerplexityConfig, corpora: Corpora) -> Iterator[str]:
    """The documents, in the random order of ``config.seed`` where one is given: a smaller limit takes the first."""
    if config.seed is None:
        yield from documents(config, corpora)
        return
    texts = list(documents(config, corpora))
    random.Random(config.seed).shuffle(texts)
    yield from texts


def documents(config: PerplexityConfig, corpora: Corpora) -> Iterator[str]:
    """Texts of the corpus, in its own order."""
    if config.corpus == "essays":
        yield corpora.essays_text
        return
    if config.corpus in ("longbench_v2", "longbench_v2_small"):
        source = LONGBENCH_HUB if config.corpus == "longbench_v2" else LONGBENCH_SMALL
        try:
            contexts = [item.context for item in read_items(source)]
        except MissingAsset as error:
            hint = "; a local copy works as task.corpus=FILE task.text_field=context"
            raise MissingAsset(f"task.corpus={config.corpus!r}: {error}{hint}") from None
        yield from contexts
        return
    path = Path(config.corpus).expanduser()
    local = path.is_file()
    if local and path.suffix not in RECORDS:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError("task.corpus", config.corpus, f"UTF-8 text (byte {error.start} is not)") from None
        return
    from datasets import load_dataset

    try:
        if local:
            rows = load_dataset(RECORDS[path.suffix], data_files=str(path), split="train")
        else:
            # A random order needs all of it; otherwise no more is fetched than is read.
            rows = load_dataset(config.corpus, config.subset, split=config.split, streaming=config.seed is None)
    except Exception as error:  # datasets raises its own, the hub's and the network's errors alike
        raise MissingAsset(f"task.corpus={config.corpus!r}: cannot be loaded ({first_cause(error)})") from None
    for row in rows:
        if config.text_field not in row:
            raise InputError("task.text_field", config.text_field, f"a field of the corpus: {', '.join(row)}")
        text = row[config.text_field]
        if not isinstance(text, str):
            raise InputError("task.text_field", config.text_field, f"a field that holds text (one row has {text!r})")
        yield text


def first_cause(error: BaseException) -> str:
    """First line of what lies behind an error; the datasets library wraps the reason in "an error occurred"."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def ids_sha256(ids: list[int]) -> str:
    """Fingerprint of a prompt: sha256 of its token ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()
