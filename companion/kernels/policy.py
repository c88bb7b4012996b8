"""The user's word on kernels, and what a device can do. `companion.attend` chooses by them, once in a pass.

    from companion.kernels import use
    with use("never"):              # compare with torch
        ...

Nothing here imports Triton, and Numba only where it was asked for.
"""

import functools
import importlib.util
import os
import sys

import torch

from .. import install_command
from .mode import interpreted

VARIABLE = "COMPANION_KERNELS"
CHOICES = ("auto", "compiled", "always", "never")
LEAST_CAPABILITY = (7, 5)  # a T4; bfloat16 needs 8.0
_chosen: list[str] = []  # the innermost `use` is the last


class use:
    """Choose for the whole process, until the `with` block ends if it stands in one.

    "auto"      kernels where tensors are on a GPU that runs them; the default, or what COMPANION_KERNELS says
    "compiled"  besides, on a CPU in float32, what Numba compiles: attention of decode steps, products of up
                to 8 rows, and steps of plain decoders as a whole, over contiguous or paged caches. The
                first call on a machine takes half a minute, which is why it has to be asked for
    "always"    Triton's kernels on CPU tensors too, in its interpreter: to test, not to be fast
    "never"     torch alone

    Raises ValueError for another word; ImportError for "compiled" where Numba is missing.
    """

    def __init__(self, choice: str):
        _chosen.append(_known("choice", choice))
        self._place = len(_chosen) - 1

    def __enter__(self) -> "use":
        return self

    def __exit__(self, *error) -> None:
        del _chosen[self._place :]


def choice() -> str:
    """What holds now, one of CHOICES."""
    return _chosen[-1] if _chosen else _known(VARIABLE, os.environ.get(VARIABLE) or "auto")


def runs_on(capability: tuple[int, int], dtypes: set[torch.dtype]) -> bool:
    """Whether this process can run kernels on a device of this capability, with these dtypes."""
    if capability < LEAST_CAPABILITY or (torch.bfloat16 in dtypes and capability < (8, 0)):
        return False
    there = "triton" in sys.modules or importlib.util.find_spec("triton") is not None
    return there and not interpreted()


def _known(name: str, value: str) -> str:
    if value not in CHOICES:
        raise ValueError(f"{name}={value!r}; accepted: {', '.join(map(repr, CHOICES))}")
    if value == "compiled":
        need_numba(f"{name}={value!r}")
    return value


def need_numba(what: str) -> None:
    """Raises ImportError, saying what needs Numba, where it is missing or refuses the numpy there is."""
    if (why := _numba_fails()) is not None:
        raise ImportError(f"{what} needs Numba, {install_command('cpu')}: {why}")


@functools.cache
def _numba_fails() -> str | None:
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return str(error)
    return None
