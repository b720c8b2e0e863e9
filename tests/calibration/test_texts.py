"""Calibration windows: where in the text they lie, and that evaluation's windows lie elsewhere."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from evalkit.benchmarks.perplexity import build_windows
from evalkit.calibration.settings import CalibrateConfig
from evalkit.calibration.texts import CalibrationTexts
from evalkit.config import PerplexityConfig
from evalkit.corpora import Corpora
from evalkit.errors import InputError


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def texts(tokenizer, text, windows, bos=False):
    return CalibrationTexts(CalibrateConfig(text=str(text), windows=windows), tokenizer, bos=bos, corpora=Corpora())


def test_windows_are_cut_from_the_end_backwards(tokenizer, corpus):
    text = corpus.read_text()
    got = texts(tokenizer, corpus, 3).windows(200)
    assert [len(ids) for ids in got.ids] == [200] * 3
    assert got.spans[0].stop == len(text) and got.spans[-1].start >= len(text) // 2
    for ids, span in zip(got.ids, got.spans, strict=True):
        assert tokenizer.decode(ids) == text[span.start : span.stop]
    assert all(later.stop <= earlier.start for earlier, later in zip(got.spans, got.spans[1:], strict=False))
    assert all(got.fingerprints.shared_at(ids) == 0 for ids in got.ids)


def test_no_window_comes_from_the_first_half(tokenizer, corpus):
    tokens = len(tokenizer(corpus.read_text(), add_special_tokens=False)["input_ids"])
    half = next(n for n in range(1, 100) if _fails(tokenizer, corpus, n)) - 1
    assert half == pytest.approx(tokens / 2 / 200, abs=1.01), "as many as the second half holds"
    with pytest.raises(InputError, match=rf"calibrate.windows={half + 1}: at most {half}: the second half"):
        texts(tokenizer, corpus, half + 1).windows(200)
    evaluated = build_windows(
        PerplexityConfig(corpus=str(corpus), length=200, limit=tokens // 400), tokenizer, bos=False, corpora=Corpora()
    )
    prints = texts(tokenizer, corpus, half).windows(200).fingerprints
    assert all(prints.shared_at(ids) is None for ids in evaluated.ids)


def _fails(tokenizer, corpus, windows):
    try:
        texts(tokenizer, corpus, windows).windows(200)
    except InputError:
        return True
    return False


def test_documents_are_taken_last_first_and_short_ones_left_out(tokenizer, corpus, tmp_path):
    text = corpus.read_text()
    documents = [text[:6000], text[6000:8000], text[8000:8100], text[8100:10000]]
    file = tmp_path / "books.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    got = texts(tokenizer, file, 4).windows(200)
    joined = "".join(documents)
    for ids, span in zip(got.ids, got.spans, strict=True):
        assert tokenizer.decode(ids) == joined[span.start : span.stop] and span.start >= 5000
        inside = [i for i in range(4) if len("".join(documents[:i])) <= span.start < len("".join(documents[: i + 1]))]
        assert span.stop <= len("".join(documents[: inside[0] + 1])) and inside[0] != 2


def test_bos_counts_in_the_length_and_not_in_the_fingerprints(tokenizer, corpus):
    plain, begun = texts(tokenizer, corpus, 2).windows(200), texts(tokenizer, corpus, 2, bos=True).windows(200)
    assert all(ids[0] == tokenizer.bos_token_id and len(ids) == 200 for ids in begun.ids)
    assert begun.ids[0][1:] == plain.ids[0][1:]
    assert begun.fingerprints.shared_at([tokenizer.bos_token_id] * 64 + plain.ids[0]) == 65


def test_the_checksum_is_of_the_whole_text(tokenizer, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("x" + corpus.read_text())
    assert texts(tokenizer, corpus, 1).checksum != texts(tokenizer, other, 1).checksum
    assert texts(tokenizer, corpus, 1).windows(100).spans[0].text == texts(tokenizer, corpus, 1).checksum
