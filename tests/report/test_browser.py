"""The page in a real browser: skipped where there is none (Debian: apt-get install chromium-headless-shell)."""

from __future__ import annotations

import re

import chromium
import numpy as np
import pytest
import synthetic

from evalkit.report import pareto, table
from evalkit.report.load import Loaded, find_twins, load
from evalkit.report.page import build, page
from evalkit.report.page.budgets import pack
from evalkit.report.rows import build_rows

pytestmark = pytest.mark.skipif(
    chromium.executable() is None,
    reason=f"no Chromium: none of {', '.join(chromium.NAMES)} on the PATH, and CHROMIUM names none",
)


@pytest.fixture(scope="module")
def browser():
    with chromium.Browser(chromium.executable()) as started:
        yield started


@pytest.fixture(scope="module")
def demo(cell_factory, tmp_path_factory):
    """A page with several methods, subtasks, a suspect, a fallback, a warning and an unfinished cell."""
    folder = tmp_path_factory.mktemp("demo")
    cells = cell_factory(folder / "runs")
    cells.demo()
    cells.ruler("xattention", p=0.7, share=0.5)
    cells.perplexity("minference", p=0.9, damage=-0.4, share=0.5)
    cells.perplexity("oracle_topk", p=0.6, damage=0.01, share=0.12)
    records = synthetic.perplexity_records(share=0.3, damage=0.1, warnings=[synthetic.HOSTILE], fallback=0.25)
    synthetic.write_cell(cells.out, synthetic.config("flexprefill", p=0.8), records)
    few = iter(list(synthetic.perplexity_records(share=0.4))[:1])
    synthetic.write_cell(cells.out, synthetic.config(p=0.5), few, end=lambda store: None, expected=4)
    return write(load([cells.out]), folder)


def write(loaded, tmp_path, change=lambda document: None):
    rows = build_rows(loaded)
    document = build(loaded, rows)
    change(document)
    file = tmp_path / "report.html"
    file.write_text(page(document), encoding="utf-8")
    return file, rows, document


def places(tab):
    """Transform of each point by its row."""
    script = (
        "Object.fromEntries([...document.querySelectorAll('#chart .point')]"
        ".map(p => [p.dataset.row, p.getAttribute('transform')]))"
    )
    found = tab.evaluate(script)
    return {int(row): tuple(map(float, re.findall(r"[-\d.]+", text))) for row, text in found.items()}


def card(tab):
    return tab.evaluate("document.querySelector('#card').innerText")


def choose(tab, selector, value):
    tab.evaluate(
        f"(() => {{ const e = document.querySelector({selector!r}); e.value = {value!r};"
        "e.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def search(tab, text):
    tab.evaluate(
        f"(() => {{ const e = document.querySelector('#filter'); e.value = {text!r};"
        "e.dispatchEvent(new Event('input')); })()"
    )


def press(tab, selector):
    tab.click(*tab.place(selector))


def test_opens_from_disk_without_a_complaint(browser, demo):
    file, rows, _ = demo
    tab = browser.open(file)
    assert tab.problems() == []
    seen = tab.evaluate("document.querySelector('#answer').innerText")
    assert "keep" in seen and "realized budget of" in seen and "n = 4" in seen
    assert tab.evaluate("document.querySelector('#answers').getBoundingClientRect().top") < 400
    assert "No sparse" not in seen


def test_tables_show_what_the_table_module_writes(browser, demo):
    file, rows, _ = demo
    tab = browser.open(file)
    script = (
        "[...document.querySelectorAll('#table-list details')].map(part => {{ part.open = true; part.fill();"
        "return [...part.querySelectorAll('{} tr')].map(row => [...row.children].map(cell => cell.textContent)); }})"
    )
    bodies = tab.evaluate(script.format("tbody"))
    expected = [
        [[column.text(row) for column in table.COLUMNS] for row in section.rows]
        for section in table.sections(rows.level("cell", "average"))
    ]
    # Subtasks stand between the sections of the other reports; here they have a part of their own.
    assert bodies == expected
    titles = [column.title for column in table.COLUMNS]
    assert all(head == [titles] for head in tab.evaluate(script.format("thead")))


def test_points_stand_where_their_numbers_say(browser, demo):
    file, rows, document = demo
    tab = browser.open(file)
    found = places(tab)
    panel = document["panels"][document["answers"][0]["panel"]]
    assert set(found) == set(panel["rows"])
    members = [rows.rows[at] for at in panel["rows"]]
    x, y = np.array([found[at] for at in panel["rows"]]).T
    for values, pixels, sign in [([row.B for row in members], x, 1), ([row.value for row in members], y, -1)]:
        slope, offset = np.polyfit(values, pixels, 1)
        assert slope * sign > 0
        np.testing.assert_allclose(pixels, slope * np.array(values) + offset, atol=0.02)
    # The frontier passes through the points that the static figure's passes through.
    methods = [(row.B, row.value) for row in members if row.series != "oracle_topk"]
    line = pareto.frontier(methods, higher_is_better=False)
    path = tab.evaluate("document.querySelector('.frontier').getAttribute('d')")
    assert len(re.findall("V", path)) == len(line) - 1
    corners = [float(value) for value in re.findall(r"[HM]([\d.]+)", path)]
    at = {row.B: found[number][0] for number, row in zip(panel["rows"], members, strict=True)}
    np.testing.assert_allclose(corners, [at[budget] for budget, _ in line], atol=0.06)


def test_the_axis_switch_moves_points_and_keeps_values(browser, demo):
    file, rows, document = demo
    tab = browser.open(file)
    before = places(tab)
    press(tab, "#axis input[value=B_cost]")
    after = places(tab)
    assert set(after) == set(before) and after != before
    assert all(before[at][1] == after[at][1] for at in before), "the value does not change"
    x, costs = zip(*((after[at][0], rows.rows[at].B_cost) for at in after), strict=True)
    np.testing.assert_allclose(x, np.polyval(np.polyfit(costs, x, 1), costs), atol=0.02)
    assert "B_cost" in tab.evaluate("document.querySelector('#chart svg').textContent")
    press(tab, "#axis input[value=seconds]")
    assert len({x for x, _ in places(tab).values()}) == 1, "every synthetic cell took as long"
    assert "prefill time" in tab.evaluate("document.querySelector('#chart svg').textContent")


AXES = {
    "B": "realized budget B (% of dense)",
    "B_cost": "B_cost: QK, V and selection work (% of dense)",
    "seconds": "measured prefill time (s a sample, median)",
}


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_is_titled_by_what_it_shows(browser, demo, axis):
    file, _, _ = demo
    tab = browser.open(file)
    if axis != "B":
        press(tab, f"#axis input[value={axis}]")
    below, beside = tab.evaluate("[...document.querySelectorAll('#chart .title')].map(t => t.textContent)")
    assert below == AXES[axis] and beside == "perplexity (lower is better)"
    assert f"against {AXES[axis]};" in tab.evaluate("document.querySelector('#chart svg').getAttribute('aria-label')")


def test_a_method_is_toggled_with_mouse_and_keyboard(browser, demo):
    file, rows, _ = demo
    tab = browser.open(file)
    before = places(tab)
    press(tab, "#legend [data-series='minference']")
    hidden = places(tab)
    assert set(before) - set(hidden) == {at for at in before if rows.rows[at].series == "minference"} != set()
    assert all(hidden[at] == before[at] for at in hidden), "nothing else moves"
    assert tab.evaluate("document.querySelector('#legend [data-series=minference]').ariaPressed") == "false"
    tab.evaluate("document.querySelector('#legend [data-series=minference]').focus()")
    tab.key(" ")
    assert places(tab) == before


def test_hover_shows_the_cell_and_a_click_pins_it(browser, demo):
    file, rows, document = demo
    tab = browser.open(file)
    found = places(tab)
    at = next(at for at in found if rows.rows[at].series == "minference")
    row = rows.rows[at]
    tab.move(*tab.place(f"#chart [data-row='{at}']"))
    text = card(tab)
    assert row.method in text and "method.select.p\n0.9" in text and "evalkit run model=tiny method=minference" in text
    for column in table.COLUMNS[2:]:
        assert column.text(row) in text
    assert f"bootstrap (95 %)\n{table.bootstrap_text(row)}" in text and row.difference_bootstrap_low < 0
    for title in ("B_stage1 %", "B_cost %", "95 % interval", "prefill time", "\nn\n"):
        assert title in text
    assert "0.100 s a sample" in text and "Suspect" in text, "it beats dense"
    press(tab, f"#chart [data-row='{at}']")
    other = next(other for other in found if other != at and not rows.rows[other].dense)
    tab.move(*tab.place(f"#chart [data-row='{other}']"))
    assert card(tab) == text
    press(tab, f"#chart [data-row='{other}']")
    assert rows.rows[other].method in card(tab)


def test_the_keyboard_reaches_every_point(browser, demo):
    file, rows, _ = demo
    tab = browser.open(file)
    found = places(tab)
    assert tab.evaluate("document.querySelectorAll('#chart [tabindex=\"0\"]').length") == 1
    press(tab, "#plot-title")
    for _ in range(40):
        tab.key("Tab")
        if tab.evaluate("document.activeElement.classList.contains('point')"):
            break
    focused = "Number(document.activeElement.dataset.row)"
    order = [tab.evaluate(focused)]
    assert rows.rows[order[0]].method in card(tab), "focus alone shows the card"
    for _ in range(len(found) - 1):
        tab.key("ArrowRight")
        order.append(tab.evaluate(focused))
        row = rows.rows[order[-1]]
        assert row.method in card(tab) and table.value_text(row) in card(tab)
        label = tab.evaluate("document.activeElement.getAttribute('aria-label')")
        assert row.method in label and table.value_text(row) in label
    assert sorted(order) == sorted(found)
    assert [found[at][0] for at in order] == sorted(x for x, _ in found.values())
    tab.key("Home")
    assert tab.evaluate(focused) == order[0]
    tab.key("Tab")
    assert not tab.evaluate("document.activeElement.classList.contains('point')"), "one stop, not one a point"


def test_the_answer_follows_the_margin_and_leads_to_its_point(browser, demo):
    file, rows, document = demo
    tab = browser.open(file)
    for at in range(len(document["margins"])):
        choose(tab, "#margin", str(at))
        seen = tab.evaluate("document.querySelector('#answers').innerText")
        assert all(answer["verdicts"][at]["text"] in seen for answer in document["answers"])
    press(tab, "#answers li:last-child button")
    wanted = document["answers"][-1]
    assert tab.evaluate("Number(document.activeElement.dataset.row)") == wanted["verdicts"][-1]["row"]
    assert rows.rows[wanted["verdicts"][-1]["row"]].method in card(tab)
    assert tab.evaluate("document.querySelector('#metric').selectedOptions[0].text") == "accuracy"


def test_heat_maps_subtasks_and_problems(browser, demo):
    file, rows, document = demo
    tab = browser.open(file)
    layers = tab.evaluate(
        "[...document.querySelectorAll('#layers tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    shown = [rows.rows[at] for at in document["panels"][document["answers"][0]["panel"]]["rows"]]
    cells = {cell["key"]: cell for cell in document["cells"]}
    expected = [cells[row.key]["budget"]["layers"] for row in shown]
    assert [line[0] for line in layers] == [row.method for row in shown]
    for line, values in zip(layers, expected, strict=True):
        np.testing.assert_allclose([float(text) for text in line[1:]], values, atol=0.501)
    press(tab, "#layers tbody tr:last-child button")
    heads = tab.evaluate("[...document.querySelectorAll('#heads tbody td')].map(c => Number(c.textContent))")
    assert layers[-1][0] in tab.evaluate("document.querySelector('#heads h3').textContent")
    assert len(heads) == synthetic.LAYERS * synthetic.HEADS
    assert heads == pytest.approx(np.repeat(expected[-1], synthetic.HEADS), abs=0.51)
    parts = tab.evaluate(
        "[...document.querySelectorAll('#breakdown tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    given = {row.method: {} for row in rows.level("subtask")}
    for row in rows.level("subtask"):
        given[row.method][row.subtask] = table.value_text(row)
    assert {line[0]: [text.split()[0] for text in line[1:]] for line in parts} == {
        method: list(values.values()) for method, values in given.items()
    }
    problems = tab.evaluate("document.querySelector('#problems').innerText")
    for said in ("unfinished", "better than dense", "dense fallback", "25.0 %", synthetic.HOSTILE[:30]):
        assert said in problems


def test_filter_and_sort(browser, demo):
    file, _, _ = demo
    tab = browser.open(file)
    methods = "[...document.querySelectorAll('#table-list details:first-child tbody th')].map(c => c.textContent)"
    search(tab, "minfer")
    assert {name.split()[0] for name in tab.evaluate(methods)} == {"dense", "minference"}
    search(tab, "")
    press(tab, "#table-list details:first-child [data-column='6']")
    budgets = tab.evaluate(
        "[...document.querySelectorAll('#table-list details:first-child tbody tr')]"
        ".map(r => [r.children[1].textContent, Number(r.children[6].textContent)])"
    )
    mine = [value for metric, value in budgets if metric == "perplexity"]
    assert mine == sorted(mine) and len(mine) > 5 and budgets[0][0] == budgets[len(mine) - 1][0] == "perplexity"


def test_a_hostile_store_injects_nothing(browser, cells, tmp_path):
    cells_in_memory = synthetic.cell_results(8, group=8, hostile=synthetic.HOSTILE)
    file, rows, _ = write(Loaded(cells_in_memory, find_twins(cells_in_memory), [synthetic.HOSTILE]), tmp_path)
    tab = browser.open(file)
    assert tab.problems() == []
    at = next(iter(places(tab)))
    tab.move(*tab.place(f"#chart [data-row='{at}']"))
    tab.evaluate("document.querySelector('#commands').open = true")
    tab.wait("document.querySelector('.commands')")
    assert tab.evaluate("typeof window.hacked") == "undefined"
    assert tab.evaluate("document.querySelectorAll('img, iframe, object, link, base').length") == 0
    assert tab.evaluate("document.scripts.length") == 2
    assert synthetic.HOSTILE[:30] in card(tab) and synthetic.HOSTILE[:30] in tab.evaluate(
        "document.querySelector('#where').textContent"
    )
    # Were something to get in after all, the policy would still not run it.
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 3'}))"
    )
    assert tab.evaluate("typeof window.hacked") == "undefined"


def test_two_thousand_cells_are_quick(browser, tmp_path):
    many = synthetic.cell_results(2000, group=1000)
    rng = np.random.default_rng(0)

    def with_budgets(document):
        for cell in document["cells"]:
            cell["budget"] = pack(rng.random((36, 32)))

    file, _, _ = write(Loaded(many, find_twins(many), []), tmp_path, with_budgets)
    tab = browser.open(file)
    assert tab.problems() == []
    assert tab.evaluate("performance.now()") < 5000
    assert len(places(tab)) == 1000
    milliseconds = tab.evaluate(
        "(() => { const t = performance.now(); document.querySelector('#axis input[value=seconds]').click();"
        "document.querySelector('#chart svg').getBoundingClientRect(); return performance.now() - t; })()"
    )
    assert milliseconds < 1000
    lines = "document.querySelectorAll('#table-list details:first-child tbody tr').length"
    assert tab.evaluate(lines) == 200, "long tables come in portions"
    press(tab, "#table-list details:first-child .more")
    assert tab.evaluate(lines) == 400


@pytest.mark.parametrize(("width", "phone"), [(1366, False), (390, True)])
@pytest.mark.parametrize("dark", [False, True])
def test_screens_and_colours(browser, demo, tmp_path, width, phone, dark):
    file, _, _ = demo
    tab = browser.open(file, width=width, height=800, phone=phone, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "only tables scroll sideways"
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light != dark
    press(tab, "#theme")
    assert light != (tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)")


def test_prints_light_and_whole(browser, demo):
    file, _, document = demo
    tab = browser.open(file, dark=True)
    tab.evaluate(
        "addEventListener('afterprint', () => {}); addEventListener('beforeprint', () => window.printed = "
        "[document.documentElement.dataset.theme, document.querySelectorAll('details.part:not([open])').length, "
        "document.querySelectorAll('.commands li').length])"
    )
    assert tab.pdf().startswith(b"%PDF")
    tab.wait("window.printed")
    assert tab.evaluate("window.printed") == ["light", 0, len(document["cells"])]
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
