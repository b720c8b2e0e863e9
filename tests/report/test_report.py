from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import synthetic

from evalkit.cli import main
from evalkit.errors import EvalkitError, InputError
from evalkit.report import FILES, ReportPaths, table, write_report
from evalkit.report.load import load
from evalkit.report.rows import build_rows


def test_all_files_are_written_and_the_table_is_printed(cells, console, tmp_path):
    cells.demo()
    paths = write_report([cells.out], tmp_path / "new" / "report", console=console)
    written = {name: getattr(paths, name) for name in FILES}
    assert all(path.is_file() and path.stat().st_size > 500 for path in written.values())
    assert {path.name for path in written.values()} == set(FILES.values())
    text = console.file.getvalue()
    assert "tiny, perplexity (essays, last_quarter), 2048 tokens" in text
    assert "cosa p=0.95 order=ascending skip_scale=512" in text
    assert "B_stage1 %" in text and "fallback %" not in text and "warnings" not in text
    assert f"wrote {paths.html}" in text


def test_out_is_the_first_directory_by_default(cells, console):
    cells.perplexity("dense")
    paths = write_report([cells.out], console=console)
    assert paths.csv == cells.out / "report.csv"
    assert paths.png is None and paths.svg is None and paths.pdf is None, "nothing to compare"
    assert paths.html is not None


@pytest.mark.parametrize(
    ("formats", "expected"),
    [(("csv",), {"csv"}), (("md", "tex"), {"markdown", "latex"}), (("svg", "svg"), {"svg"}), ((), set(FILES))],
)
def test_formats(cells, console, tmp_path, formats, expected):
    cells.demo()
    paths = write_report([cells.out], tmp_path / "out", formats=formats, console=console)
    assert {name for name in FILES if getattr(paths, name)} == expected
    plots = {f"pareto{cost}.{name}" for name in expected & {"png", "svg", "pdf"} for cost in ("", "_cost")}
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == plots | {FILES[name] for name in expected - {"png", "svg", "pdf"}}


def test_unknown_format_has_near_matches(cells, console):
    with pytest.raises(InputError, match="format='markdwn': did you mean markdown"):
        write_report([cells.out], formats=["markdwn"], console=console)


def test_out_that_is_a_file(cells, console, tmp_path):
    cells.perplexity("dense")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="out="):
        write_report([cells.out], tmp_path / "file", console=console)


def test_a_missing_twin_writes_nothing(cells, console):
    cells.perplexity(p=0.9, share=0.4)
    with pytest.raises(EvalkitError, match="evalkit run method=dense"):
        write_report([cells.out], console=console)
    assert [path.name for path in cells.out.iterdir()] == ["cells"] and not console.file.getvalue()


def test_csv_has_every_number_in_full(cells, console):
    cells.demo()
    paths = write_report([cells.out], formats=["csv"], console=console)
    frame = pd.read_csv(paths.csv)
    rows = build_rows(load([cells.out]))
    assert len(frame) == len(rows.rows)
    for name in ("value", "low", "high", "difference", "B", "B_cost", "B_pooled", "B_block", "layer_min", "layer_max"):
        expected = [math.nan if getattr(row, name) is None else getattr(row, name) for row in rows.rows]
        np.testing.assert_allclose(frame[name], expected, rtol=1e-12)
    wanted = {"model", "method", "task", "length", "metric", "n", "B_stage1", "fallback_share", "warnings", "level"}
    assert wanted <= set(frame.columns)


def test_markdown_tables_are_whole(cells, console):
    cells.demo()
    few = iter(list(synthetic.perplexity_records(share=0.4))[:1])
    synthetic.write_cell(cells.out, synthetic.config(p=0.5), few, end=lambda store: None, expected=4)
    paths = write_report([cells.out], formats=["markdown"], console=console)
    text = paths.markdown.read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {len(table.COLUMNS) + 1}
    assert "## tiny, ruler (niah_multikey_1, vt), 4096 tokens, by subtask" in text
    assert "vt: accuracy (%)" in text
    notes = text.partition("## Notes")[2]
    assert "left out, abandoned with 1 of 4 samples: tiny cosa select.p=0.5" in notes
    assert "note: left out, abandoned" in console.file.getvalue()


def test_latex_escapes_and_balances(cells, console):
    cells.demo()
    text = write_report([cells.out], formats=["latex"], console=console).latex.read_text()
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 3
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert any(r"hrm\_first" in line for line in body) and not any("hrm_first" in line for line in body)
    assert r"B \%" in text
    assert {line.count(" & ") for line in body if line.rstrip().endswith(r"\\")} == {len(table.COLUMNS) - 1}


def test_html_alone_writes_the_page_and_nothing_else(cells, console, tmp_path):
    cells.demo()
    file = tmp_path / "pages" / "demo.html"
    paths = write_report([cells.out], html=file, console=console)
    assert paths == ReportPaths(html=file) and file.read_text().startswith("<!doctype html>")
    assert [path.name for path in cells.out.iterdir()] == ["cells"]
    paths = write_report([cells.out], tmp_path / "out", formats=["csv"], html=file, console=console)
    assert paths == ReportPaths(csv=tmp_path / "out" / "report.csv", html=file)


def test_html_that_is_a_directory(cells, console):
    cells.perplexity("dense")
    with pytest.raises(InputError, match="html=.*evalkit report DIR --html"):
        write_report([cells.out], html=cells.out, console=console)


def test_the_command_line_puts_the_page_where_it_is_told(cells, tmp_path, capsys):
    cells.demo()
    assert main(["report", str(cells.out), "--html"]) == 0
    assert main(["report", str(cells.out), "--html", str(tmp_path / "x.html")]) == 0
    assert (cells.out / "report.html").read_bytes() == (tmp_path / "x.html").read_bytes()
    assert not (cells.out / "report.md").exists()
    assert main(["report", "--bench", "--html", str(tmp_path / "y.html")]) == 2
    assert "html=" in capsys.readouterr().err


def test_terminal_shows_columns_that_say_something(cells, console):
    cells.perplexity("dense")
    records = synthetic.perplexity_records(share=0.4, damage=0.1, warnings=["w"], fallback=0.25)
    synthetic.write_cell(cells.out, synthetic.config(p=0.9), records)
    write_report([cells.out], formats=["csv"], console=console)
    text = console.file.getvalue()
    assert "fallback %" in text and "25.0" in text and "warnings" in text


def test_dash_for_what_is_undefined(cells):
    cells.perplexity("dense", limit=1)
    cells.perplexity(p=0.9, damage=0.1, share=0.4, limit=1)
    text = table.markdown(build_rows(load([cells.out])))
    (line,) = [line for line in text.splitlines() if "| cosa" in line and "| perplexity" in line]
    fields = [part.strip() for part in line.strip("|").split("|")]
    assert fields[4] == "-" and fields[5].endswith(" -") and fields[5].startswith("+")


@pytest.mark.parametrize(
    ("value", "digits", "sign", "expected"),
    [
        (1.234567, 3, False, "1.235"),
        (1.0, 2, True, "+1.00"),
        (-0.5, 1, True, "-0.5"),
        (None, 2, False, "-"),
        (math.nan, 2, False, "-"),
        (math.inf, 2, False, "inf"),
        (2.5e9, 2, False, "2.5e+09"),
    ],
)
def test_numbers(value, digits, sign, expected):
    assert table.number(value, digits, sign=sign) == expected


def with_work(records, unions):
    """Records that count work of a method's own, one union mean a sample."""
    for (record, frame), union in zip(records, unions, strict=True):
        ratios = {"mean_union": union, "useful_share": 0.5}
        record["budget"]["work"] = {"counts": {"union_pages": 10}, "ratios": ratios}
        yield record, frame


def test_work_of_a_method_has_a_table_of_its_own(cells, console, tmp_path):
    cells.perplexity("dense", limit=2)
    cells.perplexity(p=0.9, limit=2, damage=0.1, share=0.4)
    assert not build_rows(load([cells.out])).work
    records = list(synthetic.perplexity_records(limit=2, share=0.4, damage=0.1))
    records[1][0]["prompt"]["tokens"] //= 2  # longer prompts weigh more
    settings = synthetic.config(p=0.8, limit=2)
    synthetic.write_cell(cells.out, settings, with_work(iter(records), (30.0, 60.0)))
    rows = build_rows(load([cells.out]))
    (work,) = rows.work
    assert (work.method, work.length) == ("cosa p=0.8", "2048")
    assert work.ratios == {"mean_union": pytest.approx(40.0), "useful_share": 0.5}
    text = table.markdown(rows)
    (line,) = [line for line in text.partition("## Executed work")[2].splitlines() if line.startswith("| tiny")]
    assert line.split("|")[1:-1] == [" tiny    ", " cosa p=0.8 ", *line.split("|")[3:-1]] and "40.000" in line
    assert "Executed work" in table.latex(rows)
    write_report([cells.out], tmp_path / "out", console=console)
    assert "Executed work" in console.file.getvalue()


def test_a_number_that_rounds_to_zero_has_no_minus():
    assert table.number(-0.00004, 4) == "0.0000" and table.number(-0.00006, 4) == "-0.0001"
    assert table.number(-0.0, 2, sign=True) == "+0.00"
