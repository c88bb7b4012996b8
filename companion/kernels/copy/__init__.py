"""A copy, and the bytes that it must move: the ceiling that the other kernels are measured against."""

import torch
from torch import Tensor

from ..aot.case import Case
from ..mode import on, triton_for

__all__ = ["copy", "copy_bytes"]

BLOCK_BYTES = 16384  # of one program: 128 threads times eight loads of 16 bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x, bit for bit, in `out` or in new memory.

    x: contiguous, any shape, 1 to 8 bytes per number. out: the same shape, dtype and device, contiguous.
    Raises ValueError for anything else.
    """
    for name, t in (("x", x), ("out", out)):
        if t is not None and not t.is_contiguous():
            raise ValueError(
                f"{name} has strides {t.stride()} for shape {tuple(t.shape)}; need it contiguous"
            )
    if x.element_size() not in _INTEGERS:
        raise ValueError(f"x has dtype {x.dtype}; need numbers of 1, 2, 4 or 8 bytes")
    if out is None:
        out = torch.empty_like(x)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; need {x.dtype} {tuple(x.shape)}, as x has")
    triton_for(x, out)
    if x.numel():
        from .kernel import copy_kernel

        block = BLOCK_BYTES // x.element_size()
        n, raw = x.numel(), _INTEGERS[x.element_size()]
        with on(x):
            copy_kernel[(-(-n // block),)](x.view(raw), out.view(raw), n, BLOCK=block)
    return out


def copy_reference(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The same in torch."""
    return x.clone() if out is None else out.copy_(x)


def copy_bytes(x: Tensor) -> int:
    """Bytes that a copy moves: every byte is read once and written once."""
    return 2 * x.nbytes


CASES = [
    Case(
        name=f"copy.{kind}",
        fn="companion.kernels.copy.kernel:copy_kernel",
        signature={"X": f"*{kind}", "Y": f"*{kind}", "n": "i32"},
        constexprs={"BLOCK": BLOCK_BYTES // size},
        aligned=("X", "Y", "n"),
    )
    for kind, size in (("u8", 1), ("i16", 2), ("i32", 4))
]
