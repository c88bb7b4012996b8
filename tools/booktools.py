"""The book's own Sphinx extension: assets inside or from a CDN, anchors, and the API reference."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).resolve().parent.parent
CDN = "https://cdn.jsdelivr.net/npm/mathjax@3.2.2/es5/tex-chtml.js"
CDN_HASH = "sha384-AHAnt9ZhGeHIrydA1Kp1L7FN+2UosbF7RQg6C+9Is/a7kDpQ1684C2iH2VWil6r4"


def choose_mathjax(app, config) -> None:
    """MathJax from vendor/ where tools/assets.py filled it, else from the CDN with its hash."""
    if (ROOT / "vendor/_static/mathjax/lock").exists():
        config.mathjax_path = "mathjax/tex-chtml.js"
        config.html_extra_path = [str(ROOT / "vendor")]
    else:
        config.mathjax_path = CDN
        config.mathjax_options = {"integrity": CDN_HASH, "crossorigin": "anonymous", "defer": "defer"}


def offer_anchors(app, doctree) -> None:
    """Let `[text](page.md#name)` find `<a id="name"></a>`, the one form that GitHub understands too."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for raw in doctree.findall(nodes.raw):
        for name in re.findall(r'<a id="([\w-]+)"', raw.astext()):
            if name in slugs:
                raise ValueError(f"{app.env.docname}: the anchor {name} is there twice")
            slugs[name] = (raw.line or 0, name, name)


def markdown_docstring(app, what, name, obj, options, lines) -> None:
    """The docstrings are written for people, in plain text with `code`: make that safe reStructuredText."""
    out = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = block.rstrip().splitlines()
        if not rows:
            continue
        plain = all(row[:1] != " " for row in rows) and not any(re.match(r"[-*\d.]+ ", row) for row in rows)
        out += [row if plain else "| " + row for row in map(_escape, rows)] + [""]
    lines[:] = out


def _escape(row: str) -> str:
    """Backticks become literals; what else reStructuredText would read as markup is escaped."""
    pieces = re.split(r"(``[^`]+``|`[^`]+`)", row)
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = "``" + piece.strip("`").strip() + "``"
        else:
            pieces[i] = re.sub(r"([\\*|`])|(?<=\w)_(?=\W|$)", lambda m: "\\" + m.group(0), piece)
            if i + 1 < len(pieces) and pieces[i] and pieces[i][-1].isalnum():
                pieces[i] += "\\ "  # a literal needs a boundary before it
            if i and pieces[i] and pieces[i][0].isalnum():
                pieces[i] = "\\ " + pieces[i]
    indent = len(row) - len(row.lstrip(" "))
    return " " * indent + "".join(pieces).strip() if row.strip() else ""


def source_link(domain: str, info: dict) -> str | None:
    """The lines on GitHub of one documented object."""
    obj = sys.modules.get(info["module"]) if domain == "py" else None
    try:
        for part in info["fullname"].split("."):
            obj = getattr(obj, part)
        obj = inspect.unwrap(obj)
        lines, start = inspect.getsourcelines(obj)
        path = Path(inspect.getsourcefile(obj)).relative_to(ROOT)
    except (AttributeError, TypeError, ValueError, OSError):
        return None  # a constant, or something that is not ours
    return f"{source_link.base}/{path.as_posix()}#L{start}-L{start + len(lines) - 1}"


def setup(app) -> dict:
    sys.path.insert(0, str(ROOT))
    app.connect("config-inited", choose_mathjax)
    app.connect("config-inited", _repository)
    app.connect("doctree-read", offer_anchors)
    app.connect("autodoc-process-docstring", markdown_docstring)
    return {"parallel_read_safe": True, "env_version": 1}


def _repository(app, config) -> None:
    """The address is written once, in _config.yml."""
    options = config.html_theme_options
    source_link.base = f"{options['repository_url']}/blob/{options['repository_branch']}"
    config.linkcode_resolve = source_link
