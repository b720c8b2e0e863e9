// What the page does: one state, and what follows from it.
const data = JSON.parse(by("document").textContent);
data.list = rowsOf(data);
const styleOf = new Map(data.series.map((series) => [series.name, series]));
const state = {
  panel: 0, axis: "B", hidden: new Set(), row: null, focused: false, pinned: false, filter: "", margin: data.margin,
};
let plot = null;

// ------------------------------------------------------------------------------------------------------------- answer
function drawAnswers() {
  const list = by("answers");
  const item = (answer) => {
    const verdict = answer.verdicts[state.margin];
    const go = verdict.row === null ? null : el("button", {
      type: "button", class: "link",
      onclick: () => {
        choose(answer.panel);
        state.pinned = true;
        plot.select(verdict.row, true);
        by("plot").scrollIntoView();
      },
    }, "Show in the plot");
    return el("li", { class: verdict.kept ? "kept" : "not" }, el("strong", {}, answer.heading), el("span", {}, ` ${verdict.text} `), go);
  };
  list.replaceChildren();
  by("answer").querySelectorAll(".more").forEach((old) => old.remove());
  list.after(portions(list, data.answers, item, 6, "answers"));
  if (!data.answers.length) list.append(el("li", { class: "not" }, "No sparse cell with accuracy or perplexity is here to compare."));
}

// --------------------------------------------------------------------------------------------------------------- plot
const placeOf = (panel) => JSON.stringify([panel.model, panel.task, panel.length]);

function choose(panel) {
  if (state.panel !== panel) state.row = null;
  state.panel = panel;
  const here = data.panels[panel];
  by("where").value = placeOf(here);
  const metrics = data.panels.map((other, at) => [other, at]).filter(([other]) => placeOf(other) === placeOf(here));
  by("metric").replaceChildren(...metrics.map(([other, at]) => el("option", { value: at }, data.metrics[other.metric].name)));
  by("metric").value = String(panel);
  if (!here.rows.some((id) => data.list[id][state.axis] !== null)) setAxis("B");
  for (const input of by("axis").querySelectorAll("input")) {
    input.disabled = !here.rows.some((id) => data.list[id][input.value] !== null);
  }
  drawLegend();
  redraw();
  drawLayers(by("layers"), by("heads"), data, here);
}

function setAxis(axis) {
  state.axis = axis;
  for (const input of by("axis").querySelectorAll("input")) input.checked = input.value === axis;
}

function redraw() {
  const chart = by("chart");
  state.focused = chart.contains(document.activeElement);
  plot = drawPlot(chart, data, state, showCard);
  const panel = data.panels[state.panel];
  const lacking = plot.missing ? ` ${plot.missing} of them have no measured time and are not shown.` : "";
  const device = state.axis === "seconds" ? ` ${deviceOf(panel)}` : "";
  by("chart-note").textContent =
    `${panel.model}, ${panel.task}, ${panel.length} tokens: ${panel.rows.length} cells, n up to ${panel.n}.${lacking}${device} ` +
    "Star and dashed line: the dense twin, the band its 95 % interval. Bars: 95 % interval of the paired difference to dense, or of the value where there is none. Grey steps: " +
    "frontier of what is shown. A dashed outline marks a suspect.";
}

function deviceOf(panel) {
  const used = new Set(panel.rows.flatMap((id) => data.list[id].cells).map((cell) => data.cells[cell].environment));
  const names = [...used].map((at) => data.environments[at].split(";")[0]);
  return `Times as measured on ${[...new Set(names)].join(" and ")}.`;
}

function drawLegend() {
  const panel = data.panels[state.panel];
  const names = data.series.filter((series) => panel.rows.some((id) => data.list[id].series === series.name));
  const toggle = (series) => {
    const mark = svg("svg", { viewBox: "-9 -9 18 18", width: 18, height: 18, "aria-hidden": "true" },
      svg("path", { class: "point", d: markerPath(series.marker, series.marker === "*" ? 9 : 10) }));
    const button = paint(el("button", { type: "button", "data-series": series.name, "aria-pressed": String(!state.hidden.has(series.name)) },
      mark, series.name), series);
    button.addEventListener("click", () => {
      const hide = !state.hidden.has(series.name);
      if (hide) state.hidden.add(series.name);
      else state.hidden.delete(series.name);
      button.setAttribute("aria-pressed", String(!hide));
      redraw();
    });
    return button;
  };
  by("legend").replaceChildren(...names.map(toggle));
}

// --------------------------------------------------------------------------------------------------------------- card
function fact(name, value) {
  return [el("dt", {}, name), el("dd", {}, value)];
}

function showCard(row) {
  state.row = row.id;
  const panel = data.panels[state.panel];
  const cells = row.cells.map((at) => data.cells[at]);
  const shown = data.columns.map((column, at) => [column.title, row.text[at]]).filter(([title]) => !["method", "metric"].includes(title));
  const facts = [[row.text[1], row.text[2]], ...shown.filter(([title]) => title !== "value")];
  if (row.bootstrap !== null) facts.push(["to dense, bootstrap (95 %)", row.bootstrap]);
  facts.push(["prefill time", row.seconds === null ? "not measured" : `${row.seconds.toPrecision(3)} s a sample (median)`]);
  const style = styleOf.get(row.series);
  const title = paint(el("h3", {}, svg("svg", { viewBox: "-9 -9 18 18", width: 18, height: 18, "aria-hidden": "true" },
    svg("path", { class: "point", d: markerPath(style.marker, style.marker === "*" ? 9 : 10) })), row.text[0]), style);
  const warnings = [...new Set(cells.flatMap((cell) => cell.warnings))].map((text) => el("p", { class: "warn" }, text));
  by("card").replaceChildren(...[
    title,
    el("p", { class: "small" }, `${panel.model}, ${panel.task}, ${panel.length} tokens`),
    row.suspect ? el("p", { class: "warn" }, "Suspect: see Failures and suspects.") : null,
    el("dl", {}, ...facts.flatMap(([name, value]) => fact(name, value))),
    ...warnings,
    ...cells.filter((cell) => cell.command).map((cell) => commandLine(cell.command)),
    el("details", { open: true }, el("summary", {}, "Settings"),
      el("dl", {}, ...cells[0].settings.flatMap(([name, value]) => fact(name, value)))),
  ].filter(Boolean));
  by("said").textContent = "";
}

function commandLine(text) {
  const code = el("code", {}, text);
  const copy = el("button", { type: "button", class: "plain" }, "Copy");
  copy.addEventListener("click", () => {
    // Pages from disk may lack the clipboard: the text is then selected, ready to be copied.
    const select = () => getSelection().selectAllChildren(code);
    const say = (what) => (by("said").textContent = what);
    if (!navigator.clipboard) select();
    else navigator.clipboard.writeText(text).then(() => say("Command copied"), select);
  });
  return el("p", { class: "command" }, code, " ", copy);
}

// --------------------------------------------------------------------------------------------------- tables and others
function drawTables() {
  const whole = data.sections.filter((section) => !section.subtasks);
  const count = whole.reduce((sum, section) => sum + section.rows.length, 0);
  let room = 400;
  by("table-list").replaceChildren(...whole.map((section, at) => {
    room -= section.rows.length;
    return folded(`${section.heading} (${section.rows.length} rows)`, at === 0 || room > 0 || count <= 400, () => resultTable(data, section, state));
  }));
  const parts = data.sections.filter((section) => section.subtasks);
  by("breakdown").replaceChildren(...parts.map((section, at) =>
    folded(section.heading.replace(/, by subtask$/, ""), at === 0, () => breakdown(data, section))));
  if (!parts.length) by("breakdown").append(el("p", { class: "small" }, "No task here has parts."));
}

const KINDS = {
  failed: "failed", unfinished: "unfinished", below: "below published", suspect: "better than dense", torch: "torch reference", fallback: "dense fallback",
  warning: "warning", note: "note",
};

function drawProblems() {
  const box = by("problems");
  if (!data.problems.length) {
    box.append(el("p", {}, "Nothing: all cells are finished, none beats dense beyond its interval, none fell back."));
    return;
  }
  const body = el("tbody", {});
  const line = (problem) => el("tr", { class: `problem ${problem.kind}` },
    el("th", { scope: "row", class: "left" }, KINDS[problem.kind]),
    el("td", { class: "left text" }, problem.where ? el("strong", {}, problem.where) : null, problem.where ? ": " : null, problem.text));
  const more = portions(body, data.problems, line, 100, "lines");
  box.append(wide(el("table", {}, body)), more);
}

function drawProvenance() {
  const cells = data.cells;
  by("environments").append(...data.environments.map((text, at) => {
    const count = cells.filter((cell) => cell.environment === at).length;
    return el("li", {}, `${count} ${count === 1 ? "cell" : "cells"}: ${text}`);
  }));
  const details = by("commands");
  const into = details.lastElementChild;
  details.fill = () => {
    if (into.firstChild) return;
    const list = el("ul", { class: "commands" });
    const line = (cell) => el("li", {}, el("span", { class: "small" }, `${cell.method} (${cell.key})`),
      cell.command ? commandLine(cell.command) : el("p", {}, "The cell was stored without its command."));
    into.append(list, portions(list, cells, line, 100, "commands"));
  };
  details.addEventListener("toggle", () => details.open && details.fill());
}

// -------------------------------------------------------------------------------------------------------------- theme
const root = document.documentElement;
const preferred = matchMedia("(prefers-color-scheme: dark)");

function theme(name) {
  root.dataset.theme = name;
  by("theme").textContent = name === "dark" ? "Light" : "Dark";
  by("theme").setAttribute("aria-label", `Switch to ${name === "dark" ? "light" : "dark"} colours`);
}

theme(preferred.matches ? "dark" : "light");
preferred.addEventListener("change", () => theme(preferred.matches ? "dark" : "light"));
by("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));

// On paper everything is light and open; a store of thousands of rows prints what was opened.
let before = null;
addEventListener("beforeprint", () => {
  const parts = [...document.querySelectorAll("details.part, #commands")];
  before = { theme: root.dataset.theme, closed: parts.filter((part) => !part.open) };
  theme("light");
  if (data.list.length > 3000) return;
  for (const part of before.closed) {
    part.fill();
    part.open = true;
  }
  document.querySelectorAll(".more").forEach((button) => button.growAll && button.growAll());
});
addEventListener("afterprint", () => {
  if (!before) return;
  theme(before.theme);
  before.closed.forEach((part) => (part.open = false));
});

// --------------------------------------------------------------------------------------------------------------- start
by("summary").textContent = data.summary;
by("explanation").textContent = data.explanation;
by("answer-note").textContent = data.answer_note;
by("margin").append(...data.margins.map((name, at) => el("option", { value: at }, name)));
by("margin").value = String(state.margin);
by("margin").addEventListener("change", (event) => {
  state.margin = Number(event.target.value);
  drawAnswers();
});
drawAnswers();
if (data.panels.length) {
  const places = new Map();
  for (const panel of data.panels) if (!places.has(placeOf(panel))) places.set(placeOf(panel), panel);
  by("where").append(...[...places].map(([value, panel]) =>
    el("option", { value }, `${panel.model}, ${panel.task}, ${panel.length} tokens`)));
  by("where").addEventListener("change", (event) => {
    const metric = data.panels[state.panel].metric;
    const here = data.panels.map((panel, at) => [panel, at]).filter(([panel]) => placeOf(panel) === event.target.value);
    choose((here.find(([panel]) => panel.metric === metric) || here[0])[1]);
  });
  by("metric").addEventListener("change", (event) => choose(Number(event.target.value)));
  by("axis").append(...Object.entries(AXES).map(([value, axis]) => el("label", {},
    el("input", { type: "radio", name: "axis", value, checked: value === "B" }), axis.name)));
  by("axis").addEventListener("change", (event) => {
    setAxis(event.target.value);
    redraw();
  });
  by("card").append(el("p", { class: "small" }, "Point at a cell, or reach it with Tab and the arrow keys, to see its settings and numbers; a click pins it."));
  choose(data.answers.length ? data.answers[0].panel : 0);
  let width = by("chart").clientWidth;
  new ResizeObserver(() => {
    if (by("chart").clientWidth === width) return;
    width = by("chart").clientWidth;
    redraw();
  }).observe(by("chart"));
} else {
  by("plot").hidden = true;
  by("budgets").hidden = true;
}
drawTables();
drawProblems();
drawProvenance();
by("filter").addEventListener("input", (event) => {
  state.filter = event.target.value;
  document.querySelectorAll("#table-list details.part").forEach((part) => {
    const table = part.lastElementChild.firstChild;
    if (table) table.redraw();
  });
});
