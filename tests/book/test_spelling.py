"""Spelling of the prose: a dictionary and a list of the field's words; `typos` besides, as in `make lint`.

The dictionary is American and knows no terms, so words.txt holds the British spellings, the terms and the
names that the book uses. A new word belongs there once somebody has looked at it.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from spellchecker import SpellChecker

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("words.txt")
PAGES = [
    *sorted((ROOT / "notebooks").glob("*.md")),
    *sorted((ROOT / "book").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
NOT_PROSE = re.compile(
    r"""\A---\n.*?\n---\n            # front matter
      | ^```.*?^```                  # code
      | <!--.*?-->
      | `[^`\n]+`
      | \$\$.*?\$\$ | \$[^$\n]+\$    # formulas
      | </?\w[^>]*>                  # HTML
      | (?<=\])\([^)\s]+\)           # where a link leads
      | https?://\S+""",
    re.M | re.S | re.X,
)
ALT = re.compile(r"^    alt: (.+)$", re.M)  # of a figure, in its cell's metadata


@pytest.fixture(scope="module")
def known():
    """Everything that is a word here, in lower case."""
    dictionary = SpellChecker(language="en").word_frequency
    return set(dictionary.keys()) | {w.lower() for w in listed()}


def listed():
    lines = (line.split("#")[0].strip() for line in LIST.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def prose(text):
    alts = " ".join(ALT.findall(text))
    return NOT_PROSE.sub(" ", text) + " " + alts


def words(text):
    """Words of a text, without a genitive's ending; what holds a digit or an underscore is no word."""
    for word in re.findall(r"(?<![\w.@/])[^\W\d_][^\W\d_’']*(?:[’'][^\W\d_]+)*(?![\w@/])", text):
        word = word.replace("’", "'")
        yield word[:-2] if word.endswith("'s") else word


def unknown(text, known, names=False):
    """Words that nobody knows, with how often they stand there; names=True passes over capitals."""
    found = Counter(w for w in words(prose(text)) if w.lower() not in known and len(w) > 2)
    return {w: n for w, n in found.items() if not (names and w[0].isupper())}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_page(path, known):
    authors = path.name == "references.md"
    assert unknown(path.read_text(encoding="utf-8"), known, names=authors) == {}


def test_the_list_is_in_order_and_needed():
    entries = listed()
    assert entries == sorted(set(entries), key=lambda w: (w.lower(), w))
    dictionary = SpellChecker(language="en").word_frequency
    assert [w for w in entries if w.lower() in dictionary] == []


@pytest.mark.parametrize(
    "text, found",
    [
        ("The kernal reads every byte.", {"kernal"}),
        ("An attension head’s keys.", {"attension"}),
        ("A word in `cde`, in $\\alhpa$, in [a link](adress.md).", set()),
        ("```python\nretrun x\n```\nand prose with a mistke", {"mistke"}),
        ("---\nalt: x\n---\n\n    alt: A curve that risess\n", {"risess"}),
    ],
)
def test_a_mistake_is_found(text, found, known):
    assert set(unknown(text, known)) == found


def typos(folder):
    command = [Path(sys.executable).with_name("typos"), "--config", ROOT / "typos.toml", "--format", "brief"]
    return subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.md", "The color of a kernel.\n", "colour"),
        ("a.md", "We normalize the weights.\n", "normalise"),
        ("a.md", "We recieve a token.\n", "receive"),
        ("a.py", '"""It recieves a token."""\n', "receives"),
        ("a.md", "A quantized cache, `color`, [x](http://color.org).\n", None),
        ("a.py", 'color = "center"\n', None),
    ],
)
def test_typos_knows_british_english_and_the_code(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    done = typos(tmp_path)
    assert (done.returncode != 0 and said in done.stdout) if said else done.returncode == 0, done.stdout


def test_typos_finds_nothing():
    done = typos(ROOT)
    assert done.returncode == 0, done.stdout
