"""Chapters inserted, moved and removed in a copy of the tree; what undoes a change leaves no trace."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from tools.booktools import lead_on
from tools.renumber import Change
from tools.sitecheck import ROOT


def run(copy, *command):
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)


def chapters(copy, *arguments):
    return run(copy, sys.executable, "-m", "tools.chapters", *arguments)


def tree(copy):
    return {
        str(p.relative_to(copy)): p.read_bytes()
        for p in sorted(copy.rglob("*"))
        if p.is_file() and not {".git", "__pycache__"} & set(p.parts)
    }


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The files that git knows, as they are now, committed in a repository of their own."""
    folder = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "as it is"]):
        done = run(folder, "git", "-c", "user.name=a", "-c", "user.email=a@b", *command)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def before(copy):
    """The tree's files; whatever a failed test left behind is put back."""
    yield tree(copy)
    run(copy, "git", "checkout", "-q", ".")
    run(copy, "git", "clean", "-fdq")


# What an empty chapter lacks, and nothing else.
EMPTY = ("words of prose", "older than the code", "not every cell was executed", "no output is stored")


def test_an_empty_chapter_comes_and_goes(copy, before):
    assert chapters(copy, "insert", "latent", "--after", "heads", "--dry-run").returncode == 0
    assert tree(copy) == before
    done = chapters(copy, "insert", "latent", "--after", "heads", "--title", "What is a latent?")
    assert done.returncode == 0, done.stderr
    after = tree(copy)
    assert {"notebooks/04_latent.md", "notebooks/05_kv_cache.ipynb", "notebooks/21_lab.md"} <= set(after)
    assert not {"notebooks/04_kv_cache.md", "notebooks/20_lab.ipynb"} & set(after)
    # The new chapter lacks its text and its run.
    checked = run(copy, sys.executable, "-m", "tools.notebooks", "check", "04_latent").stdout.splitlines()
    assert [line for line in checked if not any(said in line for said in EMPTY)] == []
    assert len(checked) == len(EMPTY)
    # Lists, links, records and every other chapter are right.
    assert "[4. What is a latent?](notebooks/04_latent.ipynb)" in after["README.md"].decode()
    assert "- file: notebooks/03_heads\n      - file: notebooks/04_latent\n" in after["_toc.yml"].decode()
    assert list(json.loads(after["notebooks/status.json"]))[3] == "05_kv_cache"
    others = run(copy, sys.executable, "-m", "tools.notebooks", "check", *_others(after)).stdout.splitlines()
    assert len(others) == 20 and all(line.endswith("as it should be") for line in others), others
    tests = ["claims", "glossary", "cheat_sheet", "notation", "address", "status", "setup_cell"]
    files = [f"tests/book/test_{name}.py" for name in tests]
    left_out = "not html and not phone and not page and not figure and not browser"
    found = run(copy, sys.executable, "-m", "pytest", "-x", "-k", left_out, *files)
    assert found.returncode == 0, found.stdout[-3000:]
    links = yaml.safe_load(after["book/redirects.yml"])
    assert len(links) == 17 and links["04_kv_cache"] == "kv_cache" and "03_heads" not in links
    done = chapters(copy, "remove", "latent")
    assert done.returncode == 0, done.stderr
    assert tree(copy) == before


def _others(files):
    return [n[10:-3] for n in files if re.match(r"notebooks/\d\d_.*\.md$", n) and "latent" not in n]


@pytest.mark.parametrize(
    "name, to, back", [("roofline", "memory_bill", "kv_cache"), ("moe", "lab", "long_context")]
)
def test_moved_there_and_back(copy, before, name, to, back):
    done = chapters(copy, "move", name, "--after", to)
    assert done.returncode == 0, done.stderr
    there = tree(copy)
    assert there != before and not re.search(rf"\d\d_{name}: null", there["book/redirects.yml"].decode())
    where = ["--before", "expert_parallel"] if name == "moe" else ["--after", back]
    assert chapters(copy, "move", name, *where).returncode == 0
    assert tree(copy) == before


REFUSED = {
    "number": (["insert", "04_latent", "--after", "heads"], "without the chapter's number"),
    "there": (["insert", "heads", "--after", "attention"], "name: got 'heads', there is a chapter already"),
    "unknown": (["remove", "latent"], "name: got 'latent', there is no chapter; there are: forward_pass"),
    "neighbour": (["insert", "latent", "--after", "head"], "got 'head', accepted: forward_pass"),
    "none": (["move", "heads"], "--after or --before: got None"),
    "itself": (["move", "heads", "--after", "heads"], "--after or --before: got 'heads'"),
    "named": (["remove", "roofline"], "still leads to 05_roofline"),
    "part": (["move", "lab", "--after", "heads"], "'Your hardware' would be empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_changes_nothing(copy, before, case):
    arguments, said = REFUSED[case]
    done = chapters(copy, *arguments)
    assert done.returncode == 1 and said in done.stderr
    assert tree(copy) == before


def test_a_wrong_number_stops_everything(copy, before):
    page = copy / "book" / "preface.md"
    page.write_text(
        page.read_text()
        + "\n[chapter 6](../notebooks/05_roofline.ipynb) and [7](../notebooks/04_kv_cache.ipynb)\n"
    )
    broken = tree(copy)
    done = chapters(copy, "insert", "latent", "--after", "heads")
    assert done.returncode == 1 and tree(copy) == broken
    assert (
        "says another number than it leads to" in done.stderr
        and "another number than its file" in done.stderr
    )


NAMES = ["one", "two", "three", "four"]
TEXTS = {
    "Chapter 2, chapters 1 to 3, and chapter 3.": "Chapter 3, chapters 1 to 4, and chapter 4.",
    "chapters 1, 2 and 3, 4 users": "chapters 1, 3 and 4, 4 users",
    "chapters 2 and\n3, chapter\n# 4's": "chapters 3 and\n4, chapter\n# 5's",
    "in [chapter 2](02_two.ipynb#x) and [3](../notebooks/03_three.ipynb)": (
        "in [chapter 3](03_two.ipynb#x) and [4](../notebooks/04_three.ipynb)"
    ),
    "[3. What?](notebooks/03_three.ipynb)": "[4. What?](notebooks/04_three.ipynb)",
    "chapter 2 and 3 users": "chapter 3 and 3 users",
    "[3 users](02_two.ipynb)": "[3 users](03_two.ipynb)",
    "chapter 2.5, chapter 07_x, 02_two_more, 05_two, chapter 9, 3 chapters": None,
}


@pytest.mark.parametrize("text", TEXTS)
def test_numbers_in_a_text(text):
    change = Change(NAMES, ["one", "new", *NAMES[1:]])
    assert change.renumber(text, "x.md") == (TEXTS[text] or text)
    assert change.problems == []
    assert len(change.notices) == ("1 to 3" in text)


def test_an_old_address_leads_on(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book" / "redirects.yml").write_text("04_kv_cache: kv_cache\n05_gone: null\n")
    found = {"book/intro", "notebooks/05_kv_cache"}
    builder, env = SimpleNamespace(name="html"), SimpleNamespace(found_docs=found)
    lead_on(SimpleNamespace(srcdir=tmp_path, outdir=tmp_path, builder=builder, env=env), None)
    moved = (tmp_path / "notebooks" / "04_kv_cache.html").read_text()
    assert 'content="0; url=05_kv_cache.html"' in moved and '"05_kv_cache.html" + location.hash' in moved
    assert "../book/intro.html" in (tmp_path / "notebooks" / "05_gone.html").read_text()
