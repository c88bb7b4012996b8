"""Accessibility of every page: axe-core in a real browser, at two widths, in light and dark.

axe comes from npm (tools/web/axe, a lock with hashes) into a temporary folder, for the tests alone. Where npm
or a Chromium is missing, or npm cannot reach its registry, the tests say so and pass over.
"""

import json
import re
import shutil

import pytest

from tools.assets import WEB, install
from tools.browser import SCREENS, find
from tools.serve import serving
from tools.sitecheck import toc

pytestmark = [
    pytest.mark.skipif(find() is None, reason="no Chromium found: pages were not looked at with axe"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="no npm found: pages were not looked at with axe"),
]


# Faults of the theme, which we do not repair: (rule, the element's beginning, why it is not ours).
THEME = {
    "search button": (
        "label-content-name-mismatch",
        r'<button class="btn search-button-field',
        "the theme names the button `Search`, and shows the keys that open it besides",
    ),
    "sidebar": (
        "region",
        r'<div class="sidebar-primary-item">',
        "the theme puts the book's title and the search outside of the sidebar's landmark",
    ),
}

# Equal pieces of code and of formulas look alike, so one of a kind is enough; axe takes minutes otherwise.
PREPARE = """(() => {
  const seen = new Set();
  for (const span of document.querySelectorAll(".highlight span, code span.pre")) {
    const kind = span.closest(".highlight") ? span.className : "pre";
    if (seen.has(kind)) span.replaceWith(...span.childNodes); else seen.add(kind);
  }
  [...document.querySelectorAll("mjx-container")].slice(1).forEach((m) => m.replaceChildren());
  document.body.normalize();
  return true;
})()"""
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RUN = f"""axe.run(document, {{preload: false, resultTypes: ["violations"],
  runOnly: {{type: "tag", values: {json.dumps(TAGS)}}}}}).then((r) => r.violations.flatMap((v) => v.nodes.map(
  (n) => [v.id, n.html, n.target.join(" "), n.failureSummary])))"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The text of axe-core, from npm."""
    folder = tmp_path_factory.mktemp("axe")
    if why := install(WEB / "axe", folder):
        pytest.skip(f"axe could not be fetched, so no page was looked at with it: {why}")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def faults(browser, axe, url, width=1280, dark=False):
    """[(rule, element, where, what to do)] of a page."""
    scripts = {"prepared": PREPARE, "axe": f"{axe}\n;true", "found": RUN}
    return [tuple(f) for f in browser.visit(url, width=width, dark=dark, scripts=scripts).values["found"]]


def of_theme(fault):
    """The name of a known fault of the theme, or None."""
    rule, element = fault[:2]
    return next((n for n, (r, begins, _) in THEME.items() if rule == r and re.match(begins, element)), None)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", toc())
def test_page(name, screen, browser, axe, site):
    width, dark = SCREENS[screen]
    found = faults(browser, axe, f"{site}{name}.html", width, dark)
    ours = [f"{rule}: {where}\n  {element[:200]}\n  {what}" for rule, element, where, what in found if not
            of_theme((rule, element))]  # fmt: skip
    assert ours == [], "\n".join(ours)


def test_every_fault_of_the_theme_is_still_there(browser, axe, site):
    """What the theme has mended leaves the table."""
    page = f"{site}{toc()[0]}.html"
    assert {of_theme(f) for f in faults(browser, axe, page)} - {None} == set(THEME)


PAGE = """<!doctype html><html lang="en"><head><title>A page</title></head>
<body><main><h1>A page</h1>{}</main></body></html>"""
PLANTED = {
    "image-alt": '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">',
    "color-contrast": '<p style="color:#999;background:#fff">Pale words on white.</p>',
    "heading-order": "<h4>Too deep</h4>",
    "link-name": '<a href="#x"></a><p id="x">x</p>',
    "empty-table-header": "<table><tr><th></th><th>a</th></tr><tr><td>1</td><td>2</td></tr></table>",
    "label": '<input type="range">',
    "scrollable-region-focusable": '<pre style="width:9rem;overflow:auto">' + "code " * 90 + "</pre>",
    "label-content-name-mismatch": '<button aria-label="Search">Find it</button>',
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_fault_is_found(rule, browser, axe, tmp_path):
    (tmp_path / "p.html").write_text(PAGE.format(PLANTED[rule]))
    with serving(tmp_path) as address:
        found = faults(browser, axe, f"{address}p.html")
    assert [f[0] for f in found if not of_theme(f)] == [rule]


def test_a_good_page_passes(browser, axe, tmp_path):
    (tmp_path / "p.html").write_text(PAGE.format("<p>Words.</p>"))
    with serving(tmp_path) as address:
        assert faults(browser, axe, f"{address}p.html") == []


def test_the_lock_holds_a_hash_and_no_address():
    lock = json.loads((WEB / "axe" / "package-lock.json").read_text(encoding="utf-8"))
    packages = {k: v for k, v in lock["packages"].items() if k}
    assert packages and all("integrity" in p and "resolved" not in p for p in packages.values())
    wanted = json.loads((WEB / "axe" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert {k.removeprefix("node_modules/"): p["version"] for k, p in packages.items()} == wanted
