"""The repository as a whole: one address, no host of a package registry, a lock without addresses."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tools import assets, booktools

ROOT = Path(__file__).resolve().parents[2]
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
URL = CONFIG["repository"]["url"]
OWNER, NAME = URL.removeprefix("https://github.com/").split("/")
SKIPPED = {
    ".git",
    ".venv",
    ".venv-triton36",
    "_build",
    "build",
    "dist",
    "vendor",
    "node_modules",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
}
TEXTS = set(".md .py .toml .txt .yml .yaml .json .cff .css .js .mjs .ipynb .cfg .svg".split())
NAMED = {"Makefile", "LICENSE", "LICENSE-text", "run", ".npmrc", ".gitignore"}  # text without a suffix


def files():
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if not SKIPPED & set(parts) and not any(p.endswith(".egg-info") for p in parts):
            if path.is_file() and (path.suffix in TEXTS or path.name in NAMED):
                yield path


def read(path):
    return path.read_text(encoding="utf-8")


def addresses(text):
    """Addresses of this project's repository, whatever owner they name."""
    return set(re.findall(rf"github\.com/[\w.-]+/{NAME}\b|github\.com/{OWNER}/[\w.-]*\w", text))


def test_one_address_everywhere():
    found = {(str(p.relative_to(ROOT)), f"https://{a}") for p in files() for a in addresses(read(p))}
    assert {f for f in found if f[1] != URL} == set()
    assert len(found) > 5
    assert addresses(f"see github.com/someone/{NAME}") == {f"github.com/someone/{NAME}"}


def test_the_pages_address_belongs_to_the_repository():
    expected = f"https://{OWNER}.github.io/{NAME}/"
    assert CONFIG["sphinx"]["config"]["ogp_site_url"] == expected == CONFIG["html"]["baseurl"]


def test_no_registry_is_named():
    hosts = re.compile(
        "|".join(["py" + r"pi\.org", "python" + "hosted", r"registry\.np" + "mjs", "py" + "pi/simple"])
    )
    assert [str(p.relative_to(ROOT)) for p in files() if hosts.search(read(p))] == []
    assert hosts.search("https://py" + "pi.org/simple")


def test_the_lock_holds_hashes_and_no_address():
    lock = json.loads(read(assets.WEB / "package-lock.json"))
    packages = {k: v for k, v in lock["packages"].items() if k}
    assert packages and all("integrity" in p and "resolved" not in p for p in packages.values())
    wanted = json.loads(read(assets.WEB / "package.json"))["dependencies"]
    assert {k.removeprefix("node_modules/"): v["version"] for k, v in packages.items()} == wanted
    assert f"mathjax@{wanted['mathjax']}/" in booktools.CDN


def test_the_cdn_hash_is_that_of_the_fetched_file():
    file = assets.MATHJAX / "tex-chtml.js"
    if not file.exists():
        pytest.skip("MathJax was not fetched from npm here: no file to compare the hash with")
    import base64
    import hashlib

    digest = hashlib.sha384(file.read_bytes()).digest()
    assert booktools.CDN_HASH == "sha384-" + base64.b64encode(digest).decode()


def test_without_npm_the_build_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(assets, "MATHJAX", tmp_path / "mathjax")
    monkeypatch.setenv("PATH", str(tmp_path))
    assets.main()
    assert "CDN (npm is not installed)" in capsys.readouterr().out
    assert not (tmp_path / "mathjax").exists()


def test_an_npm_that_fails_is_reported(monkeypatch, tmp_path, capsys):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setattr(assets, "MATHJAX", tmp_path / "mathjax")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assets.main()
    assert "CDN (npm ci failed: no network)" in capsys.readouterr().out


@pytest.mark.parametrize("fetched", [True, False])
def test_the_pages_take_mathjax_from_where_it_is(monkeypatch, tmp_path, fetched):
    class Config:
        mathjax_path = mathjax_options = html_extra_path = None

    monkeypatch.setattr(booktools, "ROOT", tmp_path)
    if fetched:
        (tmp_path / "vendor/_static/mathjax").mkdir(parents=True)
        (tmp_path / "vendor/_static/mathjax/lock").write_text("x")
    booktools.choose_mathjax(None, Config)
    if fetched:
        assert (Config.mathjax_path, Config.mathjax_options) == ("mathjax/tex-chtml.js", None)
    else:
        assert Config.mathjax_path == booktools.CDN
        assert Config.mathjax_options["integrity"].startswith("sha384-")


def test_versions_agree():
    version = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["version"]
    cff = yaml.safe_load(read(ROOT / "CITATION.cff"))
    assert cff["version"] == version and cff["repository-code"] == URL
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
