// Elements are made here and nowhere else; text goes in as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const by = (id) => document.getElementById(id);

// A long list in portions: `make` gives the node of an item, a button asks for the next portion.
function portions(into, items, make, size, what) {
  let shown = 0;
  const more = el("button", { type: "button", class: "plain more", onclick: () => grow(size) });
  function grow(count) {
    const next = items.slice(shown, shown + count);
    into.append(...next.map((item, at) => make(item, shown + at)));
    shown += next.length;
    more.textContent = `Show more ${what} (${items.length - shown} left)`;
    more.hidden = shown >= items.length;
  }
  grow(size);
  more.growAll = () => grow(items.length);
  return more;
}

// A named row of the document's lists as an object.
function rowsOf(data) {
  return data.rows.data.map((values, id) => {
    const row = { id };
    data.rows.fields.forEach((name, at) => (row[name] = values[at]));
    return row;
  });
}

// Markers as matplotlib draws them, about `size` pixels across.
function markerPath(marker, size) {
  const r = size / 2;
  const ring = (n, turn, radius) => {
    const corners = [];
    for (let i = 0; i < n; i++) {
      const angle = turn + (2 * Math.PI * i) / n - Math.PI / 2;
      const reach = typeof radius === "function" ? radius(i) : radius;
      corners.push(`${(reach * Math.cos(angle)).toFixed(2)},${(reach * Math.sin(angle)).toFixed(2)}`);
    }
    return `M${corners.join("L")}Z`;
  };
  const turned = { "^": 0, ">": Math.PI / 2, v: Math.PI, "<": -Math.PI / 2 };
  if (marker in turned) return ring(3, turned[marker], r * 1.2);
  const w = r * 0.42;
  const plus = [[-w, -r], [w, -r], [w, -w], [r, -w], [r, w], [w, w], [w, r], [-w, r], [-w, w], [-r, w], [-r, -w], [-w, -w]];
  const cross = plus.map(([x, y]) => [(x - y) * 0.78, (x + y) * 0.78]);
  const polygon = (points) => `M${points.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join("L")}Z`;
  switch (marker) {
    case "s": return ring(4, Math.PI / 4, r * 1.25);
    case "D": return ring(4, 0, r * 1.2);
    case "d": return polygon([[0, -r * 1.2], [r * 0.7, 0], [0, r * 1.2], [-r * 0.7, 0]]);
    case "p": return ring(5, 0, r * 1.1);
    case "h": return ring(6, 0, r * 1.1);
    case "P": return polygon(plus.map(([x, y]) => [x * 1.1, y * 1.1]));
    case "X": return polygon(cross);
    case "*": return ring(10, 0, (i) => (i % 2 ? r * 0.62 : r * 1.6));
    default: return `M${-r},0a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`;
  }
}

// A series' colours become properties that the style sheet reads, one for each background.
function paint(node, style) {
  node.style.setProperty("--light", style.colour);
  node.style.setProperty("--dark", style.dark);
  node.classList.add("series");
  node.classList.toggle("open", !style.filled);
  return node;
}
