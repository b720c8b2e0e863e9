// Heat maps are tables: their numbers can be read, heard and printed.
function heatCell(value, text, title) {
  const cell = el("td", { class: value > 55 ? "heat high" : "heat", title }, text);
  cell.style.setProperty("--v", `${Math.max(0, Math.min(100, value)).toFixed(1)}%`);
  return cell;
}

function unpack(budget) {
  return Uint8Array.from(atob(budget.map), (sign) => sign.charCodeAt(0));
}

function drawLayers(into, heads, data, panel) {
  const seen = new Map();
  for (const id of panel.rows) for (const cell of data.list[id].cells) seen.set(cell, data.list[id]);
  const found = [...seen].filter(([cell]) => data.cells[cell].budget);
  heads.replaceChildren();
  if (!found.length) {
    into.replaceChildren(el("p", { class: "small" }, "No budgets by layer are stored for these cells."));
    return;
  }
  const depth = found.reduce((most, [cell]) => Math.max(most, data.cells[cell].budget.layers.length), 0);
  const body = el("tbody", {});
  const line = ([at, row]) => {
    const { budget, method } = data.cells[at];
    const name = row.cells.length > 1 ? `${method} (${lengthOf(data.cells[at])})` : method;
    const button = el("button", { type: "button", class: "link", onclick: () => drawHeads(heads, data.cells[at], name) }, name);
    return el("tr", {}, el("th", { scope: "row", class: "left" }, button),
      ...budget.layers.map((value, layer) => heatCell(value, value.toFixed(0), `layer ${layer}: B ${value.toFixed(1)} %`)));
  };
  const more = portions(body, found, line, 30, "cells");
  const head = el("tr", {}, el("th", { scope: "col", class: "left" }, "layer"),
    ...Array.from({ length: depth }, (_, layer) => el("th", { scope: "col" }, String(layer))));
  into.replaceChildren(wide(el("table", { class: "heat-map" }, el("thead", {}, head), body)), more);
  const sparse = found.find(([, row]) => !row.dense);
  if (sparse) {
    const [at, row] = sparse;
    drawHeads(heads, data.cells[at], row.cells.length > 1 ? `${data.cells[at].method} (${lengthOf(data.cells[at])})` : data.cells[at].method);
  }
}

function lengthOf(cell) {
  const found = cell.settings.find(([name]) => name === "task.length");
  return found ? `${found[1]} tokens` : cell.key;
}

function drawHeads(into, cell, name) {
  const { layers, heads } = cell.budget;
  const values = unpack(cell.budget);
  const lines = layers.map((_, layer) => el("tr", {}, el("th", { scope: "row" }, String(layer)),
    ...Array.from({ length: heads }, (_, head) => {
      const value = values[layer * heads + head];
      return heatCell(value, String(value), `layer ${layer}, head ${head}: B ${value} %`);
    })));
  const top = el("tr", {}, el("th", { scope: "col" }, "layer \\ head"),
    ...Array.from({ length: heads }, (_, head) => el("th", { scope: "col" }, String(head))));
  into.replaceChildren(
    el("h3", {}, `${name}: B by layer and head (%)`),
    wide(el("table", { class: "heat-map" }, el("thead", {}, top), el("tbody", {}, ...lines))),
  );
}
