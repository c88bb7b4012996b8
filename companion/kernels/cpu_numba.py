"""How the loops for CPUs are compiled, and what is kept of it.

It imports Numba, so nothing imports it but the loops, and those only when first used.
"""

import hashlib
from pathlib import Path

import numpy as np
from numba import njit

f32 = np.float32
# Sums may be taken in any order, so that eight of them go side by side; NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}
LOOP = {"fastmath": FAST, "error_model": "numpy", "nogil": True}


def digest(folder: Path) -> str:
    """Of all the loops: Numba's own check looks at one file, and would keep what calls into another."""
    rooms = sorted(folder.glob("cpu_*.py"))
    return hashlib.sha256(b"".join(room.read_bytes() for room in rooms)).hexdigest()[:12]


DIGEST = digest(Path(__file__).parent)


def compiled(function, **options):
    """Compiled when first called, and kept on disk where there is a folder that may be written to."""
    options = {"nogil": True, "error_model": "numpy", **options}
    function.__qualname__ += f"_{DIGEST}"  # names the file on disk
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no such folder: compiled again in every process
        return njit(**options)(function)


def compiled_for_threads(function):
    """The same, with its `prange` loops on all threads."""
    return compiled(function, parallel=True)
