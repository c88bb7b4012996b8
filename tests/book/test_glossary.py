"""The glossary: every entry leads to a place in a chapter, and that place leads back."""

import re

import pytest

from tools.sitecheck import ROOT

PAGE = ROOT / "book" / "glossary.md"
ENTRY = re.compile(r"^((?:<a id=\"[\w-]+\"></a>)+)\*\*(.+?)\.\*\* (.+)$")
LINK = re.compile(r" \[Chapter (\d+)\]\(\.\./notebooks/((\d\d)_\w+)\.ipynb#([\w-]+)\)$")
BACK = re.compile(r'<a id="([\w-]+)"></a>\[[^\]]+\]\(\.\./book/glossary\.md#([\w-]+)\)')


def read(text: str) -> list[tuple[list[str], str, str]]:
    """(anchors, term, text) of every entry; a paragraph that is none of these is an error."""
    found = []
    for paragraph in text.split("\n\n")[2:]:
        if not (entry := ENTRY.fullmatch(paragraph.strip())):
            raise AssertionError(f"no entry: {paragraph!r}")
        found.append((re.findall(r'id="([\w-]+)"', entry[1]), entry[2], entry[3]))
    return found


def chapters() -> dict[str, str]:
    return {p.stem: p.read_text(encoding="utf-8") for p in (ROOT / "notebooks").glob("[0-9][0-9]_*.md")}


def problems(entries, texts) -> list[str]:
    """Entries that lead nowhere or that nobody leads to, and links to what isn't there."""
    found = []
    places = {name: dict(BACK.findall(text)) for name, text in texts.items()}
    known = [anchor for anchors, *_ in entries for anchor in anchors]
    found += [f"{a} is there twice" for a in set(known) if known.count(a) > 1]
    linked = {target for place in places.values() for target in place.values()}
    for anchors, term, text in entries:
        found += [f"{term}: no chapter leads to {a}" for a in anchors if a not in linked]
        if not (link := LINK.search(text)):
            found.append(f"{term}: leads to no chapter")
        elif link[2] not in places or int(link[1]) != int(link[3]):
            found.append(f"{term}: there is no chapter {link[2]}")
        elif places[link[2]].get(link[4]) not in anchors:
            found.append(f"{term}: {link[2]}#{link[4]} does not lead back")
    for name, text in texts.items():
        targets = re.findall(r"glossary\.md#([\w-]+)\)", text)
        found += [f"{name}: the glossary has no {t}" for t in set(targets) - set(known)]
    return found


ENTRIES = read(PAGE.read_text(encoding="utf-8"))


def test_links_go_both_ways():
    assert problems(ENTRIES, chapters()) == []
    assert len(ENTRIES) > 80


def test_entries_are_in_order():
    terms = [term.lower().replace("-", " ") for _, term, _ in ENTRIES]
    assert terms == sorted(terms)


BOTH = '<a id="cat"></a>[cat](../book/glossary.md#cat) or <a id="b"></a>[b](../book/glossary.md#b)'
TEXTS = {"01_first": f"A {BOTH}."}
RIGHT = '# G\n\nIntro.\n\n<a id="b"></a>**B.** Text. [Chapter 1](../notebooks/01_first.ipynb#b)\n\n'
RIGHT += '<a id="cat"></a>**Cat.** Text. [Chapter 1](../notebooks/01_first.ipynb#cat)\n'


def test_a_right_glossary_passes():
    assert problems(read(RIGHT), TEXTS) == []


@pytest.mark.parametrize(
    "old, new, said",
    [
        (" [Chapter 1](../notebooks/01_first.ipynb#cat)", "", "Cat: leads to no chapter"),
        ("ipynb#cat", "ipynb#b", "does not lead back"),
        (
            "[Chapter 1](../notebooks/01_first.ipynb#cat)",
            "[Chapter 2](../notebooks/01_first.ipynb#cat)",
            "no chapter",
        ),
        ('<a id="cat">', '<a id="dog"></a><a id="cat">', "no chapter leads to dog"),
        ('<a id="cat">', '<a id="b"></a><a id="cat">', "b is there twice"),
        ('<a id="b"></a>**B.**', '<a id="c"></a>**B.**', "the glossary has no b"),
    ],
)
def test_a_fault_is_found(old, new, said):
    found = problems(read(RIGHT.replace(old, new)), TEXTS)
    assert any(said in p for p in found), found
