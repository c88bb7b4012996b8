"""Kernels compiled for devices that are not here, and what the compiler made of them.

>>> from companion.kernels import compile_report                                        # doctest: +SKIP
>>> r = compile_report("decode.fp16", "sm_80")                                          # doctest: +SKIP
>>> r.spill_stores, r.wide, r.matrix                                                    # doctest: +SKIP
(0, 1.0, {'mma.sync': 32})

Triton compiles for any of its targets on any Linux machine: no GPU, no driver. It does so in a child process,
because a process that has chosen Triton's interpreter cannot compile; and with a cache folder of its own, so
that what is reported is what the compiler does now. One child compiles everything that is asked for.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .assembly import wide_share
from .specimen import Expect
from .targets import TARGETS, target

# The files of this package that have SPECIMENS.
MODULES = tuple(f"companion.kernels.{m}" for m in ("decode_specimens", "append", "copy", "grouped"))
STORED = Path(__file__).parent / "results" / "compile.json"


@dataclass(frozen=True)
class CompileReport:
    """What the compiler made of one kernel for one target. Counts are over the text: a loop counts once.

    name, arch     the specimen and the target
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

    name: a specimen's ("gemm.fp16"; `companion bench --compile` lists them). arch: "sm_75", "sm_80", "sm_89",
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
    """Compile every specimen of `modules` for every target, in one child process.

    names: of specimens, or the parts before a dot: "gemm" is all that begin with "gemm."; None is all.
    archs: names of targets, None is all. A pair that is not offered is left out.
    modules: importable names of modules that have SPECIMENS; your own kernels can stand here too.
    on_row: called with each report as it is made (about two seconds each).

    A kernel that does not compile gives a report with `error`. Raises ValueError for unknown names,
    ImportError without Triton, RuntimeError where the child could not begin.
    """
    from .mode import _require_triton

    _require_triton()
    wanted = [target(arch).name for arch in (TARGETS if archs is None else archs)]
    task = {"names": None if names is None else list(names), "archs": wanted, "modules": list(modules)}
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
    command = [sys.executable, "-m", "companion.kernels.compile_child", json.dumps(task)]
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
