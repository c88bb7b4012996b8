"""What a kernel module says about itself, so that it can be compiled for a device that is not here.

A launch tells Triton two things that a file on disk does not: the types of the arguments, and which of them
are divisible by 16. Without the second, loads are two bytes wide instead of sixteen and registers spill. A
specimen is one launch written down: the kernel, its types, its constants, its alignment, its warps; and what
is expected of the result. A kernel module ends with

    SPECIMENS = [Specimen("copy.fp16", _copy, {"X": "*fp16", "Y": "*fp16", "n": "i64"}, {"BLOCK": 4096})]

and takes constants and warps from the same function that its wrapper takes them from.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .targets import Target


@dataclass(frozen=True)
class Expect:
    """What the compiler must have made of a kernel. Shared memory within the device is always expected.

    spills   bytes that may go from registers to memory and back, stores and loads together; None: any
    wide     the least share, 0 to 1, of bytes loaded from global memory by instructions of 16 bytes, counted
             over the text of the kernel (an instruction in a loop counts once); 0: any
    matrix   at least one matrix instruction: mma.sync, wgmma, tcgen05.mma, v_mfma
    """

    spills: int | None = 0
    wide: float = 0.5
    matrix: bool = False


@dataclass(frozen=True)
class Specimen:
    """One kernel as it is launched.

    name        "decode.fp16.paged": the kernel first, then what tells this launch from its others
    fn          the @triton.jit function, or "companion.kernels.copy:copy_kernel", imported when compiled
    signature   each run-time argument -> Triton's name of its type: "*fp16", "*u8", "i32", "i64", "fp32"
    constexprs  each tl.constexpr argument -> its value; also an integer that is always 1, such as a stride
                (the launcher makes a constant of those)
    aligned     the arguments that are divisible by 16: pointers by their address, integers (strides count
                elements) by their value. None: all pointers, and every integer with "stride" in its name.
                (): none, a kernel without hints
    num_warps, num_stages   as in the launch
    expect      see `Expect`
    adapt       (specimen, target) -> the specimen for that target, made with `but`, or None where it is not
                offered. No function: the same everywhere.
    """

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] | None = None
    num_warps: int = 4
    num_stages: int = 2
    expect: Expect = Expect()
    adapt: "Callable[[Specimen, Target], Specimen | None] | None" = None

    def but(self, **changes: Any) -> "Specimen":
        """A copy with some fields changed; `constexprs` and `signature` are merged into the present ones."""
        for name in ("constexprs", "signature"):
            if name in changes:
                changes[name] = {**getattr(self, name), **changes[name]}
        return replace(self, **changes)

    def for_arch(self, target: Target) -> "Specimen | None":
        """This launch as it is made on `target`, or None if there it is not."""
        return self if self.adapt is None else self.adapt(self, target)

    def kernel(self) -> Any:
        """The @triton.jit function. Imports Triton if nothing has before."""
        if not isinstance(self.fn, str):
            return self.fn
        module, _, name = self.fn.partition(":")
        return getattr(importlib.import_module(module), name)

    def hints(self) -> tuple[str, ...]:
        """The arguments known to be divisible by 16."""
        if self.aligned is not None:
            return self.aligned
        names = self.signature.items()
        return tuple(n for n, t in names if t[0] == "*" or ("stride" in n and t[0] == "i"))


def find(specimens: Iterable[Specimen], name: str) -> list[Specimen]:
    """The specimen called `name`; else all whose name begins with `name.`. ValueError if there is none."""
    known = list(specimens)
    found = [s for s in known if s.name == name] or [s for s in known if s.name.startswith(f"{name}.")]
    if not found:
        raise ValueError(f"name={name!r} is no kernel; accepted: {', '.join(s.name for s in known)}")
    return found
