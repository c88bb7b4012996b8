"""Follow every link that leads out of the project, in pages, chapters, docstrings and reports.

    python -m tools.links [FILE ...]        all of the project's files without a name

Sphinx's own link checker asks, with its patience for slow servers and rate limits. A link is broken where the
server answers that there is nothing, or where there is no server. A server that refuses programs (403 or 429)
says nothing about the link, so such links are listed and do not fail the check.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path

from tools import address
from tools.address import ROOT

LINK = re.compile(r"https?://[^\s<>\"'`{}|\\^\[\]]+")
# Examples, this machine, namespaces of XML, package archives of a fixed version with a hash beside them.
NOT_ASKED = re.compile(
    r"https?://(?:[\w.-]*\.)?(?:example\.(?:org|com|net)|localhost|127\.0\.0\.1|w3\.org/(?:1999|2000)/)|https?://\d"
    r"|https?://(?:host|HOST|server)\b|https?://cdn\.jsdelivr\.net/npm/|https://github\.com/(?:OWNER|$)"
)
SUFFIXES = {".md", ".py", ".toml", ".yml", ".cff", ".html", ".js", ".txt"}  # an .ipynb says what its .md says
REFUSED = re.compile(r"\b(?:401|403|405|406|418|429|503|999)\b")
PATIENCE = 30  # seconds


def links(text: str) -> set[str]:
    """The addresses in a text, without the punctuation that ends a sentence or a bracket around them."""
    found = set()
    for link in LINK.findall(text):
        link = link.rstrip(".,;:!?*_")
        while link.endswith(")") and link.count("(") < link.count(")"):
            link = link[:-1].rstrip(".,;:!?*_")
        if re.match(r"https?://[\w-]+(?:\.[\w-]+)+(?::\d+)?(?:[/?#]|$)", link) or "localhost" in link:
            found.add(link)
    return found


def outside(files: list[tuple[Path, str]]) -> dict[str, list[str]]:
    """{link: files that have it}, this project's own address left out: it may not be published yet."""
    own = (address.repository(), address.pages().rstrip("/"), address.colab("").removesuffix("/"))
    found: dict[str, list[str]] = {}
    for path, text in files:
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for link in sorted(links(text)):
            if not NOT_ASKED.match(link) and not link.startswith(own):
                found.setdefault(link, []).append(name)
    return found


def project() -> list[tuple[Path, str]]:
    """The files with links for readers; tests have links that lead nowhere on purpose."""
    return [
        (p, t)
        for p, t in address.files()
        if p.suffix in SUFFIXES and "tests" not in p.relative_to(ROOT).parts
    ]


def ask(wanted: list[str], *, retries: int = 2, patience: int = PATIENCE) -> dict[str, tuple[str, str]]:
    """{link: (status, what was said)} in the words of Sphinx's linkcheck: working, redirected, broken, ..."""
    from sphinx.application import Sphinx

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        page = "Links\n=====\n\n" + "".join(f"- `{i} <{link}>`__\n" for i, link in enumerate(wanted))
        (source / "index.rst").write_text(page, encoding="utf-8")
        settings = {
            "linkcheck_retries": retries,
            "linkcheck_timeout": patience,
            "linkcheck_anchors_ignore_for_url": [r"https://github\.com/.*"],  # made by its scripts
            "linkcheck_report_timeouts_as_broken": False,
        }
        out = Path(folder) / "out"
        with contextlib.redirect_stderr(io.StringIO()):
            Sphinx(source, None, out, out, "linkcheck", settings, status=None, warning=None).build()
        lines = (out / "output.json").read_text(encoding="utf-8").splitlines()
    return {r["uri"]: (r["status"], r["info"]) for r in map(json.loads, lines)}


def main(argv: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.links", description=__doc__, formatter_class=as_written)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    found = outside([(f.resolve(), f.read_text(encoding="utf-8")) for f in args.files] or project())
    answers = ask(sorted(found))
    bad, refused = [], []
    for link, where in sorted(found.items()):
        status, said = answers.get(link, ("broken", "was not asked"))
        if status in ("broken", "timeout"):
            line = f"{link}\n    {said}\n    in {', '.join(where)}"
            (refused if REFUSED.search(said) else bad).append(line)
    if refused:
        print(f"{len(refused)} links whose server does not answer programs:", *refused, sep="\n")
    print(f"{len(found)} links lead out, {len(bad)} of them to nothing{':' if bad else ''}", *bad, sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
