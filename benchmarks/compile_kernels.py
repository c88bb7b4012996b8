"""Every kernel compiled for every target, written to companion/kernels/results/compile.json.

    python -m benchmarks.compile_kernels [--out FILE]

No GPU is needed: Triton compiles for devices that are not here (companion.kernels.aot). Takes minutes.
The chapters read the table, and tests/kernels/test_compile.py compiles a part of it again. Ends with code 1,
and writes nothing, where a kernel is not as expected.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from companion.kernels.aot import STORED, compile_all
from companion.kernels.bench import show


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--out", type=Path, default=STORED)
    args = parse.parse_args()
    reports = compile_all(on_row=show)
    wrong = [r for r in reports if r.problems]
    if wrong:
        print(f"{len(wrong)} of {len(reports)} are not as expected; nothing written", file=sys.stderr)
        return 1
    record = {
        "triton": reports[0].triton,
        "python": platform.python_version(),
        "counts": "over the text of a kernel: an instruction in a loop counts once",
        "rows": [r.row() for r in reports],
    }
    scratch = args.out.with_suffix(".new")
    rows = ",\n".join(json.dumps(row) for row in record.pop("rows"))
    head = json.dumps(record)[:-1]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    scratch.write_text(f'{head}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")
    os.replace(scratch, args.out)
    print(f"{len(reports)} rows, {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
