"""What a kernel module says about itself, so that it can be compiled for a device that is not here.

A launch tells Triton two things that a file on disk does not: the types of the arguments, and which of them
are divisible by 16. Without the second, loads are two bytes wide instead of sixteen and registers spill. An
ahead-of-time (AOT) case is one launch written down: the kernel, its types, its constants, its alignment, its
warps; and what is expected of the result. A folder of kernels has

    CASES = [Case("copy.fp16", _copy, {"X": "*fp16", "Y": "*fp16", "n": "i64"}, {"BLOCK": 4096})]

and takes constants and warps from the same function that its call takes them from.

`TARGETS` are the devices that kernels are compiled for without having one. Shared memory is the most that one
block may have, from the vendors' tables (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; AMD's CDNA3 instruction set: 64 KiB of local data share).
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

_KIB = 1024


@dataclass(frozen=True)
class Target:
    """One architecture: `sm_80` is compute capability (8, 0), `gfx942` has none.

    name            what Triton, and `compile_report`, calls it
    capability      CUDA's (major, minor); None on an AMD device
    shared_limit    bytes of shared memory that one block may have
    devices         where a reader may meet it
    """

    name: str
    capability: tuple[int, int] | None
    shared_limit: int
    devices: str

    @property
    def has_matrix(self) -> bool:
        """Whether Triton makes matrix instructions of `tl.dot` here: on NVIDIA from capability 8.0 on."""
        return self.capability is None or self.capability >= (8, 0)

    @property
    def has_bf16(self) -> bool:
        """Whether bfloat16 is the device's own type; below capability 8.0 it is emulated."""
        return self.capability is None or self.capability >= (8, 0)


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("sm_75", (7, 5), 64 * _KIB, "T4, RTX 20"),
        Target("sm_80", (8, 0), 163 * _KIB, "A100"),
        Target("sm_89", (8, 9), 99 * _KIB, "L4, L40S, RTX 40"),
        Target("sm_90", (9, 0), 227 * _KIB, "H100, H200"),
        Target("sm_100", (10, 0), 227 * _KIB, "B200"),
        Target("sm_120", (12, 0), 99 * _KIB, "RTX 50, RTX PRO 6000"),
        Target("gfx942", None, 64 * _KIB, "MI300X, MI325X"),
    )
}


def target(name: str) -> Target:
    """The target called `name`. Raises ValueError for another name."""
    if name not in TARGETS:
        raise ValueError(f"arch={name!r} is no known target; accepted: {', '.join(TARGETS)}")
    return TARGETS[name]


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
class Case:
    """One kernel as it is launched.

    name        "decode.fp16.paged": the kernel first, then what tells this launch from its others
    fn          the @triton.jit function, or "companion.kernels.copy.kernel:copy_kernel", imported late
    signature   each run-time argument -> Triton's name of its type: "*fp16", "*u8", "i32", "i64", "fp32"
    constexprs  each tl.constexpr argument -> its value; also an integer that is always 1, such as a stride
                (the launcher makes a constant of those)
    aligned     the arguments that are divisible by 16: pointers by their address, integers (strides count
                elements) by their value. None: all pointers, and every integer with "stride" in its name.
                (): none, a kernel without hints
    num_warps, num_stages   as in the launch
    expect      see `Expect`
    adapt       (case, target) -> the case for that target, made with `but`, or None where it is not
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
    adapt: "Callable[[Case, Target], Case | None] | None" = None

    def but(self, **changes: Any) -> "Case":
        """A copy with some fields changed; `constexprs` and `signature` are merged into the present ones."""
        for name in ("constexprs", "signature"):
            if name in changes:
                changes[name] = {**getattr(self, name), **changes[name]}
        return replace(self, **changes)

    def for_arch(self, target: Target) -> "Case | None":
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


def find(cases: Iterable[Case], name: str) -> list[Case]:
    """The case called `name`; else all whose name begins with `name.`. ValueError if there is none."""
    known = list(cases)
    found = [s for s in known if s.name == name] or [s for s in known if s.name.startswith(f"{name}.")]
    if not found:
        raise ValueError(f"name={name!r} is no kernel; accepted: {', '.join(s.name for s in known)}")
    return found
