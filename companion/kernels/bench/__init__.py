"""`companion bench`: what the kernels compile to for GPUs that are not here, and how they run on one that is.

Needs neither torch nor Triton until it runs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..aot.case import TARGETS
from .report import GPU_SECONDS

_HEAD = (
    f"{'kernel':<30} {'target':<7} {'regs':>4} {'spilled':>9} {'shared':>7} {'wide':>5}  matrix instructions"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `companion bench`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile", action="store_true", help="compile every kernel; needs Triton and no GPU")
    what.add_argument("--gpu", action="store_true", help="check and time every kernel on this GPU")
    parser.add_argument(
        "--kernel", action="append", metavar="NAME", help="--compile: these only, e.g. decode.fp16 or moe_up"
    )
    parser.add_argument(
        "--arch", action="append", choices=list(TARGETS), help="--compile: these targets only"
    )
    parser.add_argument(
        "--stored", action="store_true", help="--compile: the table that comes with the package"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="--gpu: write the result as JSON")
    parser.add_argument(
        "--seconds", type=float, default=GPU_SECONDS, metavar="N", help="--gpu: begin nothing after N seconds"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="--gpu: without a GPU, every step at tiny sizes in Triton's interpreter; measures nothing",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line that has nothing else."""
    parser = argparse.ArgumentParser(prog="companion bench", description=__doc__)
    add_arguments(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """0 where every kernel is as it should be, 1 where one is not, 2 where there is nothing to run on."""
    if args.gpu:
        from . import gpu

        return gpu.run(args)
    return _compile(args)


def _compile(args: argparse.Namespace) -> int:
    from .. import aot as compiler
    from ..aot.case import find

    if not args.json:
        print(_HEAD)
    show_each = None if args.json else show
    if args.stored:
        kept = [r for r in compiler.stored() if r.arch in (args.arch or TARGETS)]
        names = {r.name for n in args.kernel or () for r in find(kept, n)} or {r.name for r in kept}
        reports = [r for r in kept if r.name in names]
        for report in () if args.json else reports:
            show(report)
    else:
        reports = compiler.compile_all(args.kernel, args.arch, modules=compiler.MODULES, on_row=show_each)
    wrong = sum(bool(r.problems) for r in reports)
    if args.json:
        print(json.dumps({"rows": [r.row() | {"problems": list(r.problems)} for r in reports]}))
    else:
        version = ", ".join(sorted({r.triton for r in reports if r.triton}))
        print(f"{len(reports)} compiled by Triton {version}, {wrong} not as expected")
    return 1 if wrong else 0


def show(r) -> None:
    """One report as a line, and one more for each problem. Spilled: bytes stored + bytes loaded."""
    matrix = ", ".join(f"{n} {kind}" for kind, n in r.matrix.items()) or f"none ({r.fma} fma)"
    spilled = f"{r.spill_stores}+{r.spill_loads}" if r.spill_stores or r.spill_loads else "0"
    line = (
        f"{r.name:<30} {r.arch:<7} {r.registers:>4} {spilled:>9} {r.shared_bytes:>7} {r.wide:>5.0%}  {matrix}"
    )
    print("\n".join([line, *(f"    ! {problem}" for problem in r.problems)]), flush=True)


if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))
