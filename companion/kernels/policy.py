"""Whether the caches and the experts reach for a kernel: the user's word, the device, dtypes, gradients.

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
from torch import Tensor

from .. import install_command
from .mode import interpreted

VARIABLE = "COMPANION_KERNELS"
CHOICES = ("auto", "compiled", "always", "never")
LEAST_CAPABILITY = (7, 5)  # a T4; bfloat16 needs 8.0
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
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


def wanted(*tensors: Tensor | None) -> bool:
    """Whether a kernel should run on these; None is passed over.

    Never for float64, which no kernel takes, and never where a gradient is asked for: kernels have none.
    """
    real = [t for t in tensors if t is not None]
    how = choice()
    if how == "never" or (how in ("auto", "compiled") and not real[0].is_cuda):
        return False
    if any(t.is_floating_point() and not _readable(t) for t in real):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in real):
        return False
    devices = {t.device for t in real}
    if len(devices) != 1 or real[0].device.type not in ("cuda", "cpu"):
        return False
    if how == "always":
        return True
    return _runs_on(torch.cuda.get_device_capability(real[0].device), {t.dtype for t in real})


def _runs_on(capability: tuple[int, int], dtypes: set[torch.dtype]) -> bool:
    """Whether this process can run kernels on a device of this capability, with these dtypes."""
    if capability < LEAST_CAPABILITY or (torch.bfloat16 in dtypes and capability < (8, 0)):
        return False
    there = "triton" in sys.modules or importlib.util.find_spec("triton") is not None
    return there and not interpreted()


def _readable(t: Tensor) -> bool:
    return t.dtype in _FLOATS or t.element_size() == 1  # float8 codes are bytes to a kernel


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
