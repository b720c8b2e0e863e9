"""``evalkit capture``: what is composed and refused, the named set, and a file that comes back as it was recorded."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch
from prefill_kernels.bench.config import BenchError
from prefill_kernels.bench.inputs import FORMAT
from prefill_kernels.bench.page_inputs import Overlap, captured_pages, overlap
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from evalkit import cli
from evalkit.attention import Session
from evalkit.bench import capture
from evalkit.bench.capture import Request, check_overlap, record
from evalkit.capture import Recorder, held, require_writable, save
from evalkit.capture_settings import CaptureConfig
from evalkit.config import ModelConfig
from evalkit.errors import InputError, IntegrityError
from evalkit.methods import METHODS
from evalkit.methods.cosa import CoSA, Select
from evalkit.methods.dense import Dense
from evalkit.methods.pageweaver import PageWeaver
from evalkit.models import loading

TOY = ModelConfig("toy", 4096, path="x/y")
METHOD = PageWeaver(page_size=32, top_k=4)


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Requests and commands that would have been run, of a model with 30 layers."""
    calls = []
    monkeypatch.setattr(loading, "locate", lambda model: None)
    config = types.SimpleNamespace(model_type="qwen3", num_hidden_layers=30)
    monkeypatch.setattr(loading, "load_config", lambda source, model: config)
    monkeypatch.setattr(capture, "launch", lambda request, command: calls.append((request, command)))
    monkeypatch.chdir(tmp_path)
    return calls


def build():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=89, hidden_size=96, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def prompt(length):
    return torch.randint(0, 89, (length,), generator=torch.Generator().manual_seed(1)).tolist()


# ------------------------------------------------------------------------------------------------------------- settings
def test_defaults_record_q_k_and_v_alone(launched):
    assert cli.main(["capture"]) == 0
    ((request, command),) = launched
    assert command == "evalkit capture" and request.method is None
    assert request.capture == CaptureConfig() and request.capture.wanted == {8192: ()}
    assert (request.model.name, request.model.dtype) == ("smollm2", "bfloat16")


def test_models_of_runs_and_methods_with_settings(launched, tmp_path):
    given = ["model=qwen3-8b", "model.dtype=float16", "method=pageweaver", "method.top_k=32"]
    assert cli.main(["capture", *given, "capture.lengths=[32768]", "capture.layers=[3]", "capture.queries=8192"]) == 0
    ((request, _),) = launched
    assert (request.model.name, request.model.dtype) == ("qwen3-8b", "float16")
    assert request.method == PageWeaver(top_k=32)
    assert request.capture.wanted == {32768: (3,)} and request.capture.queries == 8192
    assert list(tmp_path.iterdir()) == [], "Hydra writes nothing"


def test_the_named_set_is_two_two_and_five(launched):
    assert cli.main(["capture", "set=pageweaver"]) == 0
    ((request, command),) = launched
    assert command == "evalkit capture set=pageweaver"
    assert {length: len(layers) for length, layers in request.capture.wanted.items()} == {8192: 2, 32768: 2, 65536: 5}
    assert request.model.name == "smollm2-yarn" and request.model.dtype == "bfloat16"
    assert [request.model.rope_factor(n) for n in (8192, 32768, 65536)] == [1.0, 4.0, 8.0]
    assert request.method == PageWeaver() and not request.capture.tensors and request.capture.queries is None


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_layers_by_length_are_given_without_a_plus(launched, plus):
    given = [f"{plus}capture.layers_at={{256:[1],512:[2,29]}}", f"{plus}capture.layers_at.1024=[3]"]
    assert cli.main(["capture", *given]) == 0
    assert cli.main(["capture", "set=pageweaver", f"{plus}capture.layers_at={{8192:[3]}}"]) == 0
    (first, command), (second, _) = launched
    assert first.capture.wanted == {256: (1,), 512: (2, 29), 1024: (3,)}
    assert command.count(f"{plus}capture.layers_at") == 2 and "++++" not in command, "as it was typed"
    assert second.capture.wanted == {8192: (3,), 32768: (8, 22), 65536: (2, 8, 14, 20, 26)}


def test_help_names_the_sets(capsys):
    assert cli.main(["capture", "--help"]) == 0
    assert "sets    pageweaver" in capsys.readouterr().out


REFUSED = {
    "a preset of a calibration": (
        ["method=cosa-llama-3.1-8b"],
        "method.calibration='results/calibration/{model}/cosa-llama-3.1-8b.yaml': no preset that a model's calibration",
    ),
    "unknown name": (["lengths=[1]"], "lengths='[1]': known: capture, method, model, set"),
    "unknown key": (["capture.lenghts=[1]"], "capture.lenghts: no such setting; did you mean lengths"),
    "model": (["model=smolm2"], "model=smolm2: did you mean smollm2, smollm2-yarn?"),
    "length": (["capture.lengths=[9000]"], "capture.lengths=9000: model smollm2 supports at most 8192 without RoPE"),
    "short": (["capture.lengths=[100]"], "capture.lengths=[100]: token counts of at least 128, each once"),
    "corpus": (["capture.corpus=esays"], "capture.corpus='esays': did you mean essays?"),
    "layers": (["capture.layers=[1,1]"], "capture.layers=[1, 1]: layer numbers from 0, each once"),
    "layer": (["capture.layers=[3,30]"], "capture.layers=[3, 30]: below 30, the layers of smollm2"),
    "one layer": (["capture.layers_at={256:[1],512:[99]}"], "capture.layers_at={512: [99]}: below 30, the layers of"),
    "no length": (["capture.layers_at.early=[1]"], "capture.layers_at='{early:[1]}': layers by length, {<tokens>:["),
    "no mapping": (["capture.layers_at=[1]"], "capture.layers_at='[1]': layers by length, {<tokens>:["),
    "no list": (["+capture.layers_at={256:1}"], "capture.layers_at='{256:1}': layers by length, {<tokens>:["),
    "no end": (["capture.layers_at={256:[1]"], "capture.layers_at='{256:[1]': layers by length, {<tokens>:["),
    "short at": (["capture.layers_at={100:[1]}"], "capture.layers_at=[100]: token counts of at least 128, each once"),
    "long at": (["capture.layers_at={9000:[1]}"], "capture.layers_at=9000: model smollm2 supports at most 8192"),
    "out": (["capture.out=/proc/nowhere"], "capture.out='/proc/nowhere': a directory that can be written to (No such"),
    "both": (["set=pageweaver", "capture.layers=[1]"], "capture.layers=[1]: none where capture.layers_at"),
    "lengths of a set": (["set=pageweaver", "capture.lengths=[512]"], "capture.lengths=[512]: not set where capture.l"),
    "nothing": (["capture.tensors=false"], "capture.tensors=False: true, or method=<name>"),
    "queries": (["method=pageweaver", "capture.queries=0"], "capture.queries=0: 1 or more, or null"),
    "method": (["method=pageweaver", "method.top_k=1"], "method.top_k=1: 2 or more pages"),
    "dense": (["method=dense"], "method='dense': a method that selects blocks or pages"),
    "columns": (["method=minference"], "method='minference': a method that selects blocks or pages"),
    "device": (["capture.device=cudda"], "capture.device='cudda': did you mean cuda, cpu?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_runs_nothing(launched, capsys, case):
    arguments, message = REFUSED[case]
    assert cli.main(["capture", *arguments]) == 2
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith(f"evalkit: {message}"), lines
    assert launched == []


def test_a_directory_is_tried_and_left_as_it_was(tmp_path):
    (tmp_path / "kept").mkdir()
    for name in ("kept", "new/below", "."):
        require_writable(tmp_path / name)
    assert [item.name for item in tmp_path.iterdir()] == ["kept"] and not any((tmp_path / "kept").iterdir())
    (tmp_path / "file").touch()
    for name in ("file", "file/below", "n" * 300):
        with pytest.raises(InputError, match=r"capture.out='.*(file|nnn).*': a directory that can be written to"):
            require_writable(tmp_path / name)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "kept"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    request = Request(TOY, CaptureConfig(tensors=False), METHOD)
    found = record(request, build(), (1,), prompt(50))
    (tmp_path / "c.safetensors").mkdir()  # safetensors' own error, which is no OSError
    with pytest.raises(InputError, match=r"capture.out='.*c.safetensors': a file that can be written to"):
        save(found.captures, tmp_path / "c.safetensors", model="toy", metadata={"tokens": 50})


# With a tuple, as settings may hold it: what a file says is read back from JSON.
ASKED = {"tokens": 50, "layers": (1, 3), "queries": None, "method": {"name": "pageweaver", "top_k": 4}}


def saved(path):
    found = record(Request(TOY, CaptureConfig(tensors=False), METHOD), build(), (1,), prompt(50))
    save(found.captures, path, model="toy", metadata={**ASKED, "code": "c0de"})
    return path.read_bytes()


def test_a_file_that_holds_the_same_is_found_and_one_of_other_code_is_made_again(tmp_path):
    path = tmp_path / "c.safetensors"
    assert not held(path, ASKED, "c0de")
    saved(path)
    assert held(path, ASKED, "c0de") and not held(path, ASKED, "other")
    assert [item.name for item in tmp_path.iterdir()] == ["c.safetensors"]


@pytest.mark.parametrize(
    "change,told",
    [
        ({"layers": [1]}, r"layers \[1, 3\], not \[1\]"),
        ({"queries": 8}, "queries null, not 8"),
        ({"method": None, "tokens": 51}, "tokens 50, not 51; method .*, not null"),
        ({"new": 1}, "of another format"),
    ],
)
def test_another_capture_is_not_written_over(tmp_path, change, told):
    path = tmp_path / "c.safetensors"
    saved(path)
    with pytest.raises(InputError, match=rf"capture.out='{path}': another directory, .* another capture \({told}\)"):
        held(path, {**ASKED, **change}, "c0de")


def test_files_that_are_no_captures_are_not_written_over(tmp_path):
    path = tmp_path / "c.safetensors"
    path.write_text("notes")
    with pytest.raises(InputError, match="removed first: it cannot be read"):
        held(path, ASKED, "c0de")
    path.unlink()
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(InputError, match="of another format"):
        held(path, ASKED, "c0de")


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    before = saved(path)

    def fail(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("evalkit.capture.save_file", fail)
    with pytest.raises(InputError, match="no space left"):
        saved(path)
    assert path.read_bytes() == before and [item.name for item in tmp_path.iterdir()] == ["c.safetensors"]


def test_the_model_is_asked_only_where_layers_are_named(launched, monkeypatch):
    monkeypatch.setattr(loading, "locate", lambda model: pytest.fail("located"))
    assert cli.main(["capture"]) == 0 and len(launched) == 1


# ----------------------------------------------------------------------------------------------------------- recordings
@pytest.mark.parametrize("queries", [None, 300])
def test_pages_come_back_as_they_were_selected(tmp_path, queries):
    model, ids = build(), prompt(700)
    plans = {}

    class Spied(PageWeaver):
        def plan(self, q, kv, context):
            plans[context.layer] = plan = super().plan(q, kv, context)
            return plan

    request = Request(TOY, CaptureConfig(tensors=False, queries=queries), Spied(page_size=32, top_k=4))
    found = record(request, model, (1, 3), ids)
    assert set(plans) == {1, 3}, "other layers are not asked"
    path = tmp_path / "new" / "c.safetensors"
    save(found.captures, path, model="toy", metadata={"tokens": 700})
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {f"layer.{n}.{name}" for n in (1, 3) for name in ("pages", "positions")}
        assert file.get_tensor("layer.1.pages").dtype == torch.int16
        assert json.loads(file.metadata()["page_size"]) == 32
    rows = slice(700 - (queries or 700), None)
    for head in (0, 1):
        selections = captured_pages(path, head)
        assert [one.name for one in selections] == ["700/1", "700/3"]
        for one, layer in zip(selections, (1, 3), strict=True):
            assert torch.equal(one.pages, plans[layer].pages[0, rows, head])
            assert torch.equal(one.positions, torch.arange(700, dtype=torch.int32)[rows])
            assert (one.kv_len, one.page_size, one.source) == (700, 32, "toy")
            one.plan(torch.device("cpu"), regroup=64).check()
    assert [one.name for one in captured_pages(path)] == ["700/1/0", "700/1/1", "700/3/0", "700/3/1"]


def test_the_model_goes_on_densely_while_a_method_is_watched():
    model, ids = build(), torch.tensor(prompt(400))
    recorder = Recorder(Dense(), (0, 1, 2, 3), selections=True, watched=METHOD)
    with Session(model, recorder) as session:
        got = session.prefill(ids, keep_from=0)
        account = session.account()
    with Session(model, Dense()) as session:
        assert torch.equal(got, session.prefill(ids, keep_from=0))
    assert account.calls["dense"] == 4 and account.budget.record()["B"] == 1.0
    # The first layer sees what it would see under the method itself.
    own = Recorder(METHOD, (0, 3), tensors=False, selections=True)
    with Session(model, own) as session:
        session.prefill(ids, keep_from=399)
        assert session.account().calls["sparse"] == 4
    pages = [one.captures[layer].selected_pages()[0] for layer in (0, 3) for one in (recorder, own)]
    assert torch.equal(pages[0], pages[1]) and not torch.equal(pages[2], pages[3])
    assert set(recorder.captures[0].q[0].shape) == {400, 6, 16}


def test_chunks_are_joined_and_the_last_queries_kept():
    model, ids = build(), torch.tensor(prompt(700))
    kept = {}
    for chunk in (None, 256):
        recorder = Recorder(METHOD, (0,), tensors=False, selections=True, queries=300)
        with Session(model, recorder, chunk_size=chunk) as session:
            session.prefill(ids, keep_from=699)
        kept[chunk] = recorder.captures[0].selected_pages()
    assert torch.equal(kept[None][0], kept[256][0]) and torch.equal(kept[None][1], kept[256][1])
    assert kept[256][1].tolist() == list(range(400, 700))


def test_block_lists_of_a_watched_method_are_kept_too():
    request = Request(TOY, CaptureConfig(tensors=False), CoSA(select=Select(p=0.6)))
    found = record(request, build(), (2,), prompt(700))
    assert found.captures[2].order[0].shape[:2] == (6, 6) and not found.captures[2].pages


def test_what_cannot_be_recorded_is_named():
    with pytest.raises(InputError, match=r"capture.layers=\[4\]: below 4, the layers of toy"):
        record(Request(TOY, CaptureConfig()), build(), (4,), prompt(50))
    request = Request(TOY, CaptureConfig(), METHODS.get("dense")())
    with pytest.raises(InputError, match="method='dense': a method that selects blocks or pages"):
        record(request, build(), (1,), prompt(50))


# -------------------------------------------------------------------------------------------------------------- overlap
def test_overlap_is_counted():
    positions = torch.arange(320, 340)
    pages = torch.full((20, 1, 3), -1)
    pages[:, 0, 0] = 0
    pages[:, 0, 1] = torch.arange(20) % 4 + 1
    pages[3, 0, 2], pages[4, 0, 2] = 11, 10  # beyond the query's own page, and the own one
    found = overlap(pages, positions, 32)
    # Groups of 8, 8 and 4: page 0 and the four others each; query 4 adds page 10.
    assert found == Overlap(41 / 20, (6 + 5 + 5) / 3, 6)


@pytest.mark.parametrize(
    "measured,message",
    [
        (Overlap(0.0, 0.0, 0), "select 0.00 pages"),
        (Overlap(4.5, 6.0, 30), "expected 1 to 4"),
        (Overlap(3.0, 2.0, 30), "unions of eight hold 2.00"),
        (Overlap(3.0, 25.0, 30), "unions of eight hold 25.00"),
        (Overlap(3.5, 4.0, 4), "all queries together select 4 of 40 pages"),
    ],
)
def test_selections_that_are_not_plausible_are_refused(measured, message):
    with pytest.raises(IntegrityError, match=message):
        check_overlap("x", measured, 4, 40)
    check_overlap("x", Overlap(3.9, 12.0, 30), 4, 40)


def test_files_without_pages_are_refused(tmp_path):
    found = record(Request(TOY, CaptureConfig()), build(), (1,), prompt(50))
    save(found.captures, tmp_path / "qkv.safetensors", model="toy", metadata={"tokens": 50})
    (tmp_path / "none.safetensors").write_text("nothing")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors", {"format": "prefill-capture-0", "model": "toy"})
    save_file({"x": torch.ones(1)}, tmp_path / "bare.safetensors", {"format": FORMAT, "model": "toy"})
    other = (("other", f"format {FORMAT}, not prefill-capture-0"), ("bare", "scaling in its metadata, not without"))
    for name, message in (
        *other,
        ("qkv", "it has no pages"),
        ("none", "a readable capture"),
        ("missing", "a readable"),
    ):
        with pytest.raises(BenchError, match=message):
            captured_pages(tmp_path / f"{name}.safetensors", 0)
    request = Request(TOY, CaptureConfig(tensors=False), METHOD)
    found = record(request, build(), (1,), prompt(50))
    save(found.captures, tmp_path / "p.safetensors", model="toy", metadata={"tokens": 50})
    with pytest.raises(BenchError, match="kv_head=2: below 2"):
        captured_pages(tmp_path / "p.safetensors", 2)


@pytest.mark.slow
def test_the_command_on_the_embedded_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["method=pageweaver", "method.top_k=4", "method.page_size=32", "model.dtype=float32"]
    assert cli.main(["capture", *given, "capture.lengths=[512,1024]", "capture.layers=[2,20]"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-1024.safetensors layer 20: 3." in out
    for length in (512, 1024):
        with safe_open(tmp_path / "captures" / f"smollm2-{length}.safetensors", framework="pt") as file:
            facts = {k: json.loads(v) for k, v in file.metadata().items() if k not in ("format", "model")}
            assert facts["tokens"] == length and facts["layers"] == [2, 20] and facts["method"]["top_k"] == 4
            assert len(facts["prompt_sha256"]) == 64 and facts["command"].startswith("evalkit capture method=page")
            assert facts["overlap"]["20"]["mean_union"] > facts["overlap"]["20"]["mean_support"] > 3
            assert file.get_tensor("layer.2.q").shape == (length, 9, 64)
            assert file.get_tensor("layer.2.pages").shape == (length, 3, 4)
    # The same goes on from there; another length is added; anything else is refused before the model is loaded.
    files = {path.name: path.read_bytes() for path in (tmp_path / "captures").iterdir()}
    lengths, load = [], capture.load_model
    monkeypatch.setattr(capture, "load_model", lambda *a: lengths.append(a[2]) or load(*a))
    assert cli.main(["capture", *given, "capture.lengths=[512,256,1024]", "capture.layers=[2,20]"]) == 0
    out = capsys.readouterr().out
    assert lengths == [256] and out.count("kept captures/") == 2
    assert cli.main(["capture", "model.dtype=float32", "capture.lengths=[128,512]", "capture.layers=[2]"]) == 2
    error = capsys.readouterr().err
    assert "capture.out='captures/smollm2-512.safetensors': another directory" in error
    assert "layers [2, 20], not [2]; method {" in error and lengths == [256]
    assert all((tmp_path / "captures" / name).read_bytes() == content for name, content in files.items())


def test_a_missing_device_goes_by_its_name_here(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["capture", "set=pageweaver", "capture.device=cuda"]) == 2
    assert capsys.readouterr().err == "evalkit: capture.device='cuda': cpu or auto: torch finds no CUDA device here\n"
