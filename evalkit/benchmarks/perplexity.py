"""Perplexity windows: consecutive, disjoint pieces of documents, with a fixed set of scored positions.

The loss of window tokens ``score_from ..`` is taken, each predicted from all tokens before it in the window. By
default that is the last quarter, where damage to the prefill shows most; ``all`` scores every token but the first.
Documents shorter than a window are left out, and so is the remainder of a longer one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..config import PerplexityConfig
from ..corpora import Corpora
from ..errors import InputError, MissingAsset


@dataclass(frozen=True)
class Windows:
    """Windows of one corpus for one tokenizer.

    Attributes:
        ids: token ids of each window, all of the configured length.
        score_from: first scored position.
        checksum: sha256 over the token ids and the first scored position.
    """

    ids: list[list[int]]
    score_from: int
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
    for text in documents(config, corpora):
        if len(windows) == config.limit:
            break
        # Tokenise no more of a long document than the windows still missing can need.
        wanted = (config.limit - len(windows)) * body
        ids = _leading_tokens(tokenizer, text, wanted)
        for start in range(0, len(ids) - body + 1, body):
            windows.append(prefix + ids[start : start + body])
    windows = windows[: config.limit]
    if len(windows) < config.limit:
        raise InputError(
            "task.limit",
            config.limit,
            f"at most {len(windows)}: corpus {config.corpus} has no more disjoint windows of {config.length} tokens",
        )
    score_from = max(1, config.length - config.length // 4) if config.score == "last_quarter" else 1
    checksum = hashlib.sha256(json.dumps([windows, score_from]).encode()).hexdigest()
    return Windows(windows, score_from, checksum)


def _leading_tokens(tokenizer: PreTrainedTokenizerBase, text: str, wanted: int) -> list[int]:
    # Tokens average well below 16 characters; the cut is far enough behind to leave the wanted tokens untouched.
    piece = text[: wanted * 16 + 1024]
    ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
    return list(ids[:wanted])


def documents(config: PerplexityConfig, corpora: Corpora) -> Iterator[str]:
    """Texts of the corpus: the essays, a local .txt, .json or .jsonl file, or a hub data set."""
    if config.corpus == "essays":
        yield corpora.essays_text
        return
    path = Path(config.corpus).expanduser()
    if path.suffix == ".txt":
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError("task.corpus", config.corpus, f"UTF-8 text (byte {error.start} is not)") from None
        return
    from datasets import load_dataset

    try:
        if path.suffix in (".json", ".jsonl"):
            rows = load_dataset("json", data_files=str(path), split="train")
        else:
            rows = load_dataset(config.corpus, split="test", streaming=True)
    except Exception as error:  # datasets raises its own, the hub's and the network's errors alike
        cause: BaseException = error
        while cause.__cause__ is not None:  # datasets wraps the reason in "an error occurred"
            cause = cause.__cause__
        first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise MissingAsset(f"task.corpus={config.corpus!r}: cannot be loaded ({first})") from None
    for row in rows:
        if config.text_field not in row:
            raise InputError("task.text_field", config.text_field, f"a field of the corpus: {', '.join(row)}")
        text = row[config.text_field]
        if not isinstance(text, str):
            raise InputError("task.text_field", config.text_field, f"a field that holds text (one row has {text!r})")
        yield text


def ids_sha256(ids: list[int]) -> str:
    """Fingerprint of a prompt: sha256 of its token ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()
