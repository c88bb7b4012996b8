"""Kernels compiled for devices that are not here, and what the compiler made of them.

>>> from companion.kernels import compile_report                                        # doctest: +SKIP
>>> r = compile_report("decode.fp16", "sm_80")                                          # doctest: +SKIP
>>> r.spill_stores, r.wide, r.matrix                                                    # doctest: +SKIP
(0, 1.0, {'mma.sync': 32})

Triton compiles for any of its targets on any Linux machine: no GPU, no driver. It does so in a child process,
because a process that has chosen Triton's interpreter cannot compile; and with a cache folder of its own, so
that what is reported is what the compiler does now. One child compiles everything that is asked for.

What the compiler wrote is read as text: how wide loads are, which instructions multiply, what spilled. Every
count is over the text, so an instruction in a loop counts once.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .case import TARGETS, Expect, target

# The files of this package that have CASES.
MODULES = tuple(f"companion.kernels.{m}" for m in ("decode.cases", "append.cases", "copy", "moe.cases"))
STORED = Path(__file__).parent.parent / "results" / "compile.json"


@dataclass(frozen=True)
class CompileReport:
    """What the compiler made of one kernel for one target. Counts are over the text: a loop counts once.

    name, arch     the case and the target
    registers      per thread (AMD: vector registers per lane, accumulators included)
    spill_stores, spill_loads   bytes per thread that go to memory and back because registers ran out
    shared_bytes, shared_limit  shared memory that a block uses, and may use
    loads          bytes per lane of a load from global memory -> how many such; asynchronous copies included
    wide           share of those bytes that loads of 16 bytes move
    matrix         matrix instructions by kind: mma.sync, wgmma.mma_async, tcgen05.mma, v_mfma
    fma            multiply-adds of float32 outside of those
    num_warps, num_stages   as launched
    triton         the version that compiled
    expect         what was expected (`Expect`)
    error          what the compiler said where it made nothing; every number is 0 then
    """

    name: str
    arch: str
    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared_bytes: int = 0
    loads: dict[int, int] = field(default_factory=dict)
    matrix: dict[str, int] = field(default_factory=dict)
    fma: int = 0
    num_warps: int = 0
    num_stages: int = 0
    triton: str = ""
    expect: Expect = Expect()
    error: str = ""

    @property
    def shared_limit(self) -> int:
        return target(self.arch).shared_limit

    @property
    def wide(self) -> float:
        return wide_share(self.loads)

    @property
    def problems(self) -> tuple[str, ...]:
        """Each expectation that is not met, as a line; empty where all is well."""
        return tuple(_problems(self))

    def row(self) -> dict:
        """As plain data for JSON."""
        return {**asdict(self), "loads": {str(size): n for size, n in self.loads.items()}}

    @classmethod
    def from_row(cls, row: dict) -> "CompileReport":
        """The inverse of `row`."""
        loads = {int(size): n for size, n in row["loads"].items()}
        return cls(**{**row, "loads": loads, "expect": Expect(**row["expect"])})


def _problems(r: CompileReport) -> Iterator[str]:
    if r.error:
        yield f"does not compile: {r.error}"
        return
    spilled = r.spill_stores + r.spill_loads
    if r.expect.spills is not None and spilled > r.expect.spills:
        yield f"spills {r.spill_stores} + {r.spill_loads} bytes, expected at most {r.expect.spills}"
    if r.wide < r.expect.wide:
        yield f"{r.wide:.0%} of the bytes loaded 16 at a time, expected {r.expect.wide:.0%} ({r.loads})"
    if r.expect.matrix and not r.matrix:
        yield f"no matrix instruction, {r.fma} multiply-adds instead"
    if r.shared_bytes > r.shared_limit:
        yield f"{r.shared_bytes} bytes of shared memory, the device has {r.shared_limit}"


_known: dict[tuple[str, str], CompileReport] = {}


def compile_report(name: str, arch: str) -> CompileReport:
    """Compile one kernel for one target, here and now, and read what came out.

    name: a case's ("gemm.fp16"; `companion bench --compile` lists them). arch: "sm_75", "sm_80", "sm_89",
        "sm_90", "sm_100", "sm_120" or "gfx942".

    Takes a few seconds the first time and nothing after that. Raises ValueError for a name or a target that
    is not known and for a kernel that is not offered on the target, ImportError without Triton.
    """
    if (name, arch) not in _known:
        found = compile_all([name], [arch])
        if [r.name for r in found] != [name]:
            raise ValueError(f"name={name!r} must be one kernel that is offered on {arch}; got {len(found)}")
    return _known[name, arch]


def compile_all(
    names: Sequence[str] | None = None,
    archs: Sequence[str] | None = None,
    *,
    modules: Sequence[str] = MODULES,
    on_row: Callable[[CompileReport], None] | None = None,
) -> list[CompileReport]:
    """Compile every AOT case of `modules` for every target, in one child process.

    names: of cases, or the parts before a dot: "gemm" is all that begin with "gemm."; None is all.
    archs: names of targets, None is all. A pair that is not offered is left out.
    modules: importable names of modules that have CASES; your own kernels can stand here too.
    on_row: called with each report as it is made (about two seconds each).

    A kernel that does not compile gives a report with `error`. Raises ValueError for unknown names,
    ImportError without Triton, RuntimeError where the child could not begin.
    """
    from ..mode import require_triton

    require_triton()
    targets = [target(arch).name for arch in (TARGETS if archs is None else archs)]
    task = {"names": None if names is None else list(names), "archs": targets, "modules": list(modules)}
    done: list[CompileReport] = []
    with tempfile.TemporaryDirectory(prefix="compile-") as folder:
        ended = False
        while not ended:
            begun = len(done)
            for report in _child({**task, "begun": begun}, Path(folder)):
                if ended := report is None:
                    break
                done.append(report)
                if on_row:
                    on_row(report)
    if tuple(modules) == MODULES:
        _known.update({(r.name, r.arch): r for r in done})
    return done


def _child(task: dict, folder: Path) -> Iterator[CompileReport | None]:
    """Reports of the pairs of `task` from number `begun` on, and None when those were all.

    The child writes a record a line: what it begins, then the report. It ends early after an error, which
    the compiler's state may not survive, or because the compiler took it along; the next one goes on.
    """
    env = dict(os.environ, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder))
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    command = [sys.executable, "-m", "companion.kernels.aot.child", json.dumps(task)]
    pair, reports = None, 0
    with (
        (folder / "stderr").open("w+") as errors,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        for record in map(json.loads, child.stdout):
            if "refused" in record:
                raise ValueError(record["refused"])
            pair = record.get("begin")
            if "row" in record:
                reports += 1
                yield CompileReport.from_row(record["row"])
            if "end" in record:
                yield None
        child.wait()
        errors.seek(0)
        said = (errors.read().strip().splitlines() or ["without a word"])[-1]
    if pair:
        yield CompileReport(*pair, error=f"the compiler ended with code {child.returncode}: {said}")
    elif not reports:
        raise RuntimeError(f"the compiling process ended with code {child.returncode}: {said}")


def stored() -> list[CompileReport]:
    """The table that comes with the package: every kernel for every target, as it was last compiled."""
    return [CompileReport.from_row(row) for row in json.loads(STORED.read_text(encoding="utf-8"))["rows"]]


# ld.global.L1::evict_first.v4.b32: modifiers in any order, then an optional vector and the type.
_PTX_LOAD = re.compile(r"\bld\.global(?:\.[a-zA-Z_]\w*(?:::\w+)*)*?(?:\.v([248]))?\.[busf](8|16|32|64|128)\b")
_PTX_ASYNC = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^\]]*\]\s*,\s*\[[^\]]*\]\s*,\s*(0x\w+|\d+)"
)
_PTX_MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
_PTX_FMA = re.compile(r"\bfma\.rn\.(?:ftz\.)?f32(x2)?\b")
_PTXAS_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_RESOURCES = re.compile(r"\bREG:(\d+) STACK:(\d+)")

_GCN_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_)?(\w+)")
_GCN_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_GCN_SCRATCH = re.compile(r"\bscratch_(load|store)_(\w+)")
_GCN_FMA = re.compile(r"\bv_(?:pk_)?fmac?_f32")


def ptx_loads(ptx: str) -> dict[int, int]:
    """Bytes per lane of a load from global memory -> how many such stand in `ptx`, asynchronous ones too."""
    sizes = [int(v or 1) * int(bits) // 8 for v, bits in _PTX_LOAD.findall(ptx)]
    return _count(sizes + [int(n, 0) for n in _PTX_ASYNC.findall(ptx)])


def ptx_matrix(ptx: str) -> dict[str, int]:
    """Matrix instructions by kind: mma.sync (from sm_80), wgmma.mma_async (sm_90), tcgen05.mma (sm_100)."""
    return _count(_PTX_MATRIX.findall(ptx))


def ptx_fma(ptx: str) -> int:
    """Fused multiply-adds of float32 outside matrix instructions; a packed pair counts twice."""
    return sum(2 if pair else 1 for pair in _PTX_FMA.findall(ptx))


def ptxas_spills(log: str) -> tuple[int, int]:
    """(bytes stored, bytes loaded) by spills, from what `ptxas -v` says."""
    found = _PTXAS_SPILL.search(log)
    if not found:
        raise ValueError(f"log must be that of ptxas -v, got {log[:200]!r}")
    return int(found[1]), int(found[2])


def cubin_resources(text: str) -> tuple[int, int]:
    """(registers per thread, bytes of stack) from `cuobjdump --dump-resource-usage`; no stack, no spill."""
    found = _RESOURCES.search(text)
    if not found:
        raise ValueError(f"text must be cuobjdump's resource usage, got {text[:200]!r}")
    return int(found[1]), int(found[2])


def gcn_loads(asm: str) -> dict[int, int]:
    """As `ptx_loads`, of AMD's assembly. Loads into scalar registers (arguments) are not counted."""
    return _count([_gcn_bytes(kind) for kind in _GCN_LOAD.findall(asm)])


def gcn_matrix(asm: str) -> dict[str, int]:
    """Matrix instructions: v_mfma."""
    return _count(re.findall(r"\bv_mfma(?=_)", asm))


def gcn_fma(asm: str) -> int:
    """As `ptx_fma`, of AMD's assembly."""
    return sum(2 if "_pk_" in name else 1 for name in _GCN_FMA.findall(asm))


def gcn_spills(asm: str) -> tuple[int, int]:
    """(bytes stored, bytes loaded) per lane through scratch memory, where registers are spilled."""
    moved = {"store": 0, "load": 0}
    for way, kind in _GCN_SCRATCH.findall(asm):
        moved[way] += _gcn_bytes(kind)
    return moved["store"], moved["load"]


def gcn_registers(asm: str) -> int:
    """Vector registers per lane, those of accumulation included."""
    found = re.search(r"\.vgpr_count:\s+(\d+)", asm)
    if not found:
        raise ValueError("asm has no .vgpr_count")
    return int(found[1])


def wide_share(loads: dict[int, int]) -> float:
    """The share of all bytes in `loads` that instructions of 16 bytes or more move; 1 if there are none."""
    total = sum(size * n for size, n in loads.items())
    return sum(size * n for size, n in loads.items() if size >= 16) / total if total else 1.0


def _gcn_bytes(kind: str) -> int:
    return _GCN_BYTES.get(kind) or (1 if "byte" in kind else 2)  # ushort, short_d16, ubyte ..


def _count(items: list) -> dict:
    return {key: items.count(key) for key in sorted(set(items))}
