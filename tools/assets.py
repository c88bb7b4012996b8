"""Put into vendor/ what the pages load in a browser: MathJax, Pyodide, and the interactive parts.

MathJax and Pyodide come from npm, in the versions and with the hashes of tools/web/package-lock.json. Without
npm, or when it cannot reach its registry, the build goes on: the pages then name a public CDN and the hash
that each file must have (tools/booktools.py and the parts look at what is in vendor/).
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "tools" / "web"
VENDOR = ROOT / "vendor"
CDN = "https://cdn.jsdelivr.net/npm/"

VERSIONS = json.loads((WEB / "package.json").read_text(encoding="utf-8"))["dependencies"]
HASHES = json.loads((WEB / "integrity.json").read_text(encoding="utf-8"))  # file -> "sha384-..."
# 2 of MathJax's 24 MB are enough for TeX to HTML with its fonts; Pyodide without packages is four files.
MATHJAX_PARTS = ("tex-chtml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions")
PYODIDE_PARTS = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
MATHJAX, PYODIDE = "_static/mathjax", f"pyodide-{VERSIONS['pyodide']}"  # below vendor/ and the site's root
LOCKED = f"{PYODIDE}/lock"  # a digest of the lock that the files in vendor/ are from

# What the parts import: rooms, or files of one, that need the standard library alone (tests check it).
PACKED = (
    "__init__.py",
    "checks.py",
    "formats.py",
    "cost/*.py",
    "cost/data/*.json",
    "paging/*.py",
    "serving/*.py",
    "live/*.py",
)


def sha384(data: bytes) -> str:
    """A file's hash as a browser checks it."""
    return "sha384-" + base64.b64encode(hashlib.sha384(data).digest()).decode()


def lock() -> str:
    return hashlib.sha256((WEB / "package-lock.json").read_bytes()).hexdigest()


# --- from npm ----------------------------------------------------------------------------------------------


def fetch(vendor: Path = VENDOR) -> str | None:
    """Fill vendor/ from npm; return why that was not possible, or None."""
    with tempfile.TemporaryDirectory() as folder:
        if why := install(WEB, Path(folder)):
            return why
        modules = Path(folder) / "node_modules"
        for old in vendor.glob("pyodide-*"):
            shutil.rmtree(old)
        _take(modules / "mathjax" / "es5", MATHJAX_PARTS, vendor / MATHJAX)
        shutil.copy(modules / "mathjax" / "LICENSE", vendor / MATHJAX / "LICENSE")
        _take(modules / "pyodide", PYODIDE_PARTS, vendor / PYODIDE)
        for text in (WEB / "licenses").iterdir():  # the npm package has none
            shutil.copy(text, vendor / PYODIDE)
    (vendor / LOCKED).write_text(lock() + "\n", encoding="utf-8")  # last: says that the rest is complete
    return None


def install(locked: Path, folder: Path) -> str | None:
    """Put what a package.json and its lock name into folder/node_modules; return why that failed, or None."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    for path in (locked / "package.json", locked / "package-lock.json", WEB / ".npmrc"):
        shutil.copy(path, folder)
    try:
        done = subprocess.run([npm, "ci"], cwd=folder, capture_output=True, text=True, timeout=180)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"npm ci failed: {error}"
    if done.returncode:
        return f"npm ci failed: {(done.stderr or done.stdout).strip()[-300:]}"
    return None


def _take(source: Path, parts: tuple[str, ...], target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for part in parts:
        (target / part).parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part)
        else:
            shutil.copyfile(source / part, target / part)


def ready(vendor: Path = VENDOR) -> bool:
    """Whether vendor/ holds all files of the lock."""
    said = vendor / LOCKED
    return said.exists() and said.read_text(encoding="utf-8").strip() == lock()


# --- our own -----------------------------------------------------------------------------------------------


def pack(root: Path = ROOT) -> bytes:
    """The companion's files as a zip: the same files give the same bytes, whatever their dates and order."""
    files = sorted(p for pattern in PACKED for p in (root / "companion").glob(pattern))
    with tempfile.SpooledTemporaryFile() as out:
        with zipfile.ZipFile(out, "w") as z:
            for path in files:
                name = zipfile.ZipInfo(path.relative_to(root).as_posix(), (2020, 1, 1, 0, 0, 0))
                name.create_system, name.external_attr = 3, 0o644 << 16
                z.writestr(name, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
        out.seek(0)
        return out.read()


def parts(vendor: Path = VENDOR) -> None:
    """Write vendor/live: the scripts, companion.zip, and assets.json with addresses, hashes and a version.

    The version is a digest of all of it: a page asks for `NAME.mjs?v=VERSION`, so that a browser never puts
    files of two builds together.
    """
    live = vendor / "live"
    shutil.rmtree(live, ignore_errors=True)
    live.mkdir(parents=True)
    for script in sorted((WEB / "live").glob("*.mjs")):
        shutil.copyfile(script, live / script.name)
    (live / "companion.zip").write_bytes(pack())
    digest = hashlib.sha256(lock().encode())
    for file in sorted(live.iterdir()):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    assets = {
        "version": digest.hexdigest()[:12],
        "base": f"../{PYODIDE}/" if ready(vendor) else f"{CDN}pyodide@{VERSIONS['pyodide']}/",
        "integrity": {name: HASHES[name] for name in PYODIDE_PARTS},
    }
    (live / "assets.json").write_text(json.dumps(assets, indent=1) + "\n", encoding="utf-8")


def main(vendor: Path = VENDOR) -> None:
    why = None if ready(vendor) else fetch(vendor)
    if why:
        for name in (MATHJAX, PYODIDE):
            shutil.rmtree(vendor / name, ignore_errors=True)
        print(f"browser parts: the pages will load MathJax and Pyodide from a CDN ({why})")
    else:
        print("browser parts: MathJax and Pyodide are inside the book, no network needed to read it")
    parts(vendor)


if __name__ == "__main__":
    main()
