"""The record of the notebooks' runs, and the pages that show it: nbval's counts, the stored times."""

import json
import platform
import re
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import IPyNbFile

from tools import notebooks as nb
from tools import reading, status
from tools.browser import find
from tools.sitecheck import ROOT, article, parse

NOTEBOOKS = status.chapters()


def conftest():
    """notebooks/conftest.py, which is no module of a package."""
    spec = spec_from_file_location("notebooks_conftest", ROOT / "notebooks" / "conftest.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_counts_are_those_of_nbval(name, request):
    collected = IPyNbFile.from_parent(request.session, path=ROOT / "notebooks" / f"{name}.ipynb").collect()
    kind = conftest().kind
    assert Counter(kind(item.cell, item.options) for item in collected) == status.kinds(NOTEBOOKS[name])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_chapter_says_the_minutes_of_the_cover(name):
    takes = reading.reading(NOTEBOOKS[name])
    said = f"Time: {takes.minutes} minutes to read, {takes.exercises} for the exercises. The notebook runs"
    assert said in NOTEBOOKS[name].cells[0].source


def rows(page, columns):
    """The rows of the page's table with so many columns, as texts."""
    found = [[" ".join(td.get_text().split()) for td in tr.find_all("td")] for tr in page.find_all("tr")]
    return [row for row in found if len(row) == columns]


def test_the_status_page_shows_every_notebook_and_its_counts(html):
    shown = rows(article(parse(html / "book" / "status.html")), 7)
    assert len(shown) == len(NOTEBOOKS) + 1
    for row, (name, notebook) in zip(shown, NOTEBOOKS.items()):
        count = status.kinds(notebook)
        assert row[0] == f"{int(name[:2])}. {reading.title(notebook)}"
        assert list(map(int, row[4:])) == [count[k] for k in status.KINDS]
    assert list(map(int, shown[-1][4:])) == [sum(int(r[i]) for r in shown[:-1]) for i in (4, 5, 6)]


@pytest.mark.skipif(find() is None, reason="no Chromium found: the page was not looked at on a phone")
def test_a_phone_shows_every_number_and_what_it_is(site, browser):
    numbers = "[...document.querySelectorAll('.runs tbody tr')].map((tr) => [...tr.cells].map("
    numbers += "(td) => [td.innerText.trim(), td.getBoundingClientRect().right,"
    numbers += " getComputedStyle(td, '::before').content, getComputedStyle(td, '::after').content]))"
    found = browser.visit(f"{site}book/status.html", width=390, scripts={"rows": numbers}).values["rows"]
    assert len(found) == len(NOTEBOOKS) + 1
    for row in found:
        assert max(right for _, right, *_ in row) <= 390, row
        said = [
            "".join(x.strip('"') for x in (before, text, after) if x != "none")
            for text, _, before, after in row
        ]
        assert re.fullmatch(r"compared \d+;measured \d+;without text \d+", ";".join(said[4:])), said


def test_the_first_page_shows_the_minutes_and_seconds(html):
    shown = rows(article(parse(html / "book" / "intro.html")), 6)
    entries = status.stored()
    assert len(shown) == len(NOTEBOOKS)
    for row, (name, notebook) in zip(shown, NOTEBOOKS.items()):
        takes, entry = reading.reading(notebook), status.known(entries, name, notebook)
        assert row[0] == str(int(name[:2])) and row[1].startswith(reading.title(notebook))
        assert row[1].endswith("?")
        assert row[2:4] == [f"{takes.minutes} min", f"{takes.exercises} min"]
        assert row[4] == (f"{entry['seconds']} s" if entry else "not recorded")
        assert row[5].startswith("CPU") and ("GPU" in row[5]) == (int(name[:2]) in range(16, 20))


def test_nothing_of_the_machine_but_its_kind():
    entries = status.stored()
    assert set(entries) <= set(NOTEBOOKS)
    for entry in entries.values():
        assert set(entry) == {"made", "seconds", "device", "python", *status.PACKAGES, "source_sha256"}
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry["made"]) and entry["seconds"] > 0
    text = (ROOT / "notebooks" / status.FILE).read_text() if entries else ""
    assert not re.search(r"/|\\\\|@", text)
    assert len(platform.node()) < 4 or platform.node() not in text


CHAPTER = new_notebook(
    metadata={"companion": {"source_sha256": "abc"}},
    cells=[
        new_markdown_cell(
            "# Bytes?\n\n**Question.** It reads. How many, and\nwhy?\n\nMore.\n\n## Before\n\n"
            + "word " * 1998
        ),
        new_code_cell("import companion", metadata={"tags": ["setup"]}),
        new_code_cell("x = 1\n\n" + "y = 2\n" * 59, outputs=[new_output("stream", text="1\n")]),
        new_code_cell("z = 3", metadata={"tags": ["measurement", "nbval-ignore-output"]}),
        new_code_cell("plot", outputs=[new_output("display_data", data={"image/svg+xml": "<svg/>"})]),
        new_markdown_cell("## Exercises\n\n### Exercise 1 (easy, five minutes)\n\n" + "many " * 5000),
        new_code_cell("a = 4\n" * 500),
        new_markdown_cell(
            "### Exercise 2 (hard, twenty-five minutes)\n\nNot this.\n\n## What to read next\n\nOne more."
        ),
    ],
)


def test_minutes_come_from_the_text():
    takes = reading.reading(CHAPTER)
    assert takes == reading.Reading(words=2014, lines=62, exercises=30)
    assert takes.minutes == 15  # 2014 / 200 + 62 * 5 / 60 = 15.2
    assert reading.question(CHAPTER) == "How many, and why?" and reading.title(CHAPTER) == "Bytes?"
    assert status.kinds(CHAPTER) == Counter(silent=3, compared=1, measured=1)
    cell = new_markdown_cell("### Exercise 1 (easy, some minutes)")
    with pytest.raises(ValueError, match="'some' minutes"):
        reading.reading(new_notebook(cells=[cell]))


def test_the_first_page_says_how_the_minutes_are_counted():
    text = (ROOT / "book" / "intro.md").read_text()
    assert f"{reading.WORDS_A_MINUTE} words of prose a minute" in text
    assert f"{ {5: 'five'}[reading.SECONDS_A_LINE] } seconds for a line of code" in text


@pytest.fixture
def folder(tmp_path):
    nbformat.write(CHAPTER, tmp_path / "05_bytes.ipynb")
    return tmp_path


def test_a_run_is_recorded_and_shown(folder):
    status.record(folder, "05_bytes", 41.6, CHAPTER)
    status.record(folder, "06_other", 1.0, CHAPTER)  # the first entry stays
    entry = json.loads((folder / status.FILE).read_text())["05_bytes"]
    assert (entry["seconds"], entry["python"], entry["torch"] is None) == (
        42,
        sys.version.split()[0],
        False,
    )
    page = status.expand("<!-- path\n05_bytes: Of what?\n-->\n\n<!-- status -->", folder)
    assert "Of what?" in page and "How many, and why?" not in page
    assert page.count("42") == 3 and entry["device"] in page and "| 1 | 1 | " in page
    assert "How many, and why?" in status.expand("<!-- path -->", folder)
    with pytest.raises(ValueError, match="no chapter 07_nothing"):
        status.expand("<!-- path\n07_nothing: Why?\n-->", folder)


def test_a_record_of_other_code_is_not_shown(folder):
    changed = new_notebook(metadata={"companion": {"source_sha256": "other"}})
    status.record(folder, "05_bytes", 41.6, changed)
    assert "not recorded" in status.status_table(folder) and "42" not in status.status_table(folder)
    assert "not recorded" in status.path_table(folder=folder)


def test_making_a_notebook_writes_its_record(folder, monkeypatch):
    made = []
    monkeypatch.setattr(nb, "NOTEBOOKS", folder)
    monkeypatch.setattr(nb, "names", lambda wanted: ["05_bytes"])
    monkeypatch.setattr(nb, "convert", lambda md: CHAPTER)
    monkeypatch.setattr(nb, "execute", lambda notebook, name: notebook)
    monkeypatch.setattr(nb, "write", lambda notebook, path: made.append(path.name))
    assert nb.main(["convert", "05_bytes"]) == 0 and not (folder / status.FILE).exists()
    assert nb.main(["make", "05_bytes"]) == 0 and made == ["05_bytes.ipynb"] * 2
    assert set(status.stored(folder)) == {"05_bytes"}
