// Tables are filled when they are opened; their texts are those of the other reports.
const PORTION = 200;

function wide(table) {
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table, scrolls sideways" }, table);
}

function headRow(data, sort, order) {
  return el("tr", {}, ...data.columns.map((column, at) => {
    const direction = sort === at ? (order > 0 ? "ascending" : "descending") : null;
    const content = column.sort
      ? el("button", { type: "button", class: "sort", "data-column": at }, column.title)
      : column.title;
    return el("th", { scope: "col", class: column.left ? "left" : null, "aria-sort": direction }, content);
  }));
}

function bodyRow(data, row, before) {
  const classes = [row.dense && "dense", row.suspect && "check", before && before.metric !== row.metric && "group"];
  const cells = row.text.map((text, at) => {
    const left = data.columns[at].left ? "left" : null;
    return at ? el("td", { class: left }, text) : el("th", { scope: "row", class: left }, text);
  });
  return el("tr", { class: classes.filter(Boolean).join(" ") || null, "data-row": row.id }, ...cells);
}

function compare(a, b, order) {
  if (a === b) return 0;
  if (a === null || b === null) return a === null ? 1 : -1;
  return (typeof a === "string" ? a.localeCompare(b) : a - b) * order;
}

function resultTable(data, section, state) {
  const box = el("div", {});
  let [sort, order] = [-1, 1];
  function draw() {
    const wanted = state.filter.toLowerCase();
    let rows = section.rows.map((id) => data.list[id]);
    if (wanted) rows = rows.filter((row) => row.dense || row.text[0].toLowerCase().includes(wanted));
    if (sort >= 0) {
      const metrics = [...new Set(rows.map((row) => row.metric + row.subtask))];
      const field = data.columns[sort].sort;
      const groups = metrics.map((key) => rows.filter((row) => row.metric + row.subtask === key));
      rows = groups.flatMap((group) => group.sort((a, b) => compare(a[field], b[field], order)));
    }
    const body = el("tbody", {});
    const head = headRow(data, sort, order);
    head.addEventListener("click", (event) => {
      const column = event.target.dataset && event.target.dataset.column;
      if (column === undefined) return;
      [sort, order] = Number(column) === sort ? [sort, -order] : [Number(column), 1];
      draw();
      box.querySelector(`[data-column="${sort}"]`).focus();
    });
    const more = portions(body, rows, (row, at) => bodyRow(data, row, rows[at - 1]), PORTION, "rows");
    box.replaceChildren(wide(el("table", {}, el("thead", {}, head), body)), more);
  }
  draw();
  box.redraw = draw;
  return box;
}

// A part that is made when it is opened first.
function folded(title, open, make) {
  const body = el("div", {});
  const node = el("details", { class: "part" }, el("summary", {}, title), body);
  node.fill = () => {
    if (!body.firstChild) body.append(make());
  };
  node.addEventListener("toggle", () => node.open && node.fill());
  if (open) {
    node.fill();
    node.open = true;
  }
  return node;
}

// Methods against subtasks: the value, and below it the paired difference where it is not zero for sure.
function breakdown(data, section) {
  const rows = section.rows.map((id) => data.list[id]);
  const metrics = [...new Set(rows.map((row) => row.metric))];
  return el("div", {}, ...metrics.map((metric) => {
    const mine = rows.filter((row) => row.metric === metric);
    const names = [...new Set(mine.map((row) => row.subtask))];
    const methods = new Map();
    for (const row of mine) {
      if (!methods.has(row.method)) methods.set(row.method, { first: row, of: {} });
      methods.get(row.method).of[row.subtask] = row;
    }
    const body = el("tbody", {});
    const line = ({ first, of }) => el("tr", { class: first.dense ? "dense" : null },
      el("th", { scope: "row", class: "left" }, first.text[0]),
      ...names.map((name) => {
        const row = of[name];
        if (!row) return el("td", {}, "-");
        const sure = row.difference_low !== null && (row.difference_low > 0 || row.difference_high < 0);
        const sign = row.difference === null ? "" : row.difference > 0 ? "+" : "";
        const change = row.difference ? el("small", {}, ` ${sign}${row.difference.toFixed(1)}`) : null;
        const worse = data.metrics[metric].higher ? row.difference < 0 : row.difference > 0;
        return el("td", { class: sure ? (worse ? "worse" : "better") : null, title: `${row.text[5]}, B ${row.text[6]} %, n = ${row.n}` },
          row.text[2], change);
      }));
    const more = portions(body, [...methods.values()], line, 100, "methods");
    const head = el("tr", {}, el("th", { scope: "col", class: "left" }, "method"),
      ...names.map((name) => el("th", { scope: "col" }, name)));
    const { name, unit } = data.metrics[metric];
    return el("div", {}, el("p", { class: "small" },
      `${name}${unit ? ` (${unit})` : ""}, with the paired difference to dense; coloured and underlined where its 95 % interval ` +
      "excludes zero, uncorrected: among many tasks some do by chance."), wide(el("table", {}, el("thead", {}, head), body)), more);
  }));
}
