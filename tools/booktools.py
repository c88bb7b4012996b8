"""The book's own Sphinx extension: what a browser loads, chapter numbers, anchors, the reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml
from docutils import nodes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import assets
from tools.apidoc import expand

CDN = f"{assets.CDN}mathjax@{assets.VERSIONS['mathjax']}/es5/tex-chtml.js"
CDN_HASH = assets.HASHES["tex-chtml.js"]


def choose_assets(app, config) -> None:
    """MathJax and Pyodide from vendor/ where tools/assets.py fetched them, else from a CDN with hashes."""
    assets.parts(assets.VENDOR)
    config.html_extra_path = [str(assets.VENDOR)]
    if assets.ready(assets.VENDOR):
        config.mathjax_path = "mathjax/tex-chtml.js"
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


def fold_cells(app, doctree) -> None:
    """The set-up cell is for Colab, and isn't shown; a cell folded for its drawing says what it has."""
    for cell in list(doctree.findall(nodes.container)):
        if "tag_setup" in cell["classes"]:
            cell.parent.remove(cell)
        elif cell.get("hide_mode") == "input":
            cell["prompt_show"], cell["prompt_hide"] = "Show the plotting code", "Hide the plotting code"


def write_reference(app, docname: str, source: list[str]) -> None:
    """Put the package's reference where a page asks for it."""
    options = app.config.html_theme_options
    source[0] = expand(source[0], f"{options['repository_url']}/blob/{options['repository_branch']}")


def watch_package(app, env, added, changed, removed) -> set[str]:
    """The reference follows the package, so its page is read again in every build."""
    return {name for name in env.all_docs if name.endswith("/api")}


def number_by_file(app, env) -> list[str]:
    """A chapter has the number of its file, so that text and margin call it by one number."""
    changed = []
    for name, numbers in env.toc_secnumbers.items():
        if not (found := re.search(r"(?:^|/)(\d\d)_[^/]*$", name)):
            continue
        first = int(found.group(1))
        for anchor, number in numbers.items():
            numbers[anchor] = number and (first, *number[1:])
        for node in (env.titles[name], *env.tocs[name].findall(nodes.reference)):
            if node.get("secnumber"):
                node["secnumber"] = [first, *node["secnumber"][1:]]
        changed.append(name)
    return changed


def leave_out_thebe(app, pagename, templatename, context, doctree) -> None:
    """Jupyter Book adds the scripts of Thebe, twice, with an outside address; the book does not use it."""
    seen, kept = set(), []
    for script in context.get("script_files", []):
        attributes = getattr(script, "attributes", {})
        text = f"{getattr(script, 'filename', script)} {attributes.get('body')}"
        if "thebe" not in text.lower() and text not in seen:
            kept.append(script)
        seen.add(text)
    context["script_files"] = kept


def leave_out_icon_script(app, exception) -> None:
    """The theme's icons come as a font; it also loads a script of 1.5 MB that draws the same ones again.

    Its template is written by a tool and has no switch, so the tag is taken out of the finished pages.
    """
    if exception or app.builder.name != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        less = re.sub(r'<script src="[^"]*/fontawesome/[^"]*"></script>', "", text)
        if less != text:
            page.write_text(less, encoding="utf-8")
    for script in Path(app.outdir, "_static/vendor/fontawesome").glob("*/js/all.min.js*"):
        script.unlink()


REDIRECT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title><meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={to}"><link rel="canonical" href="{to}">
<script>location.replace("{to}" + location.hash)</script>
</head><body><p>This chapter is now <a href="{to}">here</a>.</p></body></html>
"""


def lead_on(app, exception) -> None:
    """A small page at every old address of a chapter (book/redirects.yml), which leads to where it is now."""
    if exception or app.builder.name != "html":
        return
    old = yaml.safe_load(Path(app.srcdir, "book/redirects.yml").read_text(encoding="utf-8"))
    now = {name.rpartition("/")[2][3:]: name for name in app.env.found_docs if name.startswith("notebooks/")}
    for stem, name in old.items():
        to = f"{now[name].rpartition('/')[2]}.html" if name else "../book/intro.html"
        Path(app.outdir, "notebooks", f"{stem}.html").write_text(REDIRECT.format(to=to), encoding="utf-8")


def setup(app) -> dict:
    app.connect("config-inited", choose_assets)
    app.connect("env-get-updated", number_by_file, priority=900)  # after those who count
    app.connect("html-page-context", leave_out_thebe, priority=900)
    app.connect("build-finished", leave_out_icon_script)
    app.connect("build-finished", lead_on)
    app.connect("source-read", write_reference)
    app.connect("doctree-read", offer_anchors)
    app.connect("doctree-read", fold_cells)
    app.connect("env-get-outdated", watch_package)
    return {"parallel_read_safe": True, "env_version": 1}
