"""The process that compiles: a task as JSON on the command line, one record a line on stdout.

Started by `compile_all`, with the interpreter off and an empty cache folder.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import (
    CompileReport,
    cubin_resources,
    gcn_fma,
    gcn_loads,
    gcn_matrix,
    gcn_registers,
    gcn_spills,
    ptx_fma,
    ptx_loads,
    ptx_matrix,
    ptxas_spills,
)
from .case import TARGETS, Case, Target, find

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def build(case: Case, target: Target) -> CompileReport:
    """Compile one case for one target and read what came out."""
    kernel = case.kernel()
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    given = {**case.signature, **case.constexprs}
    if given.keys() != place.keys():
        odd = ", ".join(sorted(given.keys() ^ place.keys()))
        raise ValueError(f"{case.name}: the kernel's arguments and the case's differ: {odd}")
    types = {n: "constexpr" if n in case.constexprs else case.signature[n] for n in place}
    source = ASTSource(
        kernel,
        types,
        {place[n]: value for n, value in case.constexprs.items()},
        {place[n]: [["tt.divisibility", 16]] for n in case.hints() if types[n] != "constexpr"},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=_triton_target(target), options=options)
    numbers = _amd(compiled.asm) if target.capability is None else _nvidia(compiled.asm, target)
    shared = compiled.metadata.shared
    return CompileReport(
        case.name,
        target.name,
        **numbers,
        shared_bytes=shared,
        **options,
        triton=triton.__version__,
        expect=case.expect,
    )


def _triton_target(target: Target) -> GPUTarget:
    if target.capability is None:
        return GPUTarget("hip", target.name, 64)
    return GPUTarget("cuda", int(target.name[3:]), 32)


def _amd(asm: dict) -> dict:
    text = asm["amdgcn"]
    stores, loads = gcn_spills(text)
    return {
        "registers": gcn_registers(text),
        "spill_stores": stores,
        "spill_loads": loads,
        "loads": gcn_loads(text),
        "matrix": gcn_matrix(text),
        "fma": gcn_fma(text),
    }


def _nvidia(asm: dict, target: Target) -> dict:
    ptx = asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", cubin)
        registers, stack = cubin_resources(usage.stdout)
        spills = _spills(ptx, target, Path(folder)) if stack else (0, 0)
    return {
        "registers": registers,
        "spill_stores": spills[0],
        "spill_loads": spills[1],
        "loads": ptx_loads(ptx),
        "matrix": ptx_matrix(ptx),
        "fma": ptx_fma(ptx),
    }


def _spills(ptx: str, target: Target, folder: Path) -> tuple[int, int]:
    """ptxas once more, for what it says: the cubin tells the stack but not what of it are spills."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    name = target.name + ("a" if target.capability >= (9, 0) else "")  # the variant that Triton asks for
    for assembler in ("ptxas", "ptxas-blackwell"):  # newer PTX is refused by the older of the two
        if (_BIN / assembler).exists():
            done = _run(assembler, "-v", f"--gpu-name={name}", source, "-o", folder / "again.cubin")
            if done.returncode == 0:
                return ptxas_spills(done.stderr + done.stdout)
    raise RuntimeError(done.stderr.strip())


def _run(tool: str, *args: object) -> subprocess.CompletedProcess:
    return subprocess.run([_BIN / tool, *map(str, args)], capture_output=True, text=True)


def main(task: dict) -> None:
    records = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compiler prints is not a record

    def tell(**record) -> None:
        print(json.dumps(record), file=records, flush=True)

    known = [s for m in task["modules"] for s in importlib.import_module(m).CASES]
    names = [s.name for s in known]
    if twice := {n for n in names if names.count(n) > 1}:
        return tell(refused=f"cases must have names of their own, got twice: {', '.join(sorted(twice))}")
    try:
        chosen = known if task["names"] is None else [s for n in task["names"] for s in find(known, n)]
    except ValueError as refused:
        return tell(refused=str(refused))
    once = {s.name: s for s in chosen}.values()
    pairs = [(s, TARGETS[arch]) for s in once for arch in task["archs"]]
    pairs = [(there, t) for s, t in pairs if (there := s.for_arch(t)) is not None]
    for case, target in pairs[task["begun"] :]:
        tell(begin=(case.name, target.name))
        try:
            report = build(case, target)
        except Exception as error:  # of the compiler, whatever its kind: it belongs in the table
            said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
            report = CompileReport(case.name, target.name, expect=case.expect, error=said)
        tell(row=report.row())
        if report.error:
            return  # what an error leaves behind would spoil the next; the parent starts another process
    tell(end=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
