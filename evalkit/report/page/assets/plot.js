// The Pareto plot. It is drawn anew for every change; `state` is what the controls say.
const AXES = {
  B: { name: "B", title: "realized budget B (% of dense)", unit: " %" },
  B_cost: { name: "B_cost", title: "B_cost: QK, V and selection work (% of dense)", unit: " %" },
  seconds: { name: "measured time", title: "measured prefill time (s a sample, median)", unit: " s" },
};

// Points that no other beats; the static figure draws the same line.
function frontier(points, higher) {
  const sign = higher ? 1 : -1;
  const sorted = [...points].sort((a, b) => a[0] - b[0] || sign * (b[1] - a[1]));
  const kept = [];
  let best = -Infinity;
  for (const [x, y] of sorted) {
    if (sign * y > best) {
      kept.push([x, y]);
      best = sign * y;
    }
  }
  return kept;
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return found.map((value) => [value, value.toFixed(digits)]);
}

// Ends of the error bar: of the paired difference, or where there is none of the value.
function reach(row) {
  const paired = row.difference !== null;
  const [mid, low, high] = paired
    ? [row.difference, row.difference_low, row.difference_high]
    : [row.value, row.low, row.high];
  if (low === null || high === null) return [row.value, row.value];
  return [row.value - Math.max(0, mid - low), row.value + Math.max(0, high - mid)];
}

function limits(rows, level, percent, axis, bars) {
  const xs = rows.map((row) => row[axis]);
  const ys = [...rows.map((row) => row.value), level];
  const low = ys.reduce((a, b) => Math.min(a, b), Infinity);
  const high = ys.reduce((a, b) => Math.max(a, b), -Infinity);
  const span = high - low || Math.abs(high) * 0.1 || 1;
  let bottom = bars.reduce((a, bar) => Math.min(a, bar[0]), low);
  let top = bars.reduce((a, bar) => Math.max(a, bar[1]), high);
  // A long error bar may leave the plot, a point may not.
  bottom = Math.max(bottom, percent ? -2 : low - 0.6 * span);
  top = Math.min(top, percent ? 102 : high + 0.6 * span);
  const left = xs.reduce((a, b) => Math.min(a, b), Infinity);
  const right = xs.reduce((a, b) => Math.max(a, b), 0);
  const x = axis === "seconds" ? [0, right * 1.06] : [left > 15 ? Math.max(0, left - 6) : 0, Math.max(103, right + 3)];
  return { x, y: [Math.min(bottom, low - 0.06 * span), Math.max(top, high + 0.06 * span)] };
}

function label(data, row, axis) {
  const metric = data.metrics[row.metric];
  const [value, interval] = [row.text[2], row.text[4]];
  const at = row[axis] === null ? "" : `, ${AXES[axis].name} ${row[axis].toFixed(axis === "seconds" ? 2 : 1)}${AXES[axis].unit}`;
  return `${row.text[0]}: ${metric.name} ${value} ${interval}${at}, n = ${row.n}${row.suspect ? ", suspect" : ""}`;
}

// Draws into `box` and returns what the page needs of it.
function drawPlot(box, data, state, show) {
  const panel = data.panels[state.panel];
  const metric = data.metrics[panel.metric];
  const all = panel.rows.map((id) => data.list[id]);
  const dense = all.find((row) => row.dense);
  const level = dense ? dense.value : 0; // only KL has no dense row: it is zero by definition
  const timed = all.filter((row) => row[state.axis] !== null && row.value !== null);
  const rows = timed.filter((row) => !state.hidden.has(row.series));
  const width = Math.max(300, Math.floor(box.clientWidth));
  const height = Math.round(Math.min(520, Math.max(300, width * 0.6)));
  const edge = { left: 62, right: 14, top: 12, bottom: 44 };
  // The frame holds all methods, so that hiding one moves nothing.
  const frame = limits(timed.length ? timed : all, level, metric.unit === "%", state.axis, timed.map(reach));
  const X = (v) => edge.left + ((v - frame.x[0]) / (frame.x[1] - frame.x[0])) * (width - edge.left - edge.right);
  const Y = (v) => height - edge.bottom - ((v - frame.y[0]) / (frame.y[1] - frame.y[0])) * (height - edge.top - edge.bottom);
  const better = metric.higher ? "higher" : "lower";
  const yTitle = `${metric.name} (${metric.unit ? `${metric.unit}, ` : ""}${better} is better)`;
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
    "aria-label": `${yTitle} against ${AXES[state.axis].title}; ${rows.length} points, arrow keys go from one to the next`,
  });
  const clip = svg("clipPath", { id: "inside" }, svg("rect", {
    x: edge.left, y: edge.top, width: width - edge.left - edge.right, height: height - edge.top - edge.bottom,
  }));
  root.append(svg("defs", {}, clip));
  const grid = svg("g", { class: "grid", "aria-hidden": "true" });
  for (const [value, text] of ticks(...frame.x, width / 65)) {
    grid.append(
      svg("line", { x1: X(value), x2: X(value), y1: edge.top, y2: height - edge.bottom }),
      svg("text", { x: X(value), y: height - edge.bottom + 16, "text-anchor": "middle" }, text),
    );
  }
  for (const [value, text] of ticks(...frame.y, height / 60)) {
    grid.append(
      svg("line", { x1: edge.left, x2: width - edge.right, y1: Y(value), y2: Y(value) }),
      svg("text", { x: edge.left - 6, y: Y(value) + 4, "text-anchor": "end" }, text),
    );
  }
  grid.append(
    svg("text", { class: "title", x: (edge.left + width - edge.right) / 2, y: height - 8, "text-anchor": "middle" },
      AXES[state.axis].title),
    svg("text", { class: "title", transform: `translate(14 ${(height - edge.bottom + edge.top) / 2}) rotate(-90)`, "text-anchor": "middle" },
      yTitle),
  );
  root.append(grid);

  const inside = svg("g", { "clip-path": "url(#inside)", "aria-hidden": "true" });
  if (dense && dense.low !== null && dense.high !== null) {
    const [top, bottom] = [Y(dense.high), Y(dense.low)];
    inside.append(svg("rect", {
      class: "dense-band", x: edge.left, width: width - edge.left - edge.right, y: top, height: Math.max(0.5, bottom - top),
    }));
  }
  inside.append(svg("line", { class: "dense-line", x1: edge.left, x2: width - edge.right, y1: Y(level), y2: Y(level) }));
  const bounds = new Set(data.series.filter((series) => series.bound).map((series) => series.name));
  const line = frontier(rows.filter((row) => !bounds.has(row.series)).map((row) => [row[state.axis], row.value]), metric.higher);
  if (line.length > 1) {
    const steps = line.map(([x, y], at) => (at ? `H${X(x).toFixed(1)}V${Y(y).toFixed(1)}` : `M${X(x).toFixed(1)},${Y(y).toFixed(1)}`));
    inside.append(svg("path", { class: "frontier", d: steps.join("") }));
  }
  const points = svg("g", {});
  const size = rows.length > 300 ? 7 : 10;
  const places = [];
  const shown = data.series.filter((series) => rows.some((row) => row.series === series.name));
  for (const series of shown) {
    const members = rows.filter((row) => row.series === series.name);
    const shape = markerPath(series.marker, series.marker === "*" ? 12 : size);
    const bars = members.filter((row) => !row.dense).map((row) => {
      const [low, high] = reach(row);
      return low < high ? `M${X(row[state.axis]).toFixed(1)},${Y(low).toFixed(1)}V${Y(high).toFixed(1)}` : "";
    });
    inside.append(paint(svg("path", { class: "bars", d: bars.join("") || "M0,0" }), series));
    const group = paint(svg("g", { "data-series": series.name }), series);
    for (const row of members) {
      const [x, y] = [X(row[state.axis]), Y(row.value)];
      const node = svg("path", {
        class: row.suspect ? "point suspect" : "point", d: shape, transform: `translate(${x.toFixed(2)} ${y.toFixed(2)})`,
        tabindex: "-1", role: "img", "aria-label": label(data, row, state.axis), "data-row": row.id,
      });
      places.push({ row, node, x, y });
      group.append(node);
    }
    points.append(group);
  }
  const ring = svg("circle", { class: "ring", r: 11, visibility: "hidden" });
  root.append(inside, points, ring);
  box.replaceChildren(root);

  // From left to right, one tab stop: the selected point or the first.
  places.sort((a, b) => a.x - b.x || a.y - b.y);
  const find = (id) => places.find((place) => place.row.id === id);
  const stop = find(state.row) || places[0];
  if (stop) stop.node.setAttribute("tabindex", "0");

  function select(place, focus) {
    places.forEach((other) => other.node.setAttribute("tabindex", other === place ? "0" : "-1"));
    ring.setAttribute("cx", place.x);
    ring.setAttribute("cy", place.y);
    ring.setAttribute("visibility", "visible");
    if (focus) place.node.focus({ preventScroll: true });
    show(place.row);
  }
  if (find(state.row)) select(find(state.row), state.focused);

  function nearest(event) {
    const box = root.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let found = null;
    let least = 22 ** 2;
    for (const place of places) {
      const distance = (place.x - x) ** 2 + (place.y - y) ** 2;
      if (distance <= least) [found, least] = [place, distance];
    }
    return found;
  }
  root.addEventListener("pointermove", (event) => {
    const place = nearest(event);
    root.classList.toggle("over", Boolean(place));
    if (place && !state.pinned && place.row.id !== state.row) select(place, false);
  });
  root.addEventListener("click", (event) => {
    const place = nearest(event);
    state.pinned = Boolean(place);
    if (place) select(place, true);
  });
  root.addEventListener("focusin", (event) => {
    const place = places.find((other) => other.node === event.target);
    if (place && place.row.id !== state.row) select(place, false);
  });
  root.addEventListener("keydown", (event) => {
    const at = places.findIndex((place) => place.node === event.target);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: places.length - 1 }[event.key];
    if (event.key === "Escape") state.pinned = false;
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    if (places[to]) select(places[to], true);
  });
  return { missing: all.length - timed.length, select: (id, focus) => find(id) && select(find(id), focus) };
}
