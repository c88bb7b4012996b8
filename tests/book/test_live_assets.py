"""What the pages load in a browser: pinned, checked by hash, complete, small; and the packed package."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import zipfile

import nbformat
import pytest
from livewalk import ROOT

from companion.figures import COLORS, contrast
from tools import assets, booktools
from tools.sitecheck import toc

LIVE = assets.WEB / "live"
NAMES = sorted(p.stem for p in LIVE.glob("*.mjs") if p.stem not in ("ui", "worker"))
CSS = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "_static").glob("live*.css")))


def read(path):
    return path.read_text(encoding="utf-8")


# --- from npm, or from a CDN


def test_the_lock_holds_hashes_and_no_address():
    lock = json.loads(read(assets.WEB / "package-lock.json"))
    packages = {k.removeprefix("node_modules/"): v for k, v in lock["packages"].items() if k}
    assert packages and all("integrity" in p and "resolved" not in p for p in packages.values())
    assert "http" not in read(assets.WEB / "package-lock.json")
    wanted = json.loads(read(assets.WEB / "package.json"))["dependencies"]
    assert set(wanted) == {"mathjax", "pyodide"} and all(re.fullmatch(r"[\d.]+", v) for v in wanted.values())
    assert {name: packages[name]["version"] for name in wanted} == wanted
    assert f"mathjax@{wanted['mathjax']}/" in booktools.CDN
    assert f'version: "{wanted["pyodide"]}"' in read(LIVE / "worker.mjs")


def test_the_hashes_are_those_of_the_fetched_files():
    if not assets.ready():
        pytest.skip("nothing was fetched from npm here: no files to compare the hashes with")
    found = {"tex-chtml.js": assets.VENDOR / assets.MATHJAX / "tex-chtml.js"}
    found |= {name: assets.VENDOR / assets.PYODIDE / name for name in assets.PYODIDE_PARTS}
    assert assets.HASHES == {name: assets.sha384(path.read_bytes()) for name, path in found.items()}


def test_licences_lie_beside_the_files(html):
    if not assets.ready():
        pytest.skip("nothing was fetched from npm here")
    assert "Mozilla Public License Version 2.0" in read(html / assets.PYODIDE / "MPL-2.0.txt")
    assert f"Pyodide {assets.VERSIONS['pyodide']}" in read(html / assets.PYODIDE / "README.md")
    assert "Apache License" in read(html / assets.MATHJAX / "LICENSE")


def test_without_npm_the_build_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assets.main(tmp_path)
    assert "CDN (npm is not installed)" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["live"]
    said = json.loads(read(tmp_path / "live" / "assets.json"))
    version = assets.VERSIONS["pyodide"]
    assert said["base"] == f"https://cdn.jsdelivr.net/npm/pyodide@{version}/"
    assert sorted(said["integrity"]) == sorted(assets.PYODIDE_PARTS)
    assert all(h.startswith("sha384-") for h in said["integrity"].values())


def test_an_npm_that_fails_is_reported(monkeypatch, tmp_path, capsys):
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/bin:/usr/bin")
    assets.main(tmp_path / "vendor")
    assert "CDN (npm ci failed: no network)" in capsys.readouterr().out


@pytest.mark.parametrize("fetched", [True, False])
def test_the_pages_take_mathjax_from_where_it_is(monkeypatch, tmp_path, fetched):
    class Config:
        mathjax_path = mathjax_options = html_extra_path = None

    monkeypatch.setattr(assets, "VENDOR", tmp_path)
    if fetched:
        (tmp_path / assets.LOCKED).parent.mkdir(parents=True)
        (tmp_path / assets.LOCKED).write_text(assets.lock())
    booktools.choose_assets(None, Config)
    assert Config.html_extra_path == [str(tmp_path)]
    if fetched:
        assert (Config.mathjax_path, Config.mathjax_options) == ("mathjax/tex-chtml.js", None)
    else:
        assert Config.mathjax_path == booktools.CDN
        assert Config.mathjax_options["integrity"].startswith("sha384-")
    assert json.loads(read(tmp_path / "live/assets.json"))["base"].startswith(
        "../" if fetched else "https://"
    )


# --- the package in the page

IMPORTS = """
import sys
sys.path[:] = [p for p in sys.path if not p.endswith("site-packages")]
sys.path.insert(0, {folder!r})
sys.modules.update(torch=None, triton=None, numpy=None, matplotlib=None)
import companion.live.cost, companion.live.paging, companion.live.serving
size = '{{"op": "size", "model": "gpt-oss-20b", "hardware": "l4", "experts": "mxfp4"}}'
print(companion.live.cost.live(size))
print(companion.live.paging.live('{{"num_blocks": 4, "block_size": 2, "actions": []}}'))
cost = '{{"model": "phi-4", "hardware": "t4"}}'
print(companion.live.serving.live('{{"num_blocks": 8, "requests": [], "cost": ' + cost + "}}"))
assert all(m.__file__.startswith({folder!r}) for n, m in sys.modules.items() if n.startswith("companion"))
"""


def test_the_packed_package_needs_the_standard_library_alone(tmp_path):
    zipfile.ZipFile(io.BytesIO(assets.pack())).extractall(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", IMPORTS.format(folder=str(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["ok"] for line in done.stdout.splitlines()] == [True] * 3


def test_the_package_is_packed_the_same_every_time(tmp_path):
    first = assets.pack()
    for path in reversed(sorted((ROOT / "companion").rglob("*"))):  # other dates, another order of creation
        if path.suffix in (".py", ".json"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
            os.utime(copy, (10**9, 10**9))
            copy.chmod(0o600)
    assert assets.pack(tmp_path) == first
    names = zipfile.ZipFile(io.BytesIO(first)).namelist()
    assert "companion/cost/data/models.json" in names and "companion/serving/simulation.py" in names
    assert not any("kernels" in n or "torch" in n or "engine/engine.py" in n for n in names)


def test_a_change_changes_the_version(monkeypatch, tmp_path):
    versions = []
    for change in (b"", b"# more"):
        whole = assets.pack() + change
        monkeypatch.setattr(assets, "pack", lambda whole=whole: whole)
        assets.parts(tmp_path)
        versions.append(json.loads(read(tmp_path / "live/assets.json"))["version"])
    assert versions[0] != versions[1]


# --- the pages


def places():
    """(chapter or page, name, the cell before it) of every place for a part."""
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for i, cell in enumerate(cells):
            for name in re.findall(
                r'data-live="([^"]*)"', cell.source if cell.cell_type == "markdown" else ""
            ):
                assert cell.source.strip() == f'<div data-live="{name}"></div>', "a cell of its own"
                yield path.stem, name, next(c for c in reversed(cells[:i]) if c.cell_type == "code")


def test_every_place_has_its_part_and_its_figure():
    found = list(places())
    assert sorted(name for _, name, _ in found) == NAMES, "a part without a place, or a place without a part"
    for page, name, cell in found:
        assert cell.outputs, f"{page}: the cell before {name} shows nothing that could stand in its place"


def test_the_script_of_every_page_is_small():
    script = (ROOT / "_static/live.js").read_bytes()
    assert len(gzip.compress(script, 9)) <= 3000


def test_no_number_is_made_in_a_part():
    """Parts draw; what they show as values comes from Python. Math is for the lengths of a drawing."""
    for name in NAMES:
        for line in read(LIVE / f"{name}.mjs").splitlines():
            for value in re.findall(r"\bvalue: ([^,}]+)", line):
                assert re.fullmatch(r"[\w.$\[\]()?\" -]+", value) and not re.search(r" [-+*/] ", value), line


def variables(selector):
    block = re.search(rf"^{re.escape(selector)} \{{(.*?)^\}}", CSS, re.S | re.M).group(1)
    return dict(re.findall(r"--live-([\w-]+): (#\w+);", block))


def test_colours_are_those_of_the_figures_and_can_be_told_from_the_page():
    light, dark = variables(":root"), variables('html[data-theme="dark"]')
    assert {k: v.upper() for k, v in light.items() if k in COLORS} == {
        k: v.upper() for k, v in COLORS.items()
    }
    assert set(light) == set(dark)
    for theme, surface in ((light, "#ffffff"), (dark, "#121212")):  # the theme's --pst-color-background
        for name, color in theme.items():
            if name != "on-color":
                assert contrast(color, surface) >= 3, (name, color)
        assert contrast(theme["wrong"], surface) >= 4.5


# --- weight

MB = 10**6


def test_the_book_is_under_40_mb(html):
    sizes = {p: p.stat().st_size for p in html.rglob("*") if p.is_file()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < 40 * MB, [(str(p.relative_to(html)), n) for p, n in largest]


def test_icons_come_as_a_font_and_not_as_a_script_too(html):
    for name in toc():
        page = read((html / name).with_suffix(".html"))
        assert re.search(r"<link[^>]*fontawesome", page) and not re.search("<script[^>]*fontawesome", page), (
            name
        )
