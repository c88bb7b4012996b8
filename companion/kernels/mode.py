"""Where kernels run, and whether they should: Triton's two modes, and the user's word.

Triton decides when it is imported, once for the process, between compiling for a GPU and its interpreter on a
CPU. So a program that wants kernels on CPU tensors says so before anything imports Triton (transformers
does, by itself):

    from companion.kernels import interpret, use
    interpret()
    with use("never"):              # compare with torch
        ...

Nothing here imports Triton, and Numba only where it was asked for. `companion.attend` chooses by `use` and by
what a device can do, once in a pass.
"""

import functools
import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .. import install_command
from .decode.splits import PER_CORE

VARIABLE = "TRITON_INTERPRET"
_HOW = "call companion.kernels.interpret() at the start of the program, or set TRITON_INTERPRET=1"


def interpret(*, unless_gpu: bool = False) -> None:
    """Choose Triton's interpreter for this process: kernels then run on CPU tensors, slowly and exactly.

    unless_gpu: do nothing where torch sees a GPU, so that one notebook runs on both kinds of machine.

    May be called again. Raises ImportError where Triton is not installed, and RuntimeError if it was imported
    earlier in the other mode.
    """
    require_triton()
    if unless_gpu:
        if torch.cuda.is_available():
            return
    if "triton" in sys.modules and not interpreted():
        raise RuntimeError(f"Triton was imported before its interpreter was chosen; {_HOW}")
    os.environ[VARIABLE] = "1"


def interpreted() -> bool:
    """Whether kernels of this process run in the interpreter. Imports nothing."""
    triton = sys.modules.get("triton")
    if triton is None:
        return os.environ.get(VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")
    # What Triton's own functions became at its import; the variable may have been changed since.
    return type(triton.language.max).__name__ == "InterpretedFunction"


def triton_for(*tensors: Tensor | None) -> bool:
    """What every wrapper asks before it imports its kernel: can Triton run on these? None is passed over.

    Returns True where the interpreter runs, False where kernels are compiled. Raises ImportError where Triton
    is not installed, ValueError for tensors on several devices or on one that Triton does not know, and
    RuntimeError when the process has chosen the other mode.
    """
    devices = sorted({str(t.device) for t in tensors if t is not None})
    if len(devices) != 1:
        raise ValueError(f"the tensors are on {' and '.join(devices) or 'no device'}; need all on one")
    kind = devices[0].split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(
            f"the tensors are on {devices[0]}; Triton's kernels run on cuda, or interpreted on cpu"
        )
    require_triton()
    if kind == "cpu" and not interpreted():
        late = "Triton was imported without its interpreter" if "triton" in sys.modules else "no GPU"
        raise RuntimeError(f"a kernel on CPU tensors needs Triton's interpreter ({late}); {_HOW}")
    if kind == "cuda" and interpreted():
        raise RuntimeError(
            f"the tensors are on {devices[0]}, but this process has chosen Triton's interpreter, which would "
            f"take hours; start one without interpret() and without {VARIABLE}"
        )
    return kind == "cpu"


def capability(tensor: Tensor) -> tuple[int, int]:
    """Compute capability of the GPU a tensor lies on; (8, 0), which knows every dtype, in the interpreter.

    An AMD GPU reports its own numbers, (9, 4) for gfx942, all beyond 8.0.
    """
    if tensor.device.type != "cuda":
        return (8, 0)
    return torch.cuda.get_device_capability(tensor.device)


def cores(tensor: Tensor) -> int:
    """How many programs the device of a tensor runs at once; 1 in the interpreter."""
    if tensor.device.type != "cuda":
        return 1
    return PER_CORE * torch.cuda.get_device_properties(tensor.device).multi_processor_count


def on(tensor: Tensor) -> AbstractContextManager:
    """The guard around every launch: makes a tensor's GPU the current one, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def require_triton() -> None:
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        raise ImportError("kernels need Triton, which exists for Linux only: python -m pip install triton")


USE_VARIABLE = "COMPANION_KERNELS"
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
    return _chosen[-1] if _chosen else _known(USE_VARIABLE, os.environ.get(USE_VARIABLE) or "auto")


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
