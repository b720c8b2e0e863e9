from __future__ import annotations

import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb
from prefill_kernels import PagedKV

from evalkit.analysis import figures, rowmax, work
from evalkit.analysis.figures import PLACES
from evalkit.analysis.rowmax import head_counts, representative, row_maxima
from evalkit.analysis.settings import RowmaxAnalysis
from evalkit.errors import InputError


def test_row_maxima_are_those_of_the_whole_matrix(call_inputs, monkeypatch):
    q, kv, _ = call_inputs(length=333)
    k = kv.gather()[0].repeat_interleave(2, 1)
    logits = (q @ k.mT).masked_fill(torch.ones(333, 333).triu(1).bool(), -torch.inf)
    monkeypatch.setattr(rowmax, "MAX_LOGITS", 64 * 333 * 2)
    for head, where in row_maxima(q, kv, 64):
        assert torch.equal(where, logits[0, head].argmax(-1))


def test_planted_maxima_are_counted():
    # Blocks of 4, 11 tokens: rows 4..7 are tile 1, rows 8..10 tile 2; tile 0 is in no share.
    where = torch.tensor([0, 1, 0, 2, 3, 4, 5, 0, 6, 7, 9])
    found = head_counts(where, 4)
    # Row 4 -> block 0 and row 7 -> block 0: sink; rows 5, 6 -> block 1 and row 10 -> block 2: diagonal; 8, 9 elsewhere.
    assert {k: found[k] for k in ("sink", "diagonal", "elsewhere", "rows")} == {
        "sink": 2, "diagonal": 3, "elsewhere": 2, "rows": 7,
    }  # fmt: skip
    # Tile 0: block 0. Tile 1: blocks 0 and 1. Tile 2: blocks 1 and 2.
    assert (found["max_blocks"], found["causal_blocks"], found["tiles"]) == (5, 6, 3)


def test_a_planted_key_draws_every_row():
    length, dim = 300, 8
    k = torch.zeros(1, 1, length, dim)
    k[0, 0, 130] = 5.0
    k[0, 0, 0, 0] = 1.0
    q = torch.ones(1, 2, length, dim)
    q[0, 1] = -1  # the second head flees the planted key and ties on zeros: the first of them wins
    q[0, 1, :, 0] = 1.0
    found = dict(row_maxima(q, PagedKV.from_dense(k, k, 64), 64))
    assert found[0][130:].eq(130).all() and found[0][:130].eq(0).all()
    assert found[1].eq(0).all()
    counts = head_counts(found[0], 64)
    assert counts["elsewhere"] == 300 - 192 and counts["diagonal"] == 192 - 130 and counts["sink"] == 130 - 64


def test_representative_heads_are_the_extremes():
    table = pd.DataFrame(
        [(0, 0, 0.9, 0.1, 0.0), (0, 1, 0.2, 0.7, 0.1), (1, 0, 0.95, 0.05, 0.0), (1, 1, 0.3, 0.2, 0.5)],
        columns=["layer", "head", "sink", "diagonal", "elsewhere"],
    )
    assert representative(table) == [(1, 0), (0, 1), (1, 1)]
    both = table.iloc[:1].assign(diagonal=1.0, elsewhere=1.0)
    assert representative(both) == [(0, 0)], "no head is shown twice"


def test_whole_analysis(settings_for, capsys):
    settings = settings_for(RowmaxAnalysis, shown=("1:3", "0:0"), block_size=64)
    assert rowmax.run(settings, "evalkit analyze rowmax") == 0
    table = pd.read_csv("out/rowmax.csv")
    assert len(table) == 8 and (table[["sink", "diagonal", "elsewhere"]].sum(axis=1) - 1).abs().max() < 1e-6
    assert table["max_blocks"].between(0, 1).all() and (table["blocks_a_tile"] >= 1).all()
    maps = pd.read_parquet("out/rowmax_maps.parquet")
    assert set(zip(maps["layer"], maps["head"], strict=True)) == {(1, 3), (0, 0)}
    dots = maps[(maps["kind"] == "max") & (maps["head"] == 3)]
    assert (dots["key"] <= dots["row"]).all()
    mass = maps[maps["kind"] == "mass"].groupby(["layer", "row"])["value"].sum()
    assert (mass - 1).abs().max() < 1e-4, "a row's attention adds up to one"
    assert "layer 1 head 3" in capsys.readouterr().out


def test_a_head_the_model_does_not_have(settings_for, monkeypatch):
    monkeypatch.setattr(work, "load_model", None)  # refused before the weights are loaded
    with pytest.raises(InputError, match="shown='2:0': layers below 2 and heads below 4"):
        rowmax.run(settings_for(RowmaxAnalysis, shown=("2:0",)), "c")


def grey(colour):
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_picture_can_be_read_in_grey():
    """Places differ in lightness and hatch; dots have a rim that is light where the map is dark."""
    table = pd.DataFrame([(0, 0, 0.5, 0.3, 0.2, 0.4)], columns=["layer", "head", *PLACES, "max_blocks"])
    rows = [(0, 0, "mass", 0, 0, 1.0), *((0, 0, "max", row, 0, 1.0) for row in range(8))]
    maps = pd.DataFrame(rows, columns=["layer", "head", "kind", "row", "key", "value"])
    image, bars = figures.draw_rowmax(table, maps, [(0, 0)], 8, "t").axes[:2]
    drawn = [(grey(box[0].get_facecolor()[:3]), box[0].get_hatch()) for box in bars.containers]
    shades = sorted(shade for shade, _ in drawn)
    assert len(drawn) == 3 and len({hatch for _, hatch in drawn}) == 3
    assert all(b - a > 0.2 for a, b in zip(shades, shades[1:], strict=False))
    rim, dots = image.lines
    assert rim.get_markersize() > dots.get_markersize() and rim.get_zorder() <= dots.get_zorder()
    assert grey(rim.get_color()) - grey(dots.get_color()) > 0.5
