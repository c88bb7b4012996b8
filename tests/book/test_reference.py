"""The reference page: every entry leads to its source and to the chapters that use or build it."""

import re

import pytest

from tools import apidoc
from tools.sitecheck import ROOT

PAGE = (ROOT / "book" / "api.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize("name", SECTIONS)
def test_every_room_names_the_chapters_that_build_it(name):
    chapters = apidoc.CHAPTER.findall(SECTIONS[name])
    assert chapters and all((ROOT / "notebooks" / f"{c}.ipynb").exists() for c in chapters)
    assert len(apidoc.MARKER.findall(SECTIONS[name])) == 1


def test_every_entry_leads_to_source_and_chapter():
    text = apidoc.expand(PAGE, "URL")
    entries = re.split(r"^### ", text, flags=re.M)[1:]
    assert len(entries) > 150
    for entry in entries:
        (foot,) = re.findall(r"^\[source\]\(URL/companion/\S+#L\d+-L\d+\).*$", entry, re.M)
        assert re.search(r" · (used in|see) chapters? \[\d+\]\(\.\./notebooks/\d\d_\w+\.ipynb\)", foot), (
            entry[:60]
        )


CELL = """```{code-cell} ipython3
---
tags: [measurement]
---
from companion.thing import f
import companion.other
from companion import thing as t, room

%time f(1)
room.g(2)
companion.other.h(3)
```

Prose with companion.thing.not_this.

```{code-cell} ipython3
:tags: [setup]

from companion.thing import late
```
"""


def test_uses_are_read_from_the_code_of_cells(tmp_path):
    (tmp_path / "04_one.md").write_text(CELL)
    (tmp_path / "05_two.md").write_text("```{code-cell} ipython3\nfrom companion.thing import f\n```\n")
    (tmp_path / "06_no_notebook.md").write_text(CELL)
    for name in ("04_one", "05_two"):
        (tmp_path / f"{name}.ipynb").touch()
    found = apidoc.uses(tmp_path)
    assert found["companion.thing.f"] == ["04_one", "05_two"]
    for name in ("companion.room.g", "companion.other.h", "companion.thing.late"):
        assert found[name] == ["04_one"]
    assert "companion.thing.not_this" not in found


def test_an_entry_that_no_chapter_uses_has_those_of_its_room(tmp_path):
    (tmp_path / "companion").mkdir()
    (tmp_path / "companion" / "thing.py").write_text('def f():\n    """F."""\n\n\ndef g():\n    """G."""\n')
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "04_one.md").write_text(CELL)
    (tmp_path / "notebooks" / "04_one.ipynb").touch()
    page = "## A\n\n[x](../notebooks/01_no.ipynb)\n\n## Thing\n\nIn [7](../notebooks/07_seven.ipynb).\n\n"
    page += "<!-- api: companion.thing -->\n"
    text = apidoc.expand(page, "URL", tmp_path)
    f, g = text.split("### ")[1:]
    assert "· used in chapter [4](../notebooks/04_one.ipynb)" in f
    assert "· see chapter [7](../notebooks/07_seven.ipynb)" in g and "01_no" not in g
