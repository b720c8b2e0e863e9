from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from evalkit.report import pareto
from evalkit.report.load import load
from evalkit.report.palette import STYLES
from evalkit.report.rows import build_rows


def rows_of(cells):
    return build_rows(load([cells.out]))


def test_frontier_keeps_what_nothing_beats():
    points = [(50.0, 60.0), (30.0, 50.0), (40.0, 45.0), (100.0, 66.0), (60.0, 60.0), (30.0, 40.0)]
    assert pareto.frontier(points, higher_is_better=True) == [(30.0, 50.0), (50.0, 60.0), (100.0, 66.0)]
    losses = [(x, 100 - y) for x, y in points]
    assert pareto.frontier(losses, higher_is_better=False) == [(30.0, 50.0), (50.0, 40.0), (100.0, 34.0)]


def test_frontier_against_the_definition():
    rng = np.random.default_rng(0)
    for higher in (True, False):
        points = [tuple(point) for point in rng.integers(0, 8, (40, 2)).astype(float)]
        sign = 1 if higher else -1
        expected = {
            (x, y)
            for x, y in points
            if not any(a <= x and sign * b >= sign * y and (a, b) != (x, y) for a, b in points)
        }
        assert set(pareto.frontier(points, higher_is_better=higher)) == expected


def test_dense_that_is_beaten_leaves_the_frontier():
    assert pareto.frontier([(40.0, 70.0), (100.0, 66.0)], higher_is_better=True) == [(40.0, 70.0)]


def test_panels_are_one_for_each_family_and_metric(cells):
    cells.demo()
    found = pareto.panels(rows_of(cells))
    assert [(panel.rows[0].task.split()[0], panel.metric) for panel in found] == [
        ("perplexity", "perplexity"),
        ("perplexity", "kl"),
        ("ruler", "accuracy"),
    ]
    for panel in found:
        assert len({row.group for row in panel.rows}) == 1 and sum(row.dense for row in panel.rows) == 1


def test_averages_stand_for_their_lengths(cells):
    for length in (4096, 8192):
        cells.ruler("dense", length=length)
        cells.ruler(length=length, share=0.4)
    (panel,) = pareto.panels(rows_of(cells))
    assert {row.level for row in panel.rows} == {"average"} and len(panel.rows) == 2


def test_dense_alone_draws_nothing(cells):
    cells.perplexity("dense")
    assert pareto.draw(rows_of(cells)) is None


def drawn(cells):
    rows = rows_of(cells)
    figure = pareto.draw(rows)
    figure.canvas.draw()
    return rows, figure, [axis for axis in figure.axes if axis.get_visible()]


def test_every_point_is_inside_its_panel_and_dense_is_marked(cells):
    cells.demo()
    rows, figure, axes = drawn(cells)
    for axis, panel in zip(axes, pareto.panels(rows), strict=True):
        (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        for row in panel.rows:
            assert left <= row.B <= right and bottom <= row.value <= top
        lines = {line.get_label(): line for line in axis.lines}
        (dense,) = [row for row in panel.rows if row.dense]
        assert lines["dense"].get_xydata().tolist() == [[100.0, dense.value]]
        points = [(row.B, row.value) for row in panel.rows]
        expected = pareto.frontier(points, higher_is_better=panel.metric == "accuracy")
        assert lines["frontier"].get_xydata().tolist() == [list(point) for point in expected]
        assert "realized budget B" in axis.get_xlabel()
        better = "higher" if panel.metric == "accuracy" else "lower"
        assert better in axis.get_ylabel()


def test_the_same_points_against_what_they_cost(cells):
    cells.demo()
    rows = rows_of(cells)
    figure = pareto.draw(rows, "B_cost")
    for axis, panel in zip(figure.axes, pareto.panels(rows), strict=False):
        shown = {tuple(point) for bars in axis.containers for point in bars.lines[0].get_xydata()}
        assert shown == {(row.B_cost, row.value) for row in panel.rows if not row.dense}
        assert all(row.B_cost > row.B for row in panel.rows if "skip, " in row.series), "QK of skipped blocks is paid"
        assert "B_cost" in axis.get_xlabel()


def test_losses_over_orders_of_magnitude_are_told_apart(cells):
    cells.perplexity("dense")
    for share, damage in ((0.2, 0.8), (0.4, 0.02)):
        cells.perplexity("cosa", p=share, damage=damage, share=share)
    rows, _, axes = drawn(cells)
    for axis, panel in zip(axes, pareto.panels(rows), strict=True):
        assert (axis.get_yscale() == "symlog") == (panel.metric == "kl")
        assert all(axis.get_ylim()[0] < row.value < axis.get_ylim()[1] for row in panel.rows)


def test_legend_is_outside_and_names_each_series_once(cells):
    cells.demo()
    _, figure, axes = drawn(cells)
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["dense", "cosa, no skip", "cosa, skip, ascending", "cosa, skip, hrm_first", "frontier"]
    box = legend.get_window_extent()
    for axis in axes:
        assert not box.overlaps(axis.get_tightbbox())
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_series_of_a_method_share_its_colour_and_differ_in_shape_across_panels(cells):
    cells.demo()
    _, _, axes = drawn(cells)
    looks = {}
    for axis in axes:
        for container in axis.containers:
            points = container.lines[0]
            look = (to_hex(points.get_color()), points.get_marker(), to_hex(points.get_markerfacecolor()) != "#ffffff")
            looks.setdefault(container.get_label(), set()).add(look)
    assert len(looks) == 3 and all(len(found) == 1 for found in looks.values())
    shown = [next(iter(found)) for found in looks.values()]
    assert {colour for colour, _, _ in shown} == {STYLES["cosa"].colour.lower()}
    assert len({(marker, filled) for _, marker, filled in shown}) == 3


def test_a_series_has_the_style_of_the_palette(cells):
    cells.demo()
    _, _, axes = drawn(cells)
    for axis in axes:
        for container in axis.containers:
            style, points = STYLES[container.get_label()], container.lines[0]
            assert to_hex(points.get_color()) == style.colour.lower() and points.get_marker() == style.marker
            assert (to_hex(points.get_markerfacecolor()) == style.colour.lower()) == style.filled


def test_a_bound_is_drawn_but_on_no_frontier(cells):
    cells.perplexity("dense")
    cells.perplexity("cosa", p=0.9, damage=0.1, share=0.4)
    cells.perplexity("oracle_topk", p=0.5, damage=0.05, share=0.2)
    rows, _, axes = drawn(cells)
    for axis, panel in zip(axes, pareto.panels(rows), strict=True):
        lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        (bound,) = [[row.B, row.value] for row in panel.rows if row.series == "oracle_topk"]
        assert len(lines["frontier"]) == 2 and bound not in lines["frontier"]
        assert "oracle_topk" in {container.get_label() for container in axis.containers}


def test_titles_stay_inside_the_figure(cells):
    names = {f"niah_multikey_{i}": [1.0, 0.0] for i in (1, 2)}
    cells.ruler("dense", names, model="a-model-with-a-long-name-" * 2)
    cells.ruler("cosa", names, share=0.4, model="a-model-with-a-long-name-" * 2)
    _, figure, axes = drawn(cells)
    for axis in axes:
        box = axis._left_title.get_window_extent()
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_same_numbers_give_the_same_file(cells, kind):
    cells.demo()
    rows = rows_of(cells)
    first, second = (pareto.render(pareto.draw(rows), kind) for _ in range(2))
    assert first == second
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])
