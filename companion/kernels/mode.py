"""Where kernels run: compiled on a GPU, or in Triton's interpreter on a CPU.

Triton decides between the two when it is imported, once for the process. So a program that wants kernels on
CPU tensors says so before anything imports Triton (transformers does, by itself):

    from companion.kernels import interpret
    interpret()
"""

import importlib.util
import os
import sys

import torch
from torch import Tensor

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


def require_triton() -> None:
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        raise ImportError("kernels need Triton, which exists for Linux only: python -m pip install triton")
