"""Shared by the benchmarks: arguments, the machine's read bandwidth, seconds in turns."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


def read_bandwidth(nbytes: int = 256 * 2**20, repeats: int = 8) -> dict[str, float]:
    """Bytes per second of summing a float32 array far larger than any cache; best and median."""
    x = torch.ones(nbytes // 4)
    seconds = timed(x.sum, repeats)
    return {"best": nbytes / min(seconds), "median": nbytes / statistics.median(seconds)}


def arguments(doc: str, parts: Iterable[str] = ()) -> argparse.Namespace:
    """--threads (applied), --rounds, --out: shared by these benchmarks. --only: one of `parts`, if any."""
    parse = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--threads", type=int, default=None)
    parse.add_argument("--rounds", type=int, default=7)
    parse.add_argument("--out", type=Path, default=None)
    if parts:
        parse.add_argument("--only", choices=list(parts))
    args = parse.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def spread(ratios: list[float]) -> dict[str, float]:
    """The median round, and the extremes."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after two that are not counted."""
    run()
    run()
    out = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        out.append(time.perf_counter() - start)
    return out
