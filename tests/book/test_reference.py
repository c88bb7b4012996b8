"""The reference page: every entry leads to its source and to the chapters that use or build it, its
lists name what is there, and code stays as it was written."""

import ast
import fnmatch
import re

import pytest
from bs4 import BeautifulSoup

from tools import apidoc, docstrings
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


def documented():
    """(id, node, class around it or None, file) of each module, entry and method that the page shows."""
    for name in apidoc.MARKER.findall(PAGE):
        base = ROOT / name.replace(".", "/")
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield name, tree, None, path
        for file, node in apidoc.public(path, tree):
            yield f"{name}.{node.name}", node, node if isinstance(node, ast.ClassDef) else None, file
            for item in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(item, ast.FunctionDef) and item.name[0] != "_":
                    yield f"{name}.{node.name}.{item.name}", item, node, file


CLASSES = {
    n.name: n
    for path in (ROOT / "companion").rglob("*.py")
    for n in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(n, ast.ClassDef)
}


def names_known(node, around, file):
    """Arguments, and of a class its fields, attributes and methods, those of its bases too; of a package
    its modules."""
    if isinstance(node, ast.Module):
        return {p.stem for p in file.parent.iterdir()}
    found, todo = set(), [node, around]
    while todo:
        if (scope := todo.pop()) is None:
            continue
        if isinstance(scope, ast.ClassDef):
            todo += [CLASSES.get(getattr(b, "id", None)) for b in scope.bases]
        for n in ast.walk(scope):
            if isinstance(n, ast.arg | ast.FunctionDef):
                found.add(n.arg if isinstance(n, ast.arg) else n.name)
            elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name):
                found.add(n.target.id)
            elif isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self":
                found.add(n.attr)
    return found


SHOWN = {name: rest for name, *rest in documented()}
LISTING = [name for name, (node, *_) in SHOWN.items() if docstrings.names(ast.get_docstring(node) or "")]


def test_the_page_has_lists_to_check():
    assert len(LISTING) > 80


@pytest.mark.parametrize("name", LISTING)
def test_every_bulleted_name_is_an_argument_a_field_or_a_module(name):
    node, around, file = SHOWN[name]
    names = docstrings.names(ast.get_docstring(node))
    assert len(set(names)) == len(names)
    known = names_known(node, around, file)
    assert [n for n in names if '"' not in n and not fnmatch.filter(known, n)] == []
    code = "\n".join(  # a quoted value is one that some code of the room knows
        re.sub(r'""".*?"""', "", p.read_text(encoding="utf-8"), flags=re.S)
        for folder in {file.parent, ROOT / "companion" / "cost"}
        for p in folder.glob("*.py")
    )
    values = [re.search(r'"(.+)"', n).group(1) for n in names if '"' in n]
    assert [v for v in values if f'"{v}"' not in code] == []


def prose_lines():
    """The page's lines outside of code."""
    text = re.sub(r"^```.*?^```$", "", apidoc.expand(PAGE, "URL"), flags=re.M | re.S)
    return [re.sub(r"`[^`]*`", "code", re.sub(r"</?span[^>]*>", "", line)) for line in text.splitlines()]


def test_no_column_of_a_list_is_left_in_a_paragraph():
    assert [x for x in prose_lines() if re.search(r"\S {2,}\S", x)] == []


def test_no_doctest_is_read_as_quotations():
    assert [x for x in prose_lines() if x.lstrip().startswith(">")] == []


def test_no_quote_or_dash_of_code_is_made_typographic():
    """`f(kind="x")`, JSON and `--flag` outside of code would get curly quotes and an en dash."""
    assert [x for x in prose_lines() if re.search(r'--|[={\[]"|"[\]}]|"[a-z0-9_]+"', x)] == []


def test_no_reference_leads_to_what_the_page_does_not_show():
    """The text of a module that is not a room is not on the page, nor are constants without a room."""
    dangling = r"\b(see|the table|table) (above|below)|the table's|(one|a key) of [A-Z]{4,}\b"
    text = " ".join(x.strip() for x in apidoc.expand(PAGE, "URL").splitlines())
    assert re.findall(rf".{{0,40}}(?:{dangling})", text) == []


def test_a_room_begins_with_its_names_and_every_name_has_one_anchor():
    text = apidoc.expand(PAGE, "URL")
    anchors = re.findall(r"^\(([\w-]+)\)=\n### ", text, re.M)
    assert len(anchors) == len(re.findall(r"^### ", text, re.M))
    assert len({a.replace("_", "-") for a in anchors}) == len(anchors)
    assert re.findall(r"\[`\w+`\]\(#([\w-]+)\)", text) == anchors
    for name in (
        "live-cost-live",
        "live-paging-live",
        "live-serving-live",
        "moe-load",
        "moe-load-class",
        "kernels-use",
    ):
        assert name in anchors


def test_no_method_stands_without_a_text():
    text = apidoc.expand(PAGE, "URL")
    assert re.findall(r"^(\*\*`.+`\*\*)\n+(?:\*\*|\[source|\([\w-]+\)=|#)", text, re.M) == []
    assert "As in `Cache`: `append`, `attend`, `nbytes`, `nbytes_used`." in text
    assert "extra_repr" not in text


def test_chapters_of_a_room_are_in_order():
    for numbers in re.findall(r"(?:see|used in) chapters (.+)", apidoc.expand(PAGE, "URL")):
        found = [int(n) for n in re.findall(r"\[(\d+)\]\(", numbers)]
        assert found == sorted(found)


def test_defaults_are_shown_by_value():
    """A constant of a module that the page does not show says nothing."""
    text = apidoc.expand(PAGE, "URL")
    assert "confidence: float=0.95" in text
    assert re.findall(r"(?:=| = )[A-Z][A-Z_]+\b", text) == []


LISTS = """Summary: not an item.

kind: what is stored.
    "a", "b"   these two, over
               two lines
    per="c"    that
    A line behind them.
*_bias: others, of `x`. And "quoted words" and "value" and --flag and {"k": 1}.

A paragraph, with a
word: that is no item.

    width  inches

One of two:
one   1
two   2, and
not yet. Then
nothing.
The end.

>>> f("_x_")
[1]
"""
MADE = """Summary: not an item.

- `kind`: what is stored.
  - `"a", "b"`: these two, over
    two lines
  - `per="c"`: that

  A line behind them.
- `*_bias`: others, of `x`. And "quoted words" and `"value"` and `--flag` and `{"k": 1}`.

A paragraph, with a
word: that is no item.

- `width`: inches

One of two:

- `one`: 1
- `two`: 2, and
  not yet. Then
  nothing.

The end.

```pycon
>>> f("_x_")
[1]
```"""


def test_a_docstring_as_markdown():
    text = re.sub(r"</?span[^>]*>", "", docstrings.markdown(LISTS))
    assert text == MADE


@pytest.fixture(scope="module")
def built(html):
    return BeautifulSoup((html / "book" / "api.html").read_text(encoding="utf-8"), "html.parser")


def test_the_built_page_has_no_quotation_in_a_quotation(built):
    assert built.select("blockquote blockquote") == []
    assert len(built.select(".highlight-pycon")) >= 9


def test_the_built_page_keeps_the_anchors_that_links_use(built):
    ids = {tag["id"] for tag in built.select("[id]")}
    for page in sorted((ROOT / "book").glob("*.md")) + sorted((ROOT / "notebooks").glob("*.md")):
        used = re.findall(r"api\.(?:md|html)#([\w-]+)", page.read_text(encoding="utf-8"))
        assert {u.replace("_", "-") for u in used} <= ids
    assert {
        "live",
        "load",
        "use",
        "live-cost-live",
        "live-serving-live",
        "moe-load-class",
        "figures-use",
    } <= ids
