"""The book's own Sphinx extension: where MathJax comes from, chapter numbers, anchors, the reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.apidoc import expand

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


def write_reference(app, docname: str, source: list[str]) -> None:
    """Put the package's reference where a page asks for it."""
    options = app.config.html_theme_options
    source[0] = expand(source[0], f"{options['repository_url']}/blob/{options['repository_branch']}")


def watch_package(app, env, added, changed, removed) -> set[str]:
    """The reference follows the package, so its page is read again in every build."""
    return {name for name in env.all_docs if name.endswith("/api")}


def number_by_file(app, env) -> list[str]:
    """A chapter has the number of its file, so that "chapter 4" in the text is 4 in the margin too."""
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


def setup(app) -> dict:
    app.connect("config-inited", choose_mathjax)
    app.connect("env-get-updated", number_by_file, priority=900)  # after those who count
    app.connect("html-page-context", leave_out_thebe, priority=900)
    app.connect("source-read", write_reference)
    app.connect("doctree-read", offer_anchors)
    app.connect("env-get-outdated", watch_package)
    return {"parallel_read_safe": True, "env_version": 1}
