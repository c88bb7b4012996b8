"""Fetch what the pages load in a browser (MathJax) into vendor/, so that the book reads without a network.

Needs npm. Without it, or when it cannot reach its registry, the build goes on and the pages name a public
CDN with an integrity hash instead (tools/booktools.py chooses by looking into vendor/).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "tools" / "web"
MATHJAX = ROOT / "vendor" / "_static" / "mathjax"
# 2 of the package's 24 MB are enough for TeX to HTML with its fonts
PARTS = ("tex-chtml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions")


def lock() -> str:
    return hashlib.sha256((WEB / "package-lock.json").read_bytes()).hexdigest()


def fetch() -> str | None:
    """Fill vendor/ from npm; return why that was not possible, or None."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(WEB / name, folder)
        try:
            done = subprocess.run([npm, "ci"], cwd=folder, capture_output=True, text=True, timeout=180)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"npm ci failed: {error}"
        if done.returncode:
            return f"npm ci failed: {(done.stderr or done.stdout).strip()[-300:]}"
        package = Path(folder) / "node_modules" / "mathjax"
        shutil.rmtree(MATHJAX, ignore_errors=True)
        for part in PARTS:
            source, target = package / "es5" / part, MATHJAX / part
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        shutil.copy(package / "LICENSE", MATHJAX / "LICENSE")
    (MATHJAX / "lock").write_text(lock() + "\n", encoding="utf-8")  # last: says that the rest is complete
    return None


def ready() -> bool:
    return (MATHJAX / "lock").exists() and (MATHJAX / "lock").read_text(encoding="utf-8").strip() == lock()


def main() -> None:
    if ready():
        return
    if why := fetch():
        shutil.rmtree(MATHJAX, ignore_errors=True)
        print(f"mathematics: the pages will load MathJax from a CDN ({why})")
    else:
        print("mathematics: MathJax is inside the book, no network needed to read it")


if __name__ == "__main__":
    main()
