"""The chapters: pairs agree, outputs are of this code, the frame is complete; and the checks can fail."""

import copy
import re

import jupytext
import nbformat
import pytest

from tools import nbcheck
from tools import notebooks as nb
from tools.notebooks import NOTEBOOKS, SETUP, SETUP_TAGS

NAMES = nb.names()


def test_there_are_chapters():
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_chapter(name):
    assert nbcheck.check(NOTEBOOKS / f"{name}.md") == []


# --- a small chapter that satisfies everything, and one fault at a time

EXERCISE = """### Exercise {n} (easy, five minutes)

How much is {n} + 1?

<details><summary>Solution</summary>

One more than {n}.

</details>

```{{code-cell}} ipython3
---
jupyter:
  source_hidden: true
tags: [solution, hide-cell]
---
assert {n} + 1 > {n}
print({n} + 1)
```
"""
CHAPTER = f"""---
jupytext:
  formats: ipynb,md:myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# Bytes or FLOPs?

**Question.** Which?

**You will be able to** say which.

```{{code-cell}} ipython3
:tags: [{", ".join(SETUP_TAGS)}]

{SETUP}
```

## Before you run it: a prediction

{"A sentence of five words. " * 320}

## Build

```{{code-cell}} ipython3
---
mystnb:
  image:
    alt: One line that rises from left to right
---
fig, ax = companion.figures.figure(height=1.5)
ax.plot([1, 2], [3, 4])
print([3, 4])
import matplotlib.pyplot as plt
plt.show()
```

**Figure.** It rises, see [attention](02_attention.ipynb).

## What must hold, and what breaks if it doesn't

Much: `{{ref}}` in code is fine, and so is $x^2$.

## Measure

```{{code-cell}} ipython3
:tags: [measurement, nbval-ignore-output]

import time
print(time.time())
```

## Takeaway

> **Takeaway.** One thing.

## Exercises

{EXERCISE.format(n=1)}
{EXERCISE.format(n=2)}
{EXERCISE.format(n=3)}
## What to read next

More.
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small chapter, executed."""
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "05_small.md").write_text(CHAPTER)
    (folder / "02_attention.ipynb").write_text("{}")
    notebook = nb.execute(nb.convert(folder / "05_small.md"), "05_small", cwd=folder)
    nb.write(notebook, folder / "05_small.ipynb")
    return folder


def problems(folder, monkeypatch, md=CHAPTER, change=None):
    monkeypatch.setattr(nbcheck, "NOTEBOOKS", folder)
    path = folder / "05_small.ipynb"
    stored = path.read_text()
    try:
        (folder / "05_small.md").write_text(md)
        if change:
            notebook = nbformat.read(path, as_version=4)
            change(notebook)
            nbformat.write(notebook, path)
        return nbcheck.check(folder / "05_small.md")
    finally:
        path.write_text(stored)
        (folder / "05_small.md").write_text(CHAPTER)


def test_the_small_chapter_is_right(small, monkeypatch):
    assert problems(small, monkeypatch) == []


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("see [attention]", "look at [attention]", "differ"),
        ("print([3, 4])", "print([3, 5])", "older than the code"),
        ("measurement, nbval-ignore-output]", "measurement]", "older than the code"),
    ],
)
def test_an_edit_of_the_source_alone_is_seen(small, monkeypatch, old, new, said):
    found = problems(small, monkeypatch, CHAPTER.replace(old, new))
    assert any(said in p for p in found), found


def cell(notebook, text):
    return next(c for c in notebook.cells if text in c.source)


def replace(old, new):
    """The same change in the source and in the notebook, so that only what it breaks is reported."""

    def change(notebook):
        for c in notebook.cells:
            c.source = c.source.replace(old, new)

    return change


def untag(text, **metadata):
    def change(notebook):
        cell(notebook, text).metadata.update(metadata)

    return change


FAULTS = {
    "no output": (lambda n: cell(n, "print([3, 4])").update(outputs=[]), "no output is stored"),
    "not run": (lambda n: cell(n, "print([3, 4])").update(execution_count=None), "not every cell"),
    "order": (lambda n: cell(n, "print([3, 4])").update(execution_count=9), "not every cell"),
    "hash": (lambda n: n.metadata.pop("companion"), "older than the code"),
    "alt": (lambda n: cell(n, "print([3, 4])").metadata.pop("mystnb"), "without alt text"),
    "numbers": (lambda n: cell(n, "print([3, 4])").outputs.pop(0), "numbers that the figure draws"),
    "caption": (replace("**Figure.**", "Figure"), "not followed"),
    "setup": (replace("import companion.figures", "import companion.figure"), "set-up cell"),
    "compared": (untag("companion.figures.use()", tags=["setup"]), "set-up cell"),
    "tag": (untag("time.time()", tags=["measurement"]), "go together"),
    "skip": (untag("print([3, 4])", tags=["nbval-skip"]), "leave itself out"),
    "comment": (replace("print([3, 4])", "# NBVAL_SKIP\nprint([3, 4])"), "leave itself out"),
    "long": (replace("print([3, 4])", "print([3, 4])\n" * 26), "lines of code"),
    "unfolded": (replace("ax.plot([1, 2], [3, 4])", "ax.plot([1, 2], [3, 4])\n" * 6), "lines draw"),
    "wide": (replace("print([3, 4])", "print([3, 4])  # " + 100 * "-"), "a line of 117 characters"),
    "directive": (replace("More.", "```{note}\nMore.\n```"), "a directive"),
    "colon": (replace("More.", ":::{note}\nMore.\n:::"), "a directive"),
    "role": (replace("More.", "See {ref}`x`."), "a role"),
    "label": (replace("More.", "(ch-x)=\n\nMore."), "a label"),
    "break": (replace("More.", "+++\n\nMore."), "a cell break"),
    "title": (replace("# Bytes or", "Bytes or"), "title"),
    "question": (replace("**Question.**", "Question"), "Question"),
    "goals": (replace("**You will be able to**", "You can"), "able to"),
    "measure": (replace("## Measure", "## Time"), "`## Measure` is missing"),
    "heading": (replace("## What to read next", "### What to read next"), "`## What to read next`"),
    "takeaway": (replace("> **Takeaway.**", "Takeaway."), "no takeaway"),
    "words": (replace("A sentence of five words. ", ""), "words of prose"),
    "fewer": (replace("### Exercise 3", "### Example 3"), "exercises are numbered"),
    "unmarked": (replace("### Exercise 3 (easy, five minutes)", "### Exercise 3"), "should read like"),
    "unsolved": (replace("assert 2 + 1 > 2", "2 + 1"), "exercise 2 has no"),
    "open": (untag("assert 2 + 1 > 2", tags=["solution"]), "hide-cell"),
    "link": (replace("02_attention.ipynb", "03_heads.ipynb"), "leads nowhere"),
    "citation": (replace("More.", "[x](../book/references.md#nobody1999)"), "nobody1999"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_notebook_is_found(small, monkeypatch, fault):
    (small.parent / "book").mkdir(exist_ok=True)
    (small.parent / "book" / "references.md").write_text('<a id="pope2022"></a>Pope')
    change, said = FAULTS[fault]
    found = problems(small, monkeypatch, change=change)
    assert any(said in p for p in found), found


OUTPUTS = {
    "print('/home/me/book')": "an absolute path",
    "print('C:\\\\Users\\\\me')": "a Windows path",
    "print(object())": "an address in memory",
    "print('findfont: Font family not found')": "a font warning",
    "import sys; print('careful', file=sys.stderr)": "wrote to stderr: careful",
    "import warnings; warnings.warn('old')": "wrote to stderr: .*UserWarning: old",
}


def notebook_of(*sources):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])


def test_outputs_of_one_machine_are_refused(tmp_path):
    with pytest.raises(nb.Problem) as error:
        nb.execute(notebook_of(*OUTPUTS), "x", cwd=tmp_path)
    for i, said in enumerate(OUTPUTS.values()):
        assert re.search(f"x: cell {i}: {said}", str(error.value)), (i, str(error.value))


HARMLESS = ["a/b per /s", "https://example.org/home/x", "1/2", "f/work", "0x21", "12 GB/s"]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_texts_pass(text):
    notebook = notebook_of("x")
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    assert nb.unstable_outputs(notebook) == []


def test_an_error_and_a_slow_cell_stop_the_execution(tmp_path):
    with pytest.raises(nb.Problem, match="ZeroDivisionError"):
        nb.execute(notebook_of("1 / 0"), "x", cwd=tmp_path)
    with pytest.raises(nb.Problem, match="longer than 1 s"):
        nb.execute(notebook_of("import time; time.sleep(30)"), "x", cwd=tmp_path, timeout=1)


def test_execution_is_the_same_twice(small):
    first = nbformat.read(small / "05_small.ipynb", as_version=4)
    again = nb.execute(nb.convert(small / "05_small.md"), "05_small", cwd=small)
    assert [c.id for c in again.cells] == [c.id for c in first.cells]
    for a, b in zip(again.cells, first.cells):
        if "measurement" not in a.metadata.get("tags", []):
            assert a == b  # pictures included: the same machine draws the same bytes
    assert again.metadata == first.metadata


def test_nothing_of_the_machine_is_stored(small):
    notebook = nbformat.read(small / "05_small.ipynb", as_version=4)
    assert set(notebook.metadata) == {"jupytext", "kernelspec", "language_info", "companion"}
    assert notebook.metadata.language_info == {"name": "python"}
    assert not any({"execution", "trusted"} & set(c.metadata) for c in notebook.cells)


def test_the_hash_follows_code_and_tags_but_not_prose():
    one = jupytext.reads(CHAPTER, fmt="md:myst")
    prose, code, tags = (copy.deepcopy(one) for _ in range(3))
    cell(prose, "More.").source += " And more."
    cell(code, "print([3, 4])").source += "\n"
    cell(tags, "print([3, 4])").metadata["tags"] = ["measurement"]
    hashes = [nb.source_hash(n) for n in (one, prose, code, tags)]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_a_failed_run_leaves_the_stored_notebook(small, monkeypatch, capsys):
    monkeypatch.setattr(nb, "NOTEBOOKS", small)
    before = (small / "05_small.ipynb").read_bytes()
    (small / "05_small.md").write_text(CHAPTER.replace("print([3, 4])", "1 / 0"))
    try:
        assert nb.main(["make", "05_small"]) == 1
        assert "ZeroDivisionError" in capsys.readouterr().err
    finally:
        (small / "05_small.md").write_text(CHAPTER)
    assert (small / "05_small.ipynb").read_bytes() == before
    assert not list(small.glob("*.part"))


def test_an_unknown_chapter_is_named(capsys):
    assert nb.main(["make", "99_nothing"]) == 1
    assert "99_nothing" in capsys.readouterr().err


def test_prose_is_converted_without_a_run(small, monkeypatch):
    monkeypatch.setattr(nb, "NOTEBOOKS", small)
    before = nbformat.read(small / "05_small.ipynb", as_version=4)
    stored = (small / "05_small.ipynb").read_text()
    (small / "05_small.md").write_text(CHAPTER.replace("More.", "Much more."))
    try:
        assert nb.main(["convert", "05_small"]) == 0
        after = nbformat.read(small / "05_small.ipynb", as_version=4)
        assert nbcheck.outputs(nb.read_source(small / "05_small.md"), after) == []
        assert [c.get("outputs") for c in after.cells] == [c.get("outputs") for c in before.cells]
        assert any("Much more." in c.source for c in after.cells)
    finally:
        (small / "05_small.md").write_text(CHAPTER)
        (small / "05_small.ipynb").write_text(stored)


def test_words_are_those_of_the_prose():
    text = "Two words.\n\n```python\nnot these\n```\n\n| no | table |\n\n$$\nx y z\n$$\n\n"
    assert nbcheck.count_words(text + "[a link](b.md#c) <details>") == 4
