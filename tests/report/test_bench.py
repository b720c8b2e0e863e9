"""Tables and figures of benchmark files."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest
from prefill_kernels.bench.rows import COLUMNS

from evalkit import cli
from evalkit.errors import InputError
from evalkit.report import bench, speed
from evalkit.report.bench import markdown, read, tables, write_benchmarks

COMMITTED = Path(__file__).parents[2] / "results" / "h200" / "benchmarks.csv"


class File:
    """A benchmark file in the making."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(",".join(COLUMNS) + "\n")

    def add(self, name, variant, tokens, setting, commit="abc", device="GPU X", **metrics) -> None:
        with self.path.open("a", newline="") as file:
            for metric, value in metrics.items():
                row = [name, variant, tokens, setting, metric, value, "ratio", device, "2", "3", commit, "a command"]
                csv.writer(file, lineterminator="\n").writerow(row)


@pytest.fixture
def file(tmp_path):
    return File(tmp_path / "rows.csv")


def row(file, *wanted):
    """The table row whose first cells are these, by column."""
    for table in tables(read(file.path)):
        for cells in table.rows:
            if tuple(cells[: len(wanted)]) == wanted:
                return dict(zip(table.headers, cells, strict=True))
    raise AssertionError(f"no row {wanted}")


def full(file) -> None:
    """What the benchmarks write, in small."""
    for tokens, factor in ((4096, 1.0), (8192, 4.0)):
        for name in ("kernel", "attention"):
            file.add(name, "fa2", tokens, "dense", ms=8 * factor, tflops=300, share_of_dense=0.5)
            file.add(name, "cudnn", tokens, "dense", ms=4 * factor, tflops=600, share_of_dense=1, speedup_fa2=2)
        for budget in (25, 50):
            setting, ms = f"budget {budget}%", budget / 100 * 5 * factor
            file.add("kernel", "osk", tokens, setting, ms=ms, tflops=620, speedup_fa2=8 * factor / ms)
            file.add("kernel", "osk_triton", tokens, setting, ms=1.4 * ms, tflops=440, gain_of_jumping=1.2)
            file.add("kernel", "logical_triton", tokens, setting, ms=1.7 * ms, tflops=360)
        for setting in ("Stage-1 20 %, vote off, stride 8", "Stage-1 29 % to B 20 %, stride 8, sigma 1"):
            file.add("attention", "kap", tokens, setting, ms=0.1 * factor)
            file.add("attention", "select", tokens, setting, ms=0.05 * factor)
            file.add("attention", "osk", tokens, setting, ms=factor, tflops=600)
            speedups = {"speedup_fa2": 7.0, "speedup_dense": 3.5, "share_of_dense": 0.9, "kap_select_share": 0.13}
            file.add("attention", "call", tokens, setting, ms=1.15 * factor, tflops=540, B_block=0.2, **speedups)
        file.add("ttft", "fa2", tokens, "dense", ttft=factor, peak_memory=46)
        file.add("ttft", "cosa", tokens, "Stage-1 20 %, vote off, stride 8", ttft=factor / 2, speedup_fa2=2)


# ------------------------------------------------------------------------------ numbers
def test_the_newest_run_of_a_metric_counts(file):
    file.add("kernel", "fa2", 4096, "dense", commit="old", ms=9, tflops=1)
    file.add("kernel", "osk", 4096, "all blocks", commit="old", ms=5, tflops=2, B_block=0.5)
    file.add("kernel", "osk", 4096, "all blocks", commit="new", ms=3, tflops=4)
    found = row(file, "osk", "all blocks", "4096")
    assert (found["ms"], found["TF/s"], found["B %"]) == ("3.000", "4", "50.0")
    assert found["commit"] == "new, old" or found["commit"] == "old, new"
    assert row(file, "fa2", "dense", "4096")["commit"] == "old"
    assert [line for line in markdown(read(file.path)).splitlines() if line.startswith("- ")] == [
        "- `a command` at commit old (torch 2, Triton 3)",
        "- `a command` at commit new (torch 2, Triton 3)",
    ]


def test_stored_ratios_and_derived_ones(file):
    full(file)
    stored = row(file, "call", "Stage-1 20 %, vote off, stride 8", "8192")
    assert (stored["over FA2"], stored["over fastest dense"], stored["% of dense peak"]) == ("7.00", "3.50", "90")
    assert stored["also"] == "proxy and selection 13.0 %"
    derived = row(file, "osk", "budget 25%", "4096")
    assert (derived["over FA2"], derived["over fastest dense"]) == ("6.40", "3.20")
    assert derived["% of dense peak"] == "103"
    stage = row(file, "kap", "Stage-1 20 %, vote off, stride 8", "4096")
    assert (stage["over FA2"], stage["TF/s"]) == ("-", "-")
    assert row(file, "fa2", "dense", "4096", "1.000")["over FA2"] == "1.00", "time to first token"


def test_older_names_give_way_to_newer_ones(file):
    file.add("kernel", "osk", 4096, "all blocks", commit="old", ms=5, speedup_cudnn=1.5, share_of_cudnn_rate=0.7)
    assert row(file, "osk")["over fastest dense"] == "1.50" and row(file, "osk")["% of dense peak"] == "70"
    file.add("kernel", "osk", 4096, "all blocks", commit="new", ms=4, speedup_dense=1.8, share_of_dense=0.8)
    found = row(file, "osk")
    assert (found["over fastest dense"], found["% of dense peak"], found["commit"]) == ("1.80", "80", "new")


def test_captured_inputs_have_a_table_and_a_baseline_of_their_own(file):
    full(file)
    file.add("attention", "fa2", 8192, "smollm2, dense", ms=2, tflops=200)
    file.add("attention", "call", 8192, "smollm2, Top-p 0.9, vote off, stride 8", ms=0.5, tflops=100)
    names = [table.title for table in tables(read(file.path))]
    assert names == [
        "Kernel",
        "Whole call and its stages",
        "Whole call on captured inputs, mean over layers",
        "Time to first token",
    ]
    found = row(file, "call", "smollm2, Top-p 0.9, vote off, stride 8")
    assert (found["over FA2"], found["% of dense peak"]) == ("4.00", "50")


def test_ttft_measured_alone_is_compared_with_the_files_baseline(file):
    file.add("ttft", "fa2", 4096, "dense", ttft=6)
    file.add("ttft", "cosa", 4096, "Stage-1 20 %, vote off, stride 8", ttft=2)
    assert row(file, "cosa")["over FA2"] == "3.00"


def with_methods(file) -> None:
    full(file)
    file.add("attention", "fa2", 8192, "smollm2, dense", ms=2, tflops=200)
    for variant, knobs, b in (("xattention", "stride=8 threshold=0.9", 0.3), ("mine:a=1", "a=1", 0.1)):
        for tokens in (4096, 8192):
            for kind, share in (("normal inputs (flat mass)", 0.95), ("sigma 2", b)):
                stages = {"ms": 4 * tokens / 4096, "plan_ms": 1, "attention_ms": 3, "plan_memory": 0.25}
                budgets = {"B": share, "B_stage1": share, "B_block": share}
                file.add("attention", variant, tokens, f"{kind}, {knobs}", tflops=150, host_ms=1.0, **stages, **budgets)
    file.add("attention", "xattention", 8192, "smollm2, stride=8 threshold=0.9", ms=0.5, plan_ms=0.2, B=0.4)


def test_methods_have_a_table_of_their_own(file):
    with_methods(file)
    titles = {table.title: table for table in tables(read(file.path))}
    whole, methods = (titles[name] for name in titles if name.startswith(("Whole call and", "Methods")))
    assert {cells[0] for cells in whole.rows} == {"fa2", "cudnn", "kap", "select", "osk", "call"}
    assert {cells[0] for cells in methods.rows} == {"xattention", "mine:a=1"} and len(methods.rows) == 9
    found = row(file, "xattention", "sigma 2, stride=8 threshold=0.9", "8192")
    assert (found["ms"], found["plan ms"], found["attention ms"], found["plan GiB"]) == (
        "8.000",
        "1.000",
        "3.000",
        "0.25",
    )
    assert (found["over FA2"], found["over fastest dense"], found["% of dense peak"]) == ("4.00", "2.00", "25")
    assert (found["B_stage1 %"], found["B %"], found["also"]) == ("30.0", "30.0", "host 1.00 ms")
    captured = row(file, "xattention", "smollm2, stride=8 threshold=0.9")
    assert (captured["over FA2"], captured["B_stage1 %"]) == ("4.00", "-"), "over the dense kernel on those inputs"


# ------------------------------------------------------------------------------ bad files
def test_no_file(tmp_path):
    with pytest.raises(InputError, match=r"bench='.*none.csv': a readable CSV file .*No such file"):
        read(tmp_path / "none.csv")


def test_missing_columns(tmp_path):
    (tmp_path / "rows.csv").write_text("bench,variant,tokens,value\n")
    with pytest.raises(InputError, match="with columns setting, metric, unit, device, torch, triton, commit, command"):
        read(tmp_path / "rows.csv")


@pytest.mark.parametrize("value", ["fast", "nan", "inf", ""])
def test_a_value_that_is_no_number_names_its_line(file, value):
    file.add("kernel", "fa2", 4096, "dense", ms=1)
    file.add("kernel", "fa2", 8192, "dense", ms=value)
    with pytest.raises(InputError, match=rf"rows.csv:3'?: value must be a number, not '{value}'"):
        read(file.path)


def test_other_bad_rows(file):
    with pytest.raises(InputError, match="at least one row"):
        read(file.path)
    file.add("kernel", "fa2", "4K", "dense", ms=1)
    with pytest.raises(InputError, match="tokens must be a number, not '4K'"):
        read(file.path)
    file.path.write_text(",".join(COLUMNS) + "\nkernel,fa2\n")
    with pytest.raises(InputError, match="12 fields a line"):
        read(file.path)


def test_two_devices_are_two_files(file):
    file.add("kernel", "fa2", 4096, "dense", ms=1)
    file.add("kernel", "fa2", 8192, "dense", ms=1, device="GPU Y")
    with pytest.raises(InputError, match="rows of one device; it holds GPU X, GPU Y"):
        read(file.path)


# ------------------------------------------------------------------------------ files
def names(paths):
    return sorted(path.name for path in paths)


def test_every_file_is_written_from_the_command(file, capsys, tmp_path):
    full(file)
    assert cli.main(["report", "--bench", str(file.path), "--out", str(tmp_path / "new" / "out")]) == 0
    figures = [f"{name}.{kind}" for name in ("jumping", "speedup", "stages", "ttft") for kind in ("png", "svg")]
    assert names((tmp_path / "new" / "out").iterdir()) == sorted(["benchmarks.md", *figures])
    output = capsys.readouterr().out
    assert "Time to first token" in output and "over fastest dense" in output


def test_formats_and_a_file_without_figures(file, console):
    file.add("kernel", "fa2", 4096, "dense", ms=1)
    assert names(write_benchmarks(file.path, console=console)) == ["benchmarks.md"]
    full(file)
    assert "speedup.svg" in names(write_benchmarks(file.path, formats=["svg"], console=console))
    assert names(write_benchmarks(file.path, formats=["md"], console=console)) == ["benchmarks.md"]
    with pytest.raises(InputError, match="format='html': for --bench"):
        write_benchmarks(file.path, formats=["html"], console=console)


def test_either_cells_or_a_benchmark_file(capsys):
    assert cli.main(["report", "a", "--bench"]) == 2
    assert "a benchmark file or results directories, one of the two" in capsys.readouterr().err


def test_equal_rows_give_equal_figures(file, console, tmp_path):
    full(file)
    for folder in ("a", "b"):
        write_benchmarks(file.path, tmp_path / folder, formats=["svg"], console=console)
    for name in ("speedup", "jumping", "stages", "ttft"):
        assert (tmp_path / "a" / f"{name}.svg").read_bytes() == (tmp_path / "b" / f"{name}.svg").read_bytes()


# ------------------------------------------------------------------------------ figures
def lines(axis):
    return {line.get_label(): line for line in axis.get_lines()}


def test_speedup_figure(file):
    full(file)
    (axis,) = speed.figures(read(file.path))["speedup"].axes
    found = lines(axis)
    assert set(found) == {"FA2", "cuDNN", "CoSA, stride 8 (20 %)", "CoSA, operating point, sigma 1 (29 to 20 %)"}
    assert list(found["CoSA, stride 8 (20 %)"].get_ydata()) == [7, 7]
    assert list(found["cuDNN"].get_xdata()) == [4096, 8192]


def test_a_method_looks_the_same_in_every_figure(file):
    full(file)
    figures = speed.figures(read(file.path))
    cosa = lines(figures["speedup"].axes[0])["CoSA, stride 8 (20 %)"]
    again = lines(figures["ttft"].axes[0])["CoSA, stride 8"]
    assert (cosa.get_color(), cosa.get_marker()) == (again.get_color(), again.get_marker())
    looks = [(speed._style(name)["color"], speed._style(name)["marker"]) for name in speed.METHODS]
    assert len(set(looks)) == len(speed.METHODS)


def test_jumping_figure(file):
    full(file)
    axes = speed.figures(read(file.path))["jumping"].axes
    assert [axis.get_title("left") for axis in axes if axis.get_visible()] == [
        "25 % of the blocks",
        "50 % of the blocks",
        "jumping over logical skipping, both Triton",
    ]
    assert list(lines(axes[0])["logical skipping, Triton"].get_ydata()) == pytest.approx([8 / 2.125] * 2)
    gains = [line.get_ydata() for line in axes[2].get_lines() if len(line.get_xdata()) == 2][:2]
    assert [list(gain) for gain in gains] == [pytest.approx([1.7 / 1.4] * 2)] * 2


def test_stages_add_up(file):
    full(file)
    for axis in speed.figures(read(file.path))["stages"].axes:
        heights = [patch.get_height() for patch in axis.patches]
        assert sum(heights) == pytest.approx(200) and heights[0] == pytest.approx(100 * 0.1 / 1.15)


def test_methods_figure(file):

    with_methods(file)
    axes = speed.figures(read(file.path))["methods"].axes
    shown = {axis.get_title("left").partition(",")[0]: axis for axis in axes if axis.get_visible()}
    assert list(shown) == ["normal inputs (flat mass)", "sigma 2", "smollm2"]
    curves = lines(shown["sigma 2"])
    assert set(curves) == {"FA2", "cuDNN", "xattention", "mine a=1"}
    assert list(curves["xattention"].get_ydata()) == [2, 4] and list(curves["xattention"].get_xdata()) == [4096, 8192]
    assert set(lines(shown["smollm2"])) == {"FA2", "xattention"}
    looks = {}
    for axis in shown.values():
        for name, line in lines(axis).items():
            looks.setdefault(name, set()).add((line.get_color(), line.get_marker(), line.get_linestyle()))
    assert all(len(found) == 1 for found in looks.values()), "a method looks the same in every panel"
    assert len(set().union(*looks.values())) == len(looks), "and like no other"
    ends = {text.get_text(): text for text in shown["sigma 2"].texts}
    assert set(ends) == {"10 %", "30 %"} and len({text.xy[1] for text in ends.values()}) == 2, "apart at one height"


def test_ttft_figure_of_methods(file):
    full(file)
    file.add("ttft", "xattention", 4096, "stride=8 threshold=0.9", ttft=0.4)
    file.add("ttft", "blasst:skip_scale=5", 4096, "skip_scale=5", ttft=0.8)
    left, right = speed.figures(read(file.path))["ttft"].axes
    assert set(lines(left)) == {"FA2", "CoSA, stride 8", "xattention", "blasst skip_scale=5"}
    measured, gap = lines(right)["xattention"].get_ydata()
    assert measured == 2.5 and math.isnan(gap), "no line over a length that was not measured"
    assert len({(line.get_color(), line.get_marker()) for line in left.get_lines()}) == 4


def test_the_committed_file(console, tmp_path):
    written = write_benchmarks(COMMITTED, tmp_path, console=console)
    assert len(written) == 11
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.startswith("# Benchmarks on NVIDIA H200")
    assert re.search(r"\| call +\| Stage-1 20 %, vote off, stride 8 +\| +131072 \|", text)
    body = [line for line in text.splitlines() if line.startswith("| osk ")]
    assert body and all(
        len(line.split("|")) == len(("variant", "setting", "tokens", *bench.SPEED)) + 2 for line in body
    )


def test_pageweavers_call_and_whole_model(file):
    setting = "toy 65536/8, last 8192 queries, bf16 KV, hopper"
    file.add("pageweaver", "flashinfer", 65536, setting, ms=4, host_plan_ms=12.25, useful_tflops=200, rel_err=0.002)
    file.add(
        "pageweaver", "online_128", 65536, setting, ms=2, regroup_ms=0.05, union_ms=0.02, attention_ms=1.9,
        preparation_share=0.035, mean_union=31.24, mean_halves=38, useful_share=0.51, tflops=420, useful_tflops=214,
        gain=0.0512, gain_low=0.0444, gain_high=0.06, speedup_flashinfer=2, speedup_flashinfer_fp8=2.5, rel_err=0.003,
        break_even_preparation=0.08, break_even_attention_speed=2.3, break_even_native_tflops=214,
        break_even_native_preparation=0.41, host_ms=0.12, graph_ms=1.98,
    )  # fmt: skip
    file.add("pageweaver", "online_128", 0, "geometric mean of 6 captures, bf16 KV, hopper", speedup_flashinfer=1.91)
    file.add("pageweaver", "kv_union", 65536, setting, ms=9, partials=1.25, reduction_ms=3.5)
    file.add("pageweaver", "online_64", 262144, "synthetic ids", regrouped=0)
    file.add("pageweaver", "online_64", 131072, "synthetic ids", gain=-0.00001)
    file.add("pageweaver-model", "original", 65536, "Qwen3 class", prefill=2.5, throughput=26214)
    file.add(
        "pageweaver-model", "online_128", 65536, "Qwen3 class", prefill=2.4, throughput=27306, throughput_gain=0.0417,
        throughput_gain_low=0.04, throughput_gain_high=0.043, throughput_over_flashinfer=0.31,
    )  # fmt: skip
    online = row(file, "online_128", setting)
    assert online["ms"] == "2.000" and online["preparation %"] == "3.5" and online["gain %"] == "5.12"
    assert online["mean union"] == "31.2" and online["useful %"] == "51.0" and online["over its fp8"] == "2.50"
    assert online["95 %"] == "4.44 to 6.00"
    assert online["also"] == (
        "host 0.12 ms, CUDA graph 1.980 ms, halves 38.00, gain gone at 8.0 % preparation, gain gone with the attention "
        "2.3 times as fast, lead gone with FlashInfer at 214 useful TF/s, "
        "lead gone at 41.0 % of its time as preparation"
    )
    assert row(file, "online_64", "synthetic ids", "262144")["also"] == "beyond the bitmaps: not regrouped"
    small = row(file, "online_64", "synthetic ids", "131072")
    assert (small["gain %"], small["95 %"]) == ("0.00", "-"), "what rounds to zero has no sign"
    assert row(file, "flashinfer")["also"] == "plan 12.2 ms of the host, not in ms"
    mean = row(file, "online_128", "geometric mean of 6 captures, bf16 KV, hopper")
    assert mean["tokens"] == "-" and mean["over FlashInfer"] == "1.91" and mean["ms"] == "-"
    assert row(file, "kv_union")["also"] == "partials 1.25 GiB, reduction 3.500 ms"
    model = row(file, "online_128", "Qwen3 class")
    assert (model["95 %"], model["95 % of that"]) == ("4.00 to 4.30", "-")
    assert model["over original %"] == "4.17" and model["over FlashInfer %"] == "31.00" and model["tokens/s"] == "27306"
