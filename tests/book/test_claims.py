"""Claims checked: each row leads to a cell that the tests compare, and that prints its numbers."""

import re
from collections import Counter

import nbformat
import pytest

from tools import status
from tools.notebooks import output_texts
from tools.sitecheck import ROOT

PAGE = ROOT / "book" / "claims.md"
ROW = re.compile(r"^\| (?!you read|---)(.+?) \| (.+?) \| (.+?) \|$", re.M)
LINK = re.compile(r"\[[Cc]hapter (\d+)\]\(\.\./notebooks/((\d\d)_\w+\.ipynb)#([\w-]+)\)")
NUMBER = re.compile(r"\*\*([^*]+)\*\*")


def shown(name: str, anchor: str, folder=ROOT / "notebooks") -> str:
    """What the first code cell that prints something behind an anchor of a notebook prints."""
    behind = False
    for cell in nbformat.read(folder / name, as_version=4).cells:
        if cell.cell_type == "markdown":
            behind = behind or f'<a id="{anchor}"></a>' in cell.source
        elif behind and (texts := [t for out in cell.outputs for t in output_texts(out)]):
            if status._kind(cell) != "compared":
                raise AssertionError(f"{name}#{anchor}: the cell is not compared, so its numbers may move")
            return "\n".join(texts)
    raise AssertionError(f"{name}: no anchor {anchor}, or nothing printed behind it")


def problems(row: tuple[str, str, str], folder=ROOT / "notebooks") -> list[str]:
    """Why a row can't be believed."""
    claim, cell, verdict = row
    *parts, rest = LINK.split(cell)  # the text before each link, between the four groups of LINK
    links, numbers = LINK.findall(cell), [NUMBER.findall(before) for before in parts[::5]]
    if not links or not all(numbers) or not verdict.strip() or NUMBER.search(rest + claim + verdict):
        return [f"{claim!r}: {len(links)} links to a cell, {numbers} before them, verdict {verdict!r}"]
    found = []
    for (said, name, number, anchor), before in zip(links, numbers):
        text = shown(name, anchor, folder)
        found += [f"{claim!r} leads to chapter {said}, {name}"] if int(said) != int(number) else []
        found += [f"{name}#{anchor} does not print {n!r}" for n in before if not printed(n, text)]
    return found


def printed(number: str, text: str) -> bool:
    """The number stands in the text, not as a part of a longer one."""
    return re.search(rf"(?<![\w.,]){re.escape(number)}(?![\w]|[.,]\d)", " ".join(text.split())) is not None


ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=[re.sub(r"\W+", "-", r[0])[:40].strip("-") for r in ROWS])
def test_the_cell_prints_the_numbers(row):
    assert problems(row) == []


def test_every_line_of_the_tables_is_such_a_row_and_stands_once():
    lines = [x for x in PAGE.read_text().splitlines() if x.startswith("|")]
    heads = sum(x.startswith(("| you read", "|---")) for x in lines)
    assert len(lines) - heads == len(ROWS) > 50
    assert max(Counter(claim for claim, *_ in ROWS).values()) == 1


def test_every_article_is_treated():
    for article in ("first article", "second article", "third article"):
        assert sum(article in claim for claim, *_ in ROWS) >= 4


BEHIND = "../notebooks/05_roofline.ipynb#taken-apart"
RIDGE = "../notebooks/05_roofline.ipynb#latent-ridge"


@pytest.mark.parametrize(
    "row, said",
    [
        (("claim", f"it is **13.9%** [Chapter 5]({BEHIND})", "wrong"), "does not print"),
        (("claim", f"it is **3.8%** [Chapter 5]({BEHIND})", "wrong"), "does not print"),
        (("claim", f"it is 13.8% [Chapter 5]({BEHIND})", "wrong"), "1 links to a cell, [[]]"),
        (("claim", f"**13.8%** [Chapter 5]({BEHIND}), **24.7%**", "wrong"), "1 links to a cell"),
        (("claim", f"**241.8** ([chapter 5]({RIDGE})) [Chapter 5]({BEHIND})", "wrong"), "[['241.8'], []]"),
        (("claim", f"**13.8%** ([chapter 5]({RIDGE})), **24.7%** [Chapter 5]({BEHIND})", "wrong"), "'13.8%'"),
        (("claim", "it is **13.8%**", "wrong"), "0 links"),
        (("claim", f"**13.8%** [Chapter 4]({BEHIND})", "wrong"), "leads to chapter 4"),
        (("claim of **13.8%**", f"**13.8%** [Chapter 5]({BEHIND})", "wrong"), "1 links to a cell"),
    ],
)
def test_a_wrong_row_is_found(row, said):
    assert any(said in p for p in problems(row))


@pytest.mark.parametrize("anchor, said", [("nowhere", "no anchor"), ("moving", "not compared")])
def test_an_anchor_must_lead_to_a_compared_cell(anchor, said, tmp_path):
    cells = [
        nbformat.v4.new_markdown_cell('<a id="moving"></a>Now the clock.'),
        nbformat.v4.new_code_cell("x = 1"),
        nbformat.v4.new_code_cell(
            "print(clock())",
            metadata={"tags": ["measurement", "nbval-ignore-output"]},
            outputs=[nbformat.v4.new_output("stream", text="13.8%")],
        ),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "05_clock.ipynb")
    with pytest.raises(AssertionError, match=said):
        shown("05_clock.ipynb", anchor, tmp_path)
