"""Pages on paper or as PDF: the text alone, black on white, solutions open, the cheat sheet on two sides."""

import base64
import re

import pytest

from tools.browser import Browser, find
from tools.serve import serving

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium found: pages were not printed")

A4 = 673  # pixels of text between the margins of _static/print.css
LOOK = {
    "hidden": "['.bd-sidebar-primary', '.bd-sidebar-secondary', '.bd-header-article', '.prev-next-footer']"
    ".every(s => [...document.querySelectorAll(s)].every(e => !e.getClientRects().length))",
    "title": "document.querySelectorAll('h1').length && [...document.querySelectorAll('.bd-article h1')]"
    ".filter(e => e.getClientRects().length).length",
    "closed": "[...document.querySelectorAll('.bd-article details')]"
    ".filter(e => !e.lastElementChild.checkVisibility()).length",
    "wide": "document.documentElement.scrollWidth - innerWidth",
    "cut": "[...document.querySelectorAll('.bd-article pre, .bd-article table')]"
    ".filter(e => e.scrollWidth > e.clientWidth + 2 && e.getClientRects().length)"
    ".map(e => e.innerText.slice(0, 60))",
    "paper": "getComputedStyle(document.body).backgroundColor",
    "ink": "getComputedStyle(document.querySelector('.bd-article p')).color",
}


@pytest.fixture(scope="module")
def printed(html):
    """A function: what a page looks like in print (dark on the screen), and how many sides it has."""
    with serving(html) as site, Browser() as browser:

        def look(name):
            with browser.tab(f"{site}{name}.html", width=A4, dark=True) as tab:
                tab.call("Emulation.setEmulatedMedia", media="print")
                seen = {key: tab.evaluate(script) for key, script in LOOK.items()}
                pdf = tab.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
            sides = len(re.findall(rb"/Type\s*/Page\b(?!s)", base64.b64decode(pdf["data"])))
            return seen | {"sides": sides}

        yield look


@pytest.mark.parametrize(
    "name", ["book/cheat_sheet", "book/claims", "notebooks/05_roofline", "notebooks/20_lab"]
)
def test_a_page_in_print(name, printed):
    seen = printed(name)
    assert seen["hidden"] and seen["title"] == 1 and seen["closed"] == 0
    assert seen["wide"] <= 0 and seen["cut"] == []
    assert seen["paper"] == "rgb(255, 255, 255)" and seen["ink"] == "rgb(17, 17, 17)"
    assert seen["sides"] >= 1


def test_the_cheat_sheet_has_two_sides(printed):
    assert printed("book/cheat_sheet")["sides"] <= 2
