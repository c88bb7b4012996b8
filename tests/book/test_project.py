"""The repository as a whole: no host of a package registry, versions that agree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from tools import address

ROOT = Path(__file__).resolve().parents[2]


def read(path):
    return path.read_text(encoding="utf-8")


def test_no_registry_is_named():
    hosts = re.compile(
        "|".join(["py" + r"pi\.org", "python" + "hosted", r"registry\.np" + "mjs", "py" + "pi/simple"])
    )
    assert [str(p.relative_to(ROOT)) for p, text in address.files() if hosts.search(text)] == []
    assert hosts.search("https://py" + "pi.org/simple")


def test_versions_agree():
    version = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["version"]
    cff = yaml.safe_load(read(ROOT / "CITATION.cff"))
    assert cff["version"] == version
    assert f"## {version}" in read(ROOT / "CHANGELOG.md")
    import companion

    assert companion.__version__ == version


def test_readme_names_the_two_commands_and_what_it_shows():
    text = read(ROOT / "README.md")
    assert "make book" in text and "make test" in text
    pictures = re.findall(r"!\[[^\]]{10,}\]\(([^)]+)\)", text)
    assert pictures and all((ROOT / p).is_file() for p in pictures)
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert all((ROOT / t).exists() for t in targets), targets


def test_an_old_python_is_refused_with_a_clear_line(tmp_path):
    old = tmp_path / "python3"
    pretend = "import sys; sys.version_info = (3, 9, 1)\n$2"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{pretend}"\n')
    old.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", "--no-print-directory", f"VENV={venv}", f"PYTHON={old}", f"{venv}/.base"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "Python 3.11 or newer is needed" in done.stderr
    assert not venv.exists()
