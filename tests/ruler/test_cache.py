import csv
import json

import pytest
from small_tokenizers import llama3_like

from evalkit.benchmarks import ruler
from evalkit.benchmarks.ruler import bench_build
from evalkit.benchmarks.ruler import samples as samples_module
from evalkit.corpora import Corpora
from evalkit.errors import StoreError


@pytest.fixture
def load(renderers, corpora, tmp_path):
    def call(count=4, task="vt", length=1024, seed=7, form="smollm2-chat", **options):
        arguments = {"seed": seed, "renderer": renderers(form), "corpora": corpora, "root": tmp_path}
        return ruler.load(task, length, count, **arguments, **options)

    return call


@pytest.fixture
def built(monkeypatch):
    """The indices that were built."""
    indices = []
    original = samples_module.Builder.samples

    def record(self, start, stop):
        indices.extend(range(start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(samples_module.Builder, "samples", record)
    return indices


def test_round_trip(load, renderers, corpora, built):
    first = load()
    assert list(first) == ruler.build("vt", 1024, 4, seed=7, renderer=renderers("smollm2-chat"), corpora=corpora)
    assert len(first) == 4 and first[-1] == first[3] and first[1:3] == [first[1], first[2]]
    with pytest.raises(IndexError):
        first[4]
    del built[:]
    again = load()
    assert not built and list(again) == list(first) and again.data_checksum == first.data_checksum


def test_growing_adds_only_what_is_missing(load, built):
    small = load(3)
    large = load(20)
    assert built == list(range(20)) and list(large)[:3] == list(small)
    assert load(3).data_checksum == small.data_checksum != large.data_checksum
    assert [sample.index for sample in large] == list(range(20))
    shrunk = load(12)
    assert built == list(range(20)) and list(shrunk) == list(large)[:12]


def test_checksum_does_not_depend_on_how_the_files_came_about(load, tmp_path, renderers, corpora):
    load(2)
    in_two = load(6)
    options = {"seed": 7, "renderer": renderers("smollm2-chat"), "corpora": corpora, "root": tmp_path / "other"}
    at_once = ruler.load("vt", 1024, 6, **options)
    assert in_two.data_checksum == at_once.data_checksum and list(in_two) == list(at_once)


def test_everything_that_decides_a_sample_is_in_the_key(load, monkeypatch):
    folders = {
        load(1).folder,
        load(1, seed=8).folder,
        load(1, length=1025).folder,
        load(1, task="fwe").folder,
        load(1, form="smollm2-raw").folder,
        load(1, max_new_tokens=31).folder,
    }
    monkeypatch.setattr(samples_module, "GENERATOR_VERSION", -1)
    folders.add(load(1).folder)
    assert len(folders) == 7


def test_corpus_is_in_the_key(renderers, tmp_path):
    path = tmp_path / "essays.json"
    folders = set()
    for text in ("One sentence. " * 400, "Another sentence. " * 400):
        path.write_text(json.dumps({"text": text}))
        options = {"seed": 7, "renderer": renderers("smollm2-chat"), "corpora": Corpora(essays=path), "root": tmp_path}
        folders.add(ruler.load("niah_single_2", 1024, 1, **options).folder)
    assert len(folders) == 2


def parquet(folder):
    return sorted(folder.glob("*.parquet"))[0]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_corrupt_file_is_one_line_naming_file_and_cure(load, damage):
    folder = load().folder
    path = parquet(folder)
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    with pytest.raises(StoreError) as error:
        load()
    message = str(error.value)
    assert str(path) in message and f"rm -r {folder}" in message and "\n" not in message


def test_corrupt_manifest(load):
    folder = load().folder
    manifest = folder / "manifest.json"
    good = json.loads(manifest.read_text())
    changed = {**good, "identity": {**good["identity"], "seed": 0}}
    gap = {**good, "parts": [{**good["parts"][0], "start": 1}]}
    for text in ("{half", json.dumps({"parts": []}), json.dumps(changed), json.dumps(gap)):
        manifest.write_text(text)
        with pytest.raises(StoreError, match=r"manifest\.json: corrupt sample cache"):
            load()


def test_an_interrupted_build_leaves_nothing_behind(load, monkeypatch):
    original = samples_module.Builder.sample

    def fail(self, index):
        if index == 3:
            raise KeyboardInterrupt
        return original(self, index)

    monkeypatch.setattr(samples_module.Builder, "sample", fail)
    with pytest.raises(KeyboardInterrupt):
        load(10)
    monkeypatch.setattr(samples_module.Builder, "sample", original)
    assert len(list(load(10))) == 10


def test_benchmark_script_writes_a_row(tmp_path):
    llama3_like().save_pretrained(tmp_path / "tokenizer")
    out = tmp_path / "build.csv"
    arguments = ["--task", "vt", "--length", "2048", "--samples", "2", "--tokenizer", str(tmp_path / "tokenizer")]
    arguments += ["--out", str(out)]
    for _ in range(2):
        bench_build.main(arguments)
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 2 and rows[0]["task"] == "vt" and float(rows[1]["cold_seconds"]) > 0
    assert rows[0]["command"] == " ".join(["python -m evalkit.benchmarks.ruler.bench_build", *arguments])
