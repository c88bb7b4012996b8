"""One address: nothing disagrees with the setting, and one command moves everything."""

import json
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup

from tools import address
from tools.address import ROOT, disagreeing
from tools.notebooks import names, source_hash

OWNER, NAME = address.pair(address.repository())
GITHUB = "https://github" + ".com"  # in pieces: this file is searched, too
COLAB = re.compile(r"https://colab\.research\.google\.com/github/[^\s)\"'<>]+")


def test_nothing_disagrees():
    assert address.check() == []


def test_what_has_a_place_of_its_own_has_the_address():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert config["repository"]["url"] == address.repository()
    assert config["repository"]["branch"] == address.BRANCH
    assert config["html"]["baseurl"] == config["sphinx"]["config"]["ogp_site_url"] == address.pages()
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cff["repository-code"], cff["url"]) == (address.repository(), address.pages())
    assert f"git+{address.repository()}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        f"pip install git+{GITHUB}/a/b",
        f"git clone {GITHUB}/a/b.git",
        f"{address.COLAB}a/b/blob/main/notebooks/x.ipynb",
        f"https://raw.githubusercontent.com/{OWNER}/b/main/x.png",
        "https://img.shields" + ".io/github/license/a/b",
        f"see github.com/someone/{NAME}",
        f"https://github.com/{OWNER}/another",
        f"https://github.com/{OWNER}/{NAME}-old/issues",
        f"https://someone.github.io/{NAME}/book/intro.html",
        f"https://{OWNER.lower()}.github.io/old",
    ],
)
def test_an_address_that_disagrees_is_found(text):
    assert disagreeing(text, OWNER, NAME), text


@pytest.mark.parametrize(
    "text",
    [
        f"git+{GITHUB}/{OWNER}/{NAME}",
        f"git clone https://github.com/{OWNER}/{NAME}.git",
        f"(https://github.com/{OWNER}/{NAME}).",
        f"github.com/{OWNER}/{NAME}/blob/main/a.py",
        f"{address.pages()}book/intro.html",
        "https://github.com/pytorch/pytorch/issues/1 and https://jax-ml.github.io/scaling-book",
        '"git+https://github.com/{owner}/{name}"',
    ],
)
def test_this_address_and_those_of_others_are_not(text):
    assert disagreeing(text, OWNER, NAME) == []


@pytest.mark.parametrize("text", ["", "name", "a/b/c", "https://example.org/a/b", "a b/c", "-a/b", "../.."])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="must be OWNER/NAME"):
        address.pair(text)


@pytest.mark.parametrize("text", ["a/b", "https://github.com/a/b", "https://github.com/a/b.git", " a/b/ "])
def test_forms_of_an_address(text):
    assert address.pair(text) == ("a", "b")


def test_pages_of_a_repository_named_as_its_host():
    assert address.pages_of("Ada", "Ada.github.io") == "https://ada" + ".github.io/"
    assert address.pages_of("Ada", "Book") == "https://ada" + ".github.io/Book/"


@pytest.fixture
def project(tmp_path):
    """A copy of the project's files, under git."""
    for path, _ in address.files():
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return tmp_path


def texts(root):
    return {str(p.relative_to(root)): text for p, text in address.files(root)}


@pytest.mark.parametrize("git", [True, False])
def test_a_move_leaves_no_old_address_and_the_way_back_is_exact(project, git):
    if git:
        subprocess.run(["git", "init", "-q", project], check=True)
    before = texts(project)
    changed = address.move("Some-One/an.other_book", project)
    assert {"pyproject.toml", "_config.yml", "CITATION.cff", "README.md"} <= set(changed)
    assert {f"notebooks/{n}{s}" for n in names() for s in (".md", ".ipynb")} <= set(changed)
    assert address.repository(project) == f"{GITHUB}/Some-One/an.other_book"
    assert address.pages(project) == "https://some-one" + ".github.io/an.other_book/"
    assert address.check(project) == []
    old = re.compile(rf"{OWNER}/{NAME}|{OWNER.lower()}\.github\.io", re.I)
    assert {name: old.findall(text) for name, text in texts(project).items() if old.search(text)} == {}
    address.move(f"{OWNER}/{NAME}", project)
    assert texts(project) == before


def test_a_move_keeps_what_the_notebooks_recorded(project):
    path = project / "notebooks" / f"{names()[0]}.ipynb"
    recorded = nbformat.read(path, as_version=4)
    recorded.metadata["companion"] = {"source_sha256": source_hash(recorded)}
    path.write_text(nbformat.writes(recorded))
    address.move("a/b", project)
    moved = nbformat.read(path, as_version=4)
    assert f"git+{GITHUB}/a/b" in path.read_text()
    assert moved.metadata["companion"]["source_sha256"] == source_hash(moved)
    assert moved.metadata["companion"] != recorded.metadata["companion"]


def test_a_move_leaves_what_is_not_an_address(project):
    kept = project / "notes.md"
    kept.write_text(f"{OWNER}/{NAME} a path; https://github.com/{OWNER}/{NAME}-two; github.com/x/{NAME}\n")
    text = kept.read_text()
    address.move("a/b", project)
    assert kept.read_text() == text


def test_the_command(project):
    def run(*args):
        command = [sys.executable, "-m", "tools.address", *args]
        return subprocess.run(command, cwd=project, capture_output=True, text=True)

    assert run().returncode == 0 and address.repository() in run().stdout
    assert run("nonsense").returncode == 2 and "OWNER/NAME" in run("nonsense").stderr
    (project / "README.md").write_text(f"git clone {GITHUB}/a/b\n")
    wrong = run()
    assert wrong.returncode == 1 and f"README.md: git clone {GITHUB}/a/b" in wrong.stderr


def test_every_chapter_can_be_opened_in_colab_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    for name in names():
        title = (ROOT / "notebooks" / f"{name}.md").read_text().split("\n# ", 1)[1].split("\n")[0]
        assert f"| [{int(name[:2])}. {title}](notebooks/{name}.ipynb) | [open in Colab](" in readme
    links = COLAB.findall(readme)
    assert links == [address.colab(f"notebooks/{name}.ipynb") for name in names()]
    assert all((ROOT / "notebooks" / f"{name}.ipynb").is_file() for name in names())


def test_every_colab_link_of_the_project_leads_to_a_notebook():
    start = address.colab("")
    for path, text in address.files():
        if path.suffix == ".py":
            continue
        for link in COLAB.findall(text):
            assert link.startswith(start) and (ROOT / link.removeprefix(start)).is_file(), (path, link)


@pytest.mark.parametrize("name", names())
def test_the_button_of_a_page_leads_to_its_notebook(name, html):
    page = BeautifulSoup((html / "notebooks" / f"{name}.html").read_text(encoding="utf-8"), "html.parser")
    links = {a["href"] for a in page.select("a[href*='colab.research.google.com']")}
    assert links == {address.colab(f"notebooks/{name}.ipynb")}


def test_the_hash_is_that_of_the_notebooks_tool():
    for name in names():
        path = ROOT / "notebooks" / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        assert address.code_hash(json.dumps(notebook)) == source_hash(notebook)
