"""`companion bench --gpu`: every kernel of this package checked and timed on the GPU at hand, in minutes.

Checked against float64, or bit for bit. Timed with events and cold caches at sizes beyond the L2 cache,
beside a prediction made before: the bytes that must move, over the bandwidth that a copy reaches here.
Without a GPU: one line, exit code 2. A wrong kernel: its name, exit code 1.
"""

import argparse
import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from ...machine import describe_gpu
from . import report
from .cases import first_cases, judge, moe_cases, more_cases, tiny_decode, tiny_moe
from .report import GPU_SECONDS
from .timer import ClockTimer, EventTimer, Timing


class Bench:
    """One run: where, by which timer, until when; and what it has found so far."""

    def __init__(self, device: torch.device, timer, clock, seconds: float, say, dtypes, dry_run: bool):
        self.device, self.timer, self.clock, self.say, self.dry_run = device, timer, clock, say, dry_run
        self.dtype, self.other = dtypes
        self.begun, self.end = clock(), clock() + seconds
        self.bandwidth = 0.0  # of a copy, bytes per second
        self.baselines: dict[tuple, dict] = {}
        self.found: dict[str, list] = {"copies": [], "checks": [], "cases": [], "skipped": []}

    def has_time(self, name: str) -> bool:
        """Whether there is time left; notes the name if not."""
        if self.clock() < self.end:
            return True
        self.found["skipped"].append(name)
        return False

    def check(self, name: str, tolerance: float, error: Callable[[], float]) -> None:
        """Note whether error() stays within the tolerance; whatever it raises is a failed check."""
        if not self.has_time(name):
            return
        row = {"name": name, "tolerance": tolerance}
        try:
            judge(row, float(error()), tolerance)
        except Exception as raised:
            row |= {"error": report.BEYOND, "ok": False, "message": _said(raised)}
        self.found["checks"].append(row)
        self.say(report.check_line(row))

    def time(self, call: Callable[[], object], row: dict, moved: int) -> dict:
        """The row with its prediction and its measurement: `moved` bytes."""
        predicted = moved / self.bandwidth
        timing: Timing = self.timer(call)
        seconds = max(timing.median, 1e-12)  # a stubbed clock may stand still
        rate = moved / seconds
        measured = {"seconds": seconds, "timing": timing.row(), "bytes_per_s": rate}
        return row | {"predicted_s": predicted, **measured, "of_copy": rate / self.bandwidth}

    def case(self, row: dict, run: Callable[[dict], dict]) -> None:
        """Run one timed case; whatever it raises is a failed case."""
        if not self.has_time(row["name"]):
            return
        row.setdefault("baselines", {})
        try:
            row = run(row)
        except torch.OutOfMemoryError:
            self.found["skipped"].append(f"{row['name']} (memory)")
            return
        except Exception as raised:
            row |= {"ok": False, "message": _said(raised)}
        self.found["cases"].append(row)
        self.say(report.case_line(row))

    def beside(self, prepare: Callable[[], Callable[[], object]]) -> dict:
        """A baseline's time, or what it said instead of running."""
        try:
            return {"seconds": max(self.timer(prepare()).median, 1e-12)}
        except Exception as raised:
            return {"message": _said(raised)}


def bench_gpu(
    *,
    seconds: float = GPU_SECONDS,
    dry_run: bool = False,
    timer: Callable | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = print,
    command: str = "companion bench --gpu",
) -> dict:
    """Run everything and return the result (`bench_report` says its form).

    seconds: what has not begun by then is skipped, and named. dry_run: every step at tiny sizes, in Triton's
    interpreter on a CPU (choose it first), with a stand-in for the timer; the result is marked and cannot be
    stored. timer: a function of a call that returns a `Timing`. clock: seconds, for the time limit.

    Raises ValueError where there is no GPU that runs Triton's kernels, and for seconds below 0.
    """
    from . import checks as bench_checks
    from . import runs as bench_runs

    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r}; need a number above 0")
    device = torch.device("cpu" if dry_run else "cuda")
    machine = describe_gpu(None if dry_run else device)  # raises without a GPU
    timer = timer or (ClockTimer() if dry_run else EventTimer(device))
    new = machine["capability"] == [] or machine["capability"] >= [8, 0]
    bench = Bench(device, timer, clock, seconds, say, ("bf16", "fp16") if new else ("fp16", None), dry_run)
    for line in report.head(machine, dry_run):
        say(line)
    bench_runs.copies(bench)
    bench_checks.checks(bench)
    small, small_moe = (tiny_decode, tiny_moe) if dry_run else (_as_it_is, _as_it_is)
    for case in dict.fromkeys(map(small, first_cases(bench.dtype))):
        bench_runs.decode(bench, case)
    for case in dict.fromkeys(map(small_moe, moe_cases(bench.dtype))):
        bench_runs.experts(bench, case)
    bench_runs.writes(bench)
    for case in dict.fromkeys(map(small, more_cases(bench.dtype, bench.other))):
        bench_runs.decode(bench, case)
    found = bench.found
    result = {
        "schema": report.SCHEMA,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "dry_run": dry_run,
        "seconds": float(clock() - bench.begun),
        "machine": machine,
        "copy": {"bytes_per_s": bench.bandwidth, "rows": found["copies"]},
        "checks": found["checks"],
        "cases": found["cases"],
        "goals": report.goals([] if dry_run else found["cases"], bench.dtype),
        "skipped": found["skipped"],
    }
    for row in result["goals"]:
        say(report.goal_line(row))
    if found["skipped"]:
        say(f"no time for {len(found['skipped'])}: {', '.join(found['skipped'])}")
    for name in report.failed(result):
        say(f"WRONG: {name}")
    return result


def run(args: argparse.Namespace) -> int:
    """`companion bench --gpu`; `command.py` has its arguments. 0: all right; 1: a wrong kernel; 2: no GPU."""
    if args.dry_run:
        from ..mode import interpret

        try:
            interpret()
        except (ImportError, RuntimeError) as reason:  # no Triton, or imported too early
            return _nothing(str(reason))
    elif not torch.cuda.is_available():
        return _nothing("no GPU that torch can use; --dry-run tries the script without one")
    command = shlex.join(["companion", *sys.argv[1:]])
    say = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    result = bench_gpu(seconds=args.seconds, dry_run=args.dry_run, command=command, say=say)
    report.check(result)
    if args.json:
        print(json.dumps(result, allow_nan=False))
    if args.out is not None:
        report.write(result, args.out)
        say(f"written to {args.out}")
    return 1 if report.failed(result) else 0


def _nothing(reason: str) -> int:
    print(f"companion bench: error: {reason}", file=sys.stderr)
    return 2


def _as_it_is(case):
    return case


def _said(raised: Exception) -> str:
    return f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised).strip() else ''}"[
        :300
    ]
