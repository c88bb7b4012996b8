"""The repository's address: one setting in pyproject.toml, and everything that is made from it.

    python -m tools.address                say it, and list what disagrees with it
    python -m tools.address OWNER/NAME     move the project: the setting, and every place that holds it

Badges, launch buttons, install cells, links to sources and the pages' own address hold it as text, because
GitHub, Colab and pip read them as they are. Needs Python alone, so that publishing can call it first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "main"
COLAB = "https://colab.research.google.com/github/"
SKIPPED = set(".git _build build dist vendor node_modules __pycache__ .pytest_cache .ruff_cache".split())

# Where these are followed by OWNER/NAME, they are followed by this project: a leftover of any name is found.
_OURS = (
    r"(?:git\+https://github\.com/|git clone https://github\.com/|git@github\.com:"
    r"|colab\.research\.google\.com/github/|mybinder\.org/v2/gh/|img\.shields\.io/github/[\w/-]+?/)"
)
_WORD = r"[A-Za-z0-9](?:[\w.-]*[\w-])?"
_END = r"(?![\w-]|\.(?!git\b)\w)"


def setting(root: Path = ROOT) -> dict[str, str]:
    """`[project.urls]` of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]


def repository(root: Path = ROOT) -> str:
    """https://github.com/OWNER/NAME"""
    return setting(root)["Repository"]


def pages(root: Path = ROOT) -> str:
    """Where the built book is published, with a slash at the end."""
    return setting(root)["Documentation"]


def colab(path: str, root: Path = ROOT) -> str:
    """Where Colab opens a notebook of the repository. path: from the root, `notebooks/04_kv_cache.ipynb`"""
    return f"{COLAB}{'/'.join(pair(repository(root)))}/blob/{BRANCH}/{path}"


def pair(text: str) -> tuple[str, str]:
    """(owner, name) of `OWNER/NAME` or of an address on GitHub; ValueError for anything else."""
    short = text.strip().removeprefix("https://github.com/").removesuffix("/").removesuffix(".git")
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?/[\w.-]*[\w-]", short):
        raise ValueError(f"the address must be OWNER/NAME or https://github.com/OWNER/NAME, got {text!r}")
    owner, name = short.split("/")
    return owner, name


def pages_of(owner: str, name: str) -> str:
    """Where GitHub Pages publishes a repository that has no domain of its own."""
    host = f"{owner.lower()}.github.io"
    return f"https://{host}/" if name.lower() == host else f"https://{host}/{name}/"


def paths(root: Path = ROOT) -> list[Path]:
    """Every file of the project: what git tracks, or would; without git, all but what is built."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        found = {root / name for name in listed if name}
    except (OSError, subprocess.CalledProcessError):
        found = {p for p in root.rglob("*") if not _skipped(p.relative_to(root).parts)}
    return sorted(p for p in found if p.is_file() and not p.is_symlink())


def files(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Every text file of the project, with its text."""
    for path in paths(root):
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _skipped(parts: tuple[str, ...]) -> bool:
    return any(p in SKIPPED or p.startswith(".venv") or p.endswith(".egg-info") for p in parts)


def disagreeing(text: str, owner: str, name: str) -> list[str]:
    """The addresses in a text that should be this project's and are not."""
    ours = [(m.group(), m[1], m[2]) for m in re.finditer(rf"{_OURS}({_WORD})/({_WORD})", text)]
    near = [
        (m.group(), m[1], m[2])
        for m in re.finditer(rf"github(?:usercontent)?\.com/({_WORD})/({_WORD})", text)
    ]
    ours += [m for m in near if m[1] == owner or m[2].removesuffix(".git") == name]
    found = [whole for whole, o, n in ours if (o, n.removesuffix(".git")) != (owner, name)]
    host = pages_of(owner, name)
    for m in re.finditer(rf"https?://([\w-]+)\.github\.io(?:/({_WORD}))?", text):
        if (m[1] == owner.lower() or m[2] == name) and f"{m.group()}/" != host:
            found.append(m.group())
    return sorted(set(found))


def check(root: Path = ROOT) -> list[str]:
    """`file: address` for every address in the project that disagrees with the setting."""
    owner, name = pair(repository(root))
    return [f"{p.relative_to(root)}: {a}" for p, text in files(root) for a in disagreeing(text, owner, name)]


def move(new: str, root: Path = ROOT) -> list[str]:
    """Rewrite every place that holds the address; returns the files that changed. ValueError for none."""
    (owner, name), (to_owner, to_name) = pair(repository(root)), pair(new)
    before, after = pages(root).rstrip("/"), pages_of(to_owner, to_name).rstrip("/")
    places = re.compile(rf"((?:github\.com/|githubusercontent\.com/|{_OURS})){owner}/{re.escape(name)}{_END}")
    site = re.compile(re.escape(before) + _END)
    changed = []
    for path, text in files(root):
        new_text = site.sub(after, places.sub(rf"\g<1>{to_owner}/{to_name}", text))
        if new_text == text:
            continue
        if path.suffix == ".ipynb":
            new_text = new_text.replace(code_hash(text), code_hash(new_text))
        path.write_text(new_text, encoding="utf-8")
        changed.append(str(path.relative_to(root)))
    return changed


def code_hash(notebook: str) -> str:
    """The hash that tools/notebooks.py records, from the text of an .ipynb: an address is code, too."""
    cells = [c for c in json.loads(notebook)["cells"] if c["cell_type"] == "code"]
    code = [["".join(c["source"]), sorted(c["metadata"].get("tags", []))] for c in cells]
    return hashlib.sha256(json.dumps(code, ensure_ascii=False).encode()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tools.address", description=__doc__, formatter_class=as_written)
    parser.add_argument("new", nargs="?", metavar="OWNER/NAME")
    args = parser.parse_args(argv)
    if args.new is not None:
        try:
            changed = move(args.new)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print("\n".join(changed) or "nothing to change")
    print(f"{repository()}, published at {pages()}")
    if wrong := check():
        print("these disagree:", *wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
