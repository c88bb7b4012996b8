"""Every page in a real browser, in light and dark, on a wide screen and on a phone."""

import gzip
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tools import assets
from tools.booktools import CDN
from tools.browser import SCREENS, find
from tools.serve import serving
from tools.sitecheck import parse, toc

# The browser is the machine's own: `apt-get install chromium`. .ci/run installs it.
pytestmark = pytest.mark.skipif(
    find() is None, reason="no Chromium found: pages were not looked at in a browser"
)

LOOK = {
    "too_wide": "document.documentElement.scrollWidth - innerWidth",
    # Tabs share what the last one chose, until the theme's script has asked for the screen's.
    "theme": """new Promise(done => {
        const wanted = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'
        let looks = 0
        const look = () => {
            const theme = document.documentElement.dataset.theme
            return theme === wanted || looks++ > 50 ? done(theme) : setTimeout(look, 100)
        }
        look()
    })""",
    "formulas": "document.querySelectorAll('mjx-container').length",
    "bad_formulas": "document.querySelectorAll('mjx-merror, [data-mjx-error]').length",
    "icons": """[...document.querySelectorAll('.fa, .fas, .fab, .far, .fa-solid, .fa-brands, .fa-regular')]
        .filter(i => !getComputedStyle(i, '::before').fontFamily.includes('Font Awesome')
            || !document.fonts.check(`${getComputedStyle(i).fontWeight} 16px "${
                getComputedStyle(i).fontFamily.split('"')[1]}"`))
        .map(i => i.className)""",
    "broken_images": "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)",
}


def problems(visit, site, dark, formulas, mathjax_inside=True):
    """What is wrong with a page. Where MathJax comes from its CDN, that host may be out of reach."""
    inside = (site, "data:", "blob:")
    found = visit.errors + [f"asked for {r}" for r in visit.requests if not r.startswith(inside)]
    if not mathjax_inside:
        host = CDN.split("/npm/")[0]
        found, formulas = [f for f in found if host not in f], 0
    values = visit.values
    if values["too_wide"] > 0:
        found.append(f"the page scrolls sideways by {values['too_wide']} pixels")
    if values["theme"] != ("dark" if dark else "light"):
        found.append(f"the theme is {values['theme']}")
    if values["bad_formulas"] or values["formulas"] < formulas:
        found.append(f"{values['formulas']} of {formulas} formulas set, {values['bad_formulas']} with errors")
    return found + [f"the picture {src} does not show" for src in values["broken_images"]]


@cache
def weight(path: Path) -> int:
    """Bytes of a file as a server sends it: compressed, unless it is already."""
    data = path.read_bytes()
    return len(data) if path.suffix in (".woff", ".woff2", ".png", ".zip") else len(gzip.compress(data, 6))


def first_load(visit, site, html) -> dict[str, int]:
    """What a page fetched before anybody pressed anything: bytes by file."""
    paths = {unquote(urlsplit(r).path).lstrip("/") for r in visit.requests if r.startswith(site)}
    return {path: weight(html / path) for path in sorted(paths) if (html / path).is_file()}


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", toc())
def test_page(name, screen, browser, site, html):
    width, dark = SCREENS[screen]
    formulas = len(parse((html / name).with_suffix(".html")).select("article span.math, article div.math"))
    visit = browser.visit(f"{site}{name}.html", width=width, dark=dark, scripts=LOOK)
    assert problems(visit, site, dark, formulas, assets.ready()) == []
    loaded = first_load(visit, site, html)
    assert f"{name}.html" in loaded and sum(loaded.values()) < 1_500_000, loaded
    assert [p for p in loaded if p.startswith(("live/", "pyodide"))] == [], (
        "the runtime, before it is asked for"
    )
    assert visit.values["icons"] == [], "icons without their font"


FAULTS = {
    "console.error('oh')": "console: oh",
    "nonsense()": "nonsense is not defined",
    "document.write('<img src=missing.png>')": "404",
    "document.write('<img src=http://127.0.0.1:9/x.png>')": "asked for",
    "document.write('<div style=\"width:2000px\">x</div>')": "sideways",
}


@pytest.mark.parametrize("script", FAULTS)
def test_a_fault_is_found(script, browser, tmp_path):
    (tmp_path / "p.html").write_text(
        f"<!doctype html><html data-theme='light'><body><script>{script}</script>"
    )
    with serving(tmp_path) as address:
        visit = browser.visit(address + "p.html", width=390, scripts=LOOK)
        found = problems(visit, address, False, 0)
    assert any(FAULTS[script] in f for f in found), found


WORKER = """<!doctype html><script>
  const code = "fetch('http://127.0.0.1:9/x').catch(() => postMessage(1)); throw new Error('oh')";
  const worker = new Worker(URL.createObjectURL(new Blob([code])));
  worker.onmessage = () => (window.done = true);
</script><input id=a><input id=b>"""


def test_what_a_worker_asks_for_is_seen_and_keys_are_pressed(browser, tmp_path):
    (tmp_path / "p.html").write_text(WORKER)
    with serving(tmp_path) as address, browser.tab(address + "p.html") as tab:
        tab.until("window.done")
        assert "http://127.0.0.1:9/x" in tab.visit.requests
        assert any("oh" in e for e in tab.visit.errors)
        tab.press("Tab", "x", "Tab", "y", "z", "Shift+Tab", "End", "w")
        assert tab.evaluate("[a.value, b.value]") == ["xw", "yz"]
        with pytest.raises(TimeoutError, match="window.never"):
            tab.until("window.never", 0.2)
