"""The report as one HTML page that needs nothing else: it opens from disk and asks no network for anything.

:func:`build` puts together one document (:mod:`.schema`), :func:`page` sets it into the template with the assets beside
this module. The document travels as JSON in a script element that is no script; the page's own code writes all of it
as text. A content security policy admits that code and its style by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files

from .document import build
from .schema import Document

__all__ = ["Document", "build", "page"]

STYLES = ("page.css",)
SCRIPTS = ("dom.js", "plot.js", "tables.js", "heat.js", "main.js")


def page(document: Document) -> str:
    """The page as HTML.

    Args:
        document: from :func:`build`.
    """
    assets = files(__name__) / "assets"
    style = "\n".join((assets / name).read_text("utf-8") for name in STYLES)
    code = "\n".join((assets / name).read_text("utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{code}\n}})();\n'
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    values = {
        "POLICY": escape(policy, quote=False),
        "TITLE": escape(document["title"]),
        "QUESTION": escape(document["question"]),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embed(document),
    }
    # Split once: what is set in is never read as a part of the template again.
    parts = (assets / "template.html").read_text("utf-8").split("@@")
    return "".join(values[part] if at % 2 else part for at, part in enumerate(parts))


def embed(document: Document) -> str:
    """The document as JSON that no HTML parser can see an end or a comment in.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
