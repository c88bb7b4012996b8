"""The first figure draws the ratio beside it; a link to a page says what it is about, and shows a picture."""

import re
import struct

import pytest
from docutils import nodes
from docutils.core import publish_doctree

from tools import cards
from tools.sitecheck import ROOT, parse, title, toc


def drawn(svg: str) -> dict[str, int]:
    """How many squares each group of the figure has."""
    groups = re.split(r'<g id="(reading|multiplying)">', svg)
    return {groups[i]: groups[i + 1].split("</g>")[0].count("<path") for i in (1, 3)}


def test_the_figure_draws_the_ratio():
    reading, multiplying = cards.ratio()
    assert drawn(cards.FIGURE.read_text()) == {"reading": round(reading / multiplying), "multiplying": 1}


def test_the_text_beside_it_says_the_same_numbers():
    from companion.cost import decode_step

    text = (ROOT / "book" / "intro.md").read_text()
    step = decode_step(cards.MODEL, cards.DEVICE, batch=1, context=1)
    said = {
        f"{step.weights_bytes / 1e9:.0f} gigabytes of weights",
        f"{step.matmul_flops / 1e9:.0f} billion floating-point",
        f"{1e3 * step.weights_seconds:.2f} milliseconds for the reading",
        f"and {1e3 * step.matmul_seconds:.4f} for the arithmetic",
        f"squares of {1e6 * step.matmul_seconds:.0f} microseconds: {cards.squares()} for reading",
        f"{cards.squares() + 1} small squares: {cards.squares()} are blue",
    }
    assert [s for s in said if s not in " ".join(text.split())] == []


def test_the_pictures_are_those_that_the_code_draws(tmp_path):
    pytest.importorskip("matplotlib")
    cards.draw(tmp_path / "ratio.svg", tmp_path / "card.png")
    assert drawn((tmp_path / "ratio.svg").read_text()) == drawn(cards.FIGURE.read_text())
    stored, again = (p.read_bytes() for p in (cards.CARD, tmp_path / "card.png"))
    assert struct.unpack(">II", stored[16:24]) == struct.unpack(">II", again[16:24]) == (1200, 630)


@pytest.mark.parametrize("name", toc())
def test_a_link_to_a_page_says_what_it_is(name, html):
    page = parse((html / name).with_suffix(".html"))
    tags = {
        m.get("property") or m.get("name"): m["content"] for m in page.find_all("meta") if m.get("content")
    }
    wanted = title(name).replace("`", "").replace("'", "’")
    assert wanted in tags["og:title"].replace("'", "’")
    assert tags["og:site_name"] == "What a Token Costs" and tags["og:url"].endswith(f"/{name}.html")
    image = tags["og:image"].removeprefix(tags["og:url"].removesuffix(f"{name}.html"))
    assert (html / image).is_file() and len(tags["og:image:alt"].split()) > 5
    assert tags["twitter:card"] == "summary_large_image"
    said = tags["og:description"]
    assert said == tags["description"] and 20 < len(said) <= cards.LENGTH + 2 and said[-1] in ".?!:…"
    assert not said.startswith(("Question", wanted))
    assert len(page.find_all("meta", attrs={"name": "description"})) == 1


def first(text):
    page = f"Title\n=====\n\n{text}\n\nSecond.\n"
    return cards.description(publish_doctree(page, settings_overrides={"doctitle_xform": False}))


def test_a_description_is_the_first_paragraph():
    assert first("*Question.* Why\nthis? And how?") == "Why this? And how?"
    assert first(".. raw:: html\n\n   <p>x</p>\n\nText.") == "Text."
    assert first("* a list\n\nText.") == "Text."
    assert cards.description(nodes.document(None, None)) == ""


def test_a_long_description_ends_with_a_sentence():
    assert cards.shorten("One. " * 50 + "Two.") == " ".join(["One."] * 44)
    long = cards.shorten("word " * 100)
    assert long.endswith("word …") and len(long) <= cards.LENGTH + 2
