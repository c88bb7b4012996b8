"""The built book: every page of the table of contents, looked at as HTML."""

import re

import pytest
from bs4 import BeautifulSoup

from tools import sitecheck
from tools.apidoc import expand
from tools.chapters import redirects
from tools.sitecheck import ROOT, parse, source, title, toc

PAGES = toc()


def number(name: str) -> int | None:
    found = re.search(r"/(\d\d)_", name)
    return int(found.group(1)) if found else None


def markdown(name: str) -> str:
    """A page's text as its author wrote it; for a chapter, of the .md beside the notebook."""
    return (ROOT / name).with_suffix(".md").read_text(encoding="utf-8")


def test_contents_and_files_agree():
    chapters = {f"notebooks/{p.stem}" for p in (ROOT / "notebooks").glob("[0-9][0-9]_*.md")}
    notebooks = {f"notebooks/{p.stem}" for p in (ROOT / "notebooks").glob("*.ipynb")}
    pages = {f"book/{p.stem}" for p in (ROOT / "book").glob("*.md")}
    assert set(PAGES) == chapters | pages and chapters == notebooks
    assert len(PAGES) == len(set(PAGES))
    order = [n for n in map(number, PAGES) if n is not None]
    assert order == sorted(order)


def test_every_page_is_there_and_no_other(html):
    built = {
        str(p.relative_to(html).with_suffix(""))
        for d in ("book", "notebooks")
        for p in (html / d).glob("*.html")
    }
    moved = {f"notebooks/{stem}" for stem in redirects()}
    assert built == set(PAGES) | moved and not moved & set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_page(name, html):
    path = (html / name).with_suffix(".html")
    page = parse(path)
    assert sitecheck.titles(page, title(name), number(name)) == []
    assert sitecheck.images(page, path.parent) == []
    assert sitecheck.outside(page) == []
    assert sitecheck.leaks(page) == []
    assert sitecheck.mathematics(page, markdown(name)) == []
    if number(name) is not None:
        assert page.select("article .cell_output"), "a chapter without outputs"
        assert page.select("a[href*='colab.research.google.com']"), "no way to Colab"


def test_internal_links_lead_somewhere(html):
    pages = {f"{name}.html": parse((html / name).with_suffix(".html")) for name in PAGES}
    assert sitecheck.links(pages) == []


def test_first_page_leads_to_the_book(html):
    assert PAGES[0].split("/")[-1] in (html / "index.html").read_text(encoding="utf-8")


def test_every_source_is_found():
    assert all(source(name) for name in PAGES)


GOOD = """<html><title>Bytes or FLOPs? — Book</title><article><h1>5. Bytes or FLOPs?<a>#</a></h1>
<p id="a"><span class="math">x</span> <a href="#a">here</a></p></article></html>"""


def soup(change=("", "")):
    return BeautifulSoup(GOOD.replace(*change, 1) if change[0] else GOOD, "html.parser")


def problems(page, tmp_path):
    return [
        *sitecheck.titles(page, "Bytes or FLOPs?", 5),
        *sitecheck.images(page, tmp_path),
        *sitecheck.outside(page),
        *sitecheck.leaks(page),
        *sitecheck.mathematics(page, "so $x$"),
        *sitecheck.links({"p.html": page}),
    ]


def test_a_good_page_passes(tmp_path):
    assert problems(soup(), tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        ("5. Bytes", "4. Bytes"),
        ("5. Bytes or FLOPs?", "5. Another title"),
        ("Bytes or FLOPs? —", "untitled —"),
        ("<h1>", "<h1>Two</h1><h1>"),
        ('<span class="math">x</span>', "x"),
        ('href="#a"', 'href="#b"'),
        ('href="#a"', 'href="missing.html"'),
        ("<p id", "<img src='missing.svg' alt='three good words'><p id"),
        ("<p id", "<img src='data:image/svg+xml;base64,AA' alt='plot.svg'><p id"),
        ("<p id", "<img src='https://example.org/a.png' alt='three good words'><p id"),
        ("<title>", "<script src='https://example.org/a.js'></script><title>"),
        ("<title>", "<link rel='stylesheet' href='//example.org/a.css'><title>"),
        ("<title>", f"<script src='{sitecheck.CDN}'></script><title>"),  # the CDN without its hash
        ("<p id", "<div class='cell_output'>wrote /home/me/x</div><p id"),
        ("<p id", "<div class='cell_output'>object at 0x7f00deadbeef</div><p id"),
        ("<p id", "<div class='cell_output'>findfont: no</div><p id"),
        ("<p id", f"<p>{ROOT}</p><p id"),
        ("<p id", "<p>see {ref}`x`</p><p id"),
        ("<p id", "<p>```{note}</p><p id"),
        ("<p id", "<p>$\\alpha$</p><p id"),
        ("<p id", "<p>**bold**</p><p id"),
    ],
)
def test_a_fault_is_found(change, tmp_path):
    assert problems(soup(change), tmp_path), change


def test_the_cdn_with_its_hash_is_allowed():
    script = f"<script src='{sitecheck.CDN}' integrity='sha384-x' crossorigin='anonymous'></script><title>"
    assert sitecheck.outside(soup(("<title>", script))) == []


MODULE = '''"""A module."""


def f(x: int, *args, y=2) -> int:
    """Twice `x`: that is all.

    x: a number * 2
        and more
    y  another

    one    first
    two    second

        f(3)  # code
    """


def _hidden(): ...


class C:
    a: int = 1

    def m(self, k, *, deep=False):
        """M."""
'''


def test_the_reference_names_what_it_shows(tmp_path):
    (tmp_path / "companion").mkdir()
    (tmp_path / "companion" / "thing.py").write_text(MODULE)
    text = expand("before\n<!-- api: companion.thing -->\nafter", "URL", tmp_path)
    for part in ("A module.", "### f", "f(x: int, *args, y=2) -> int", "Twice `x`: that is all."):
        assert part in text
    for part in ("- `x`: a number \\* 2\n  and more", "- `one`: first\n- `two`: second", "```python\nf(3)"):
        assert part in text
    for part in ("### C", "**`m(k, *, deep=False)`**", "URL/companion/thing.py#L4-L15"):
        assert part in text
    assert "_hidden" not in text
    with pytest.raises(FileNotFoundError):
        expand("<!-- api: companion.nothing -->", "URL", tmp_path)
