"""`companion bench --gpu`: every kernel of this package checked and timed on the GPU at hand, in minutes.

Checked against float64, or bit for bit. Timed with events and cold caches at sizes beyond the L2 cache,
beside a prediction made before: the bytes that must move, over the bandwidth that a copy reaches here.
Without a GPU: one line, exit code 2. A wrong kernel: its name, exit code 1.

A dry run takes its seconds from a clock, to try the script without a GPU.
"""

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ...machine import describe_gpu
from . import report
from .cases import first_cases, judge, moe_cases, more_cases, tiny_decode, tiny_moe
from .report import GPU_SECONDS

WARM_UPS = 3  # compiling, and clocks that have to rise


CALM = 2e-4  # seconds that the GPU is kept busy beyond what a launch takes the host


@dataclass(frozen=True)
class Timing:
    """median, min and max over rounds, in seconds; host: of the call until it returned, median."""

    median: float
    min: float
    max: float
    host: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float], host: list[float]) -> "Timing":
        middle = statistics.median
        return cls(middle(seconds), min(seconds), max(seconds), middle(host), len(seconds))

    def row(self) -> dict:
        return asdict(self)


class EventTimer:
    """Time on the device, between two CUDA events around the call.

    Before each round a buffer several times the L2 cache is read, so that nothing which the call reads is
    still there; read, not written, because dirty lines would have to be put away during the call. And before
    that the GPU is made to wait, for longer than the host needs to launch everything: Python's time between
    two launches is then not counted as the kernel's.
    """

    def __init__(self, device: torch.device, rounds: int = 20):
        self.device, self.rounds = device, rounds
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
        self.flush = torch.zeros(max(4 * l2, 64 * 2**20) // 4, device=device)
        self._cycles = 1e9  # per second, until it is measured
        for _ in range(2):  # the first loads the kernel
            self._cycles = 1e6 / self._between(lambda: torch.cuda._sleep(1_000_000), wait=0.0)

    def __call__(self, call: Callable[[], object]) -> Timing:
        for _ in range(WARM_UPS):
            call()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        host = [time.perf_counter() - start]
        seconds = []
        for _ in range(self.rounds):
            seconds.append(self._between(call, wait=2 * max(host) + CALM, host=host))
        return Timing.of(seconds, host[1:])

    def _between(self, call, *, wait: float, host: list[float] | None = None) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        if wait:
            torch.cuda._sleep(int(min(wait, 0.1) * self._cycles))
        self.flush.max()
        begin.record()
        start = time.perf_counter()
        call()
        if host is not None:
            host.append(time.perf_counter() - start)
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1e3


class ClockTimer:
    """By a clock of one's choice, without a GPU: for a dry run, whose numbers mean nothing."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, rounds: int = 1):
        self.clock, self.rounds = clock, rounds

    def __call__(self, call: Callable[[], object]) -> Timing:
        seconds = []
        for _ in range(self.rounds):
            start = self.clock()
            call()
            seconds.append(self.clock() - start)
        return Timing.of(seconds, seconds)


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
