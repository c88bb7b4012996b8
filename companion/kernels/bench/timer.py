"""Seconds of one call: CUDA events on a GPU, with cold caches; or a clock, to try the script without one."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

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
