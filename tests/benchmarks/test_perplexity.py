"""Perplexity windows from local corpora, and their loss and fidelity against whole-logits computations."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evalkit import reference as reference_module
from evalkit.attention import Session
from evalkit.benchmarks.docs import perplexity_docs, token_perplexity
from evalkit.benchmarks.perplexity import build_windows, ids_sha256
from evalkit.config import PerplexityConfig
from evalkit.corpora import Corpora
from evalkit.errors import InputError, MissingAsset
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense
from evalkit.reference import DenseReference, score_window

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {"<s>": 0, "<unk>": 1, **{w: i + 2 for i, w in enumerate(WORDS)}}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


def text(count: int, seed: int = 0) -> str:
    g = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(0, 60, (count,), generator=g).tolist())


def windows(path, tokenizer, *, bos=False, **settings):
    config = PerplexityConfig(corpus=str(path), **settings)
    config.validate()
    return build_windows(config, tokenizer, bos=bos, corpora=Corpora())


def test_windows_are_consecutive_and_disjoint(tmp_path, tokenizer):
    path = tmp_path / "corpus.txt"
    path.write_text(text(100))
    made = windows(path, tokenizer, length=32, limit=3)
    everything = tokenizer(text(100), add_special_tokens=False)["input_ids"]
    assert [i for w in made.ids for i in w] == everything[:96]
    assert made.starts == [24] * 3
    assert windows(path, tokenizer, length=32, limit=3, score="all").starts == [1] * 3
    assert windows(path, tokenizer, length=32, limit=2).ids == made.ids[:2]


def test_documents_shorter_than_a_window_are_left_out(tmp_path, tokenizer):
    path = tmp_path / "corpus.jsonl"
    rows = [text(20, 1), text(70, 2), text(31, 3), text(32, 4)]
    path.write_text("\n".join(json.dumps({"body": r}) for r in rows))
    made = windows(path, tokenizer, length=32, limit=3, text_field="body")
    of = [tokenizer(r, add_special_tokens=False)["input_ids"] for r in rows]
    assert made.ids == [of[1][:32], of[1][32:64], of[3]]


def test_bos_is_inside_the_length_and_never_scored(tmp_path, tokenizer):
    path = tmp_path / "corpus.txt"
    path.write_text(text(100))
    made = windows(path, tokenizer, length=32, limit=2, bos=True, score="all")
    assert all(w[0] == 0 and len(w) == 32 and 0 not in w[1:] for w in made.ids)
    assert made.ids[1][1:] == tokenizer(text(100), add_special_tokens=False)["input_ids"][31:62]
    assert made.starts == [1, 1]


def test_checksum_follows_content_and_scoring(tmp_path, tokenizer):
    path = tmp_path / "corpus.txt"
    path.write_text(text(100))
    sums = {
        windows(path, tokenizer, length=32, limit=2).checksum,
        windows(path, tokenizer, length=32, limit=3).checksum,
        windows(path, tokenizer, length=32, limit=2, score="all").checksum,
    }
    path.write_text(text(100, seed=9))
    assert len(sums | {windows(path, tokenizer, length=32, limit=2).checksum}) == 4


def test_bad_corpora_are_one_clear_error(tmp_path, tokenizer):
    short = tmp_path / "short.txt"
    short.write_text(text(100))
    with pytest.raises(InputError, match=r"task.limit=5: at most 3"):
        windows(short, tokenizer, length=32, limit=5)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"body": "w1 w2"}))
    with pytest.raises(InputError, match=r"task.text_field='text'.*body"):
        windows(rows, tokenizer, length=32, limit=1)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{not json")
    with pytest.raises(MissingAsset, match="cannot be loaded.*JSON"):
        windows(broken, tokenizer, length=32, limit=1)
    rows.write_text('{"text": null}\n{"text": null}')
    with pytest.raises(InputError, match="a field that holds text .one row has None"):
        windows(rows, tokenizer, length=32, limit=1)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"text \xfc\xff")
    with pytest.raises(InputError, match="task.corpus=.*UTF-8 text .byte 5"):
        windows(binary, tokenizer, length=32, limit=1)
    with pytest.raises(InputError, match="no such file"):
        windows(tmp_path / "absent.txt", tokenizer, length=32, limit=1)


def test_first_windows_are_the_heads_of_documents(tmp_path, tokenizer):
    path = tmp_path / "corpus.jsonl"
    rows = [text(20, 1), text(70, 2), "", "w1", text(32, 4)]
    path.write_text("\n".join(json.dumps({"text": r}) for r in rows))
    of = [tokenizer(r, add_special_tokens=False)["input_ids"] for r in rows]
    made = windows(path, tokenizer, length=32, limit=3, windows="first", score="all")
    assert made.ids == [of[0], of[1][:32], of[4]] and made.starts == [1, 1, 1]
    quarter = windows(path, tokenizer, length=32, limit=3, windows="first")
    assert quarter.starts == [15, 24, 24]
    docs = perplexity_docs(quarter)
    assert [d["scored_tokens"] for d in docs] == [5, 8, 8] and {d["length"] for d in docs} == {32}
    with_bos = windows(path, tokenizer, length=32, limit=4, windows="first", bos=True)
    assert [len(w) for w in with_bos.ids] == [21, 32, 2, 32] and with_bos.ids[2] == [0, of[3][0]]
    with pytest.raises(InputError, match="task.limit=4: at most 3.*no more documents"):
        windows(path, tokenizer, length=32, limit=4, windows="first")


def test_a_seed_takes_documents_in_a_random_order_of_its_own(tmp_path, tokenizer):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text(40, seed)}) for seed in range(20)))
    settings = {"length": 32, "windows": "first"}
    in_order = windows(path, tokenizer, limit=20, **settings).ids
    drawn = windows(path, tokenizer, limit=20, seed=0, **settings).ids
    assert drawn != in_order and sorted(drawn) == sorted(in_order)
    assert windows(path, tokenizer, limit=5, seed=0, **settings).ids == drawn[:5]
    assert windows(path, tokenizer, limit=5, seed=1, **settings).ids != drawn[:5]


def test_contexts_of_the_benchmark_are_a_corpus(tokenizer, monkeypatch):
    from evalkit.benchmarks import perplexity as module

    contexts = [item.context for item in module.read_items("small")]
    config = PerplexityConfig(corpus="longbench_v2_small", windows="first", length=64, limit=36, score="all")
    made = build_windows(config, tokenizer, bos=False, corpora=Corpora())
    assert made.ids == [tokenizer(c, add_special_tokens=False)["input_ids"][:64] for c in contexts]

    def unreachable(*_):
        raise MissingAsset("data set is not to be had")

    monkeypatch.setattr(module, "read_items", unreachable)
    with pytest.raises(MissingAsset, match="task.corpus='longbench_v2': data set .*task.corpus=FILE task.text_field"):
        build_windows(PerplexityConfig(corpus="longbench_v2"), tokenizer, bos=False, corpora=Corpora())


def test_any_text_file_and_parquet_are_corpora(tmp_path, tokenizer):
    import pandas as pd

    for name in ("book.md", "notes"):
        (tmp_path / name).write_text(text(40))
        assert len(windows(tmp_path / name, tokenizer, length=32, limit=1).ids) == 1
    pd.DataFrame({"body": [text(40), text(40, 1)]}).to_parquet(tmp_path / "rows.parquet")
    assert len(windows(tmp_path / "rows.parquet", tokenizer, length=32, limit=2, text_field="body").ids) == 2


def test_a_hub_data_set_is_asked_for_by_subset_and_split(tokenizer, monkeypatch):
    import datasets

    asked = []
    rows = [{"text": text(40, seed)} for seed in range(3)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    for seed in (None, 1):
        config = PerplexityConfig(corpus="owner/set", subset="raw", split="validation", length=32, limit=3, seed=seed)
        build_windows(config, tokenizer, bos=False, corpora=Corpora())
    assert asked == [
        (("owner/set", "raw"), {"split": "validation", "streaming": True}),
        (("owner/set", "raw"), {"split": "validation", "streaming": False}),
    ]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=62,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


SPARSE = CoSA(block_size=64, stride=8, select=Select(p=0.5))


def measured(model, method, ids, start, reference=None):
    tokens = torch.tensor(ids)
    with Session(model, method) as session:
        states = session.prefill(tokens, keep_from=start - 1)[:-1]
        dense = reference.states(tokens, start - 1, ids_sha256(ids))[:-1] if reference else None
        return score_window(session, states, tokens[start:], dense)


@torch.inference_mode()
def test_loss_and_fidelity_equal_the_whole_logits(model, monkeypatch, tmp_path):
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(reference_module, "_ROWS", 7)
    ids = torch.randint(2, 62, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    nll, kl, top1 = measured(model, SPARSE, ids, 200, DenseReference(model, "twin"))
    with Session(model, SPARSE) as session:
        sparse = session.logits(session.prefill(torch.tensor(ids), keep_from=0)).double().log_softmax(-1)[199:-1]
    dense = model(torch.tensor(ids)[None]).logits[0].double().log_softmax(-1)[199:-1]
    targets = torch.tensor(ids)[200:]
    assert nll == pytest.approx(-float(sparse.gather(1, targets[:, None]).sum()), rel=1e-5)
    assert kl == pytest.approx(float((dense.exp() * (dense - sparse)).sum(-1).mean()), rel=1e-3)
    assert top1 == pytest.approx(float((dense.argmax(-1) == sparse.argmax(-1)).double().mean()))
    assert kl > 1e-3 and top1 < 1


def test_dense_against_its_own_reference_is_exact(model, monkeypatch, tmp_path):
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    ids = list(range(2, 62)) * 3
    _, kl, top1 = measured(model, Dense(), ids, 100, DenseReference(model, "twin"))
    assert kl == 0.0 and top1 == 1.0
    assert measured(model, Dense(), ids, 100)[1:] == (None, None)


def test_reference_is_kept_and_a_damaged_one_made_again(model, monkeypatch, tmp_path):
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    ids = list(range(2, 62)) * 3
    first = DenseReference(model, "twin").states(torch.tensor(ids), 99, "a" * 64)
    (file,) = (tmp_path / "reference" / "twin").iterdir()
    monkeypatch.setattr(reference_module, "Session", None)  # a second run must not compute it
    assert torch.equal(DenseReference(model, "twin").states(torch.tensor(ids), 99, "a" * 64), first)
    monkeypatch.undo()
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    whole = file.read_bytes()
    altered = bytearray(whole)
    altered[-5] ^= 0x70  # still a tensor of the right shape
    for damaged in (whole[:50], b"", bytes(altered)):
        file.write_bytes(damaged)
        assert torch.equal(DenseReference(model, "twin").states(torch.tensor(ids), 99, "a" * 64), first)
        assert file.read_bytes() == whole


def test_documents_and_aggregation(tmp_path, tokenizer):
    path = tmp_path / "corpus.txt"
    path.write_text(text(100))
    docs = perplexity_docs(windows(path, tokenizer, length=32, limit=3))
    assert [d["index"] for d in docs] == [0, 1, 2] and docs[0]["scored_tokens"] == 8
    assert token_perplexity([(-8.0, 4), (-1.0, 5)]) == pytest.approx(math.e)


@pytest.mark.parametrize("run", [" " * 4000, "-" * 4000, " " * 400 + "-" * 400])
def test_windows_are_full_where_tokens_are_long(tmp_path, run):
    """A word is far behind many characters that are few tokens: reading stops at the full window, not before."""
    backend = Tokenizer(WordLevel({"<unk>": 0, "w": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    sparse = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    body = f"{run} w " * 40
    path = tmp_path / "corpus.txt"
    path.write_text(body)
    everything = sparse(body, add_special_tokens=False)["input_ids"]
    for kind in ("first", "disjoint"):
        (made,) = windows(path, sparse, length=32, limit=1, windows=kind).ids
        assert made == everything[:32] and len(made) == 32
