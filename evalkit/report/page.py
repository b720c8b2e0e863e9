"""The report as one HTML page that needs nothing else: tables and the plot as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .rows import Row, Rows
from .table import COLUMNS, EXPLANATION, sections

_CSS = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1400px; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid #e6e6e6; }
th { border-bottom: 1px solid #666; } .left { text-align: left; }
tr.dense { font-weight: 600; } tr.group td { border-top: 1px solid #999; } tr.check { background: #fff1e0; }
p.small, ul.small { color: #555; font-size: 13px; max-width: 60rem; }
"""


def page(rows: Rows, svg: str | None = None) -> str:
    """The page.

    Args:
        rows: what to show.
        svg: the plot as an SVG document.
    """
    parts = ["<h1>Accuracy against realized budget</h1>"]
    if svg:
        parts.append(f'<div class="wide">{svg[svg.index("<svg") :]}</div>')
    parts.append(f'<p class="small">{escape(EXPLANATION)}</p>')
    for section in sections(rows.level("cell", "average", "subtask")):
        parts += [f"<h2>{escape(section.heading)}</h2>", _table(section.rows)]
    if rows.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in rows.notes)
        parts.append(f"<h2>Notes</h2><ul>{items}</ul>")
    made = "".join(f"<li>{escape(line.strip('`'))}</li>" for line in rows.provenance)
    parts.append(f'<h2>How it was measured</h2><ul class="small">{made}</ul>')
    head = f'<meta charset="utf-8"><title>Results</title><style>{_CSS}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _table(rows: Sequence[Row]) -> str:
    sides = [' class="left"' if column.left else "" for column in COLUMNS]
    head = "".join(f"<th{side}>{escape(column.title)}</th>" for column, side in zip(COLUMNS, sides, strict=True))
    lines = []
    before = rows[0].metric
    for row in rows:
        flags = {"dense": row.dense, "check": row.suspect, "group": row.metric != before}
        before = row.metric
        cells = "".join(
            f"<td{side}>{escape(column.text(row))}</td>" for column, side in zip(COLUMNS, sides, strict=True)
        )
        names = " ".join(name for name, on in flags.items() if on)
        lines.append(f'<tr class="{names}">{cells}</tr>')
    body = "\n".join(lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
