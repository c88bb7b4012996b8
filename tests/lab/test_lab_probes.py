"""Probes on machines that a test makes up, whose rates are known, and once on the real one."""

import pytest
from scripted import ScriptedClock

from companion.lab.probes import Probe, Stopwatch, hardware_from, memory_rate, probe, product_rate

MB = 2**20


class Machine:
    """Reads at `memory` bytes per second, at `cache` while an array fits into `room`; every third is slow."""

    def __init__(self, memory=16e9, cache=128e9, room=32 * MB, flops=2e9):
        self.memory, self.cache, self.room, self.flops = memory, cache, room, flops
        self.clock, self.runs, self.pending, self.waits = ScriptedClock(), 0, 0.0, 0

    def reading(self, nbytes):
        return lambda: self._work(nbytes / (self.cache if nbytes <= self.room else self.memory))

    def multiplying(self, n):
        return lambda: self._work(2 * n**3 / self.flops)

    def _work(self, seconds):
        self.runs += 1
        self.pending += seconds * (2.0 if self.runs % 3 == 0 else 1.0)

    def wait(self):
        """Like a GPU: the call comes back at once, the work is done when someone waits for it."""
        self.waits += 1
        self.clock.sleep(self.pending)
        self.pending = 0.0

    @property
    def watch(self):
        return Stopwatch(self.clock, self.wait)


def test_the_memory_is_measured_and_not_the_cache():
    m = Machine()
    p = memory_rate("read", "fp32", m.reading, m.watch, sizes=[MB, 16 * MB, 64 * MB, 256 * MB], repeats=6)
    assert p.rate == pytest.approx(16e9) and p.size == 256 * MB and not p.why
    assert p.median == pytest.approx(16e9) and p.slowest == pytest.approx(8e9)  # the spread
    assert [round(rate / 1e9) for _, rate in p.sizes] == [128, 128, 16, 16]


def test_a_rate_above_the_memory_s_peak_is_refused():
    m = Machine(room=10**12)
    p = memory_rate("read", "fp32", m.reading, m.watch, sizes=[MB, 2 * MB], peak=20e9)
    assert p.rate is None and "128.0 GB/s is above the memory's 20.0: a cache was measured" == p.why


def test_a_rate_that_still_falls_is_refused():
    m = Machine()
    p = memory_rate("read", "fp32", m.reading, m.watch, sizes=[16 * MB, 64 * MB])
    assert p.rate is None and "still falls" in p.why and "128.0 to 16.0" in p.why


def test_a_rate_at_the_peak_is_taken():
    m = Machine()
    assert memory_rate("read", "fp32", m.reading, m.watch, sizes=[64 * MB], peak=17e9).rate


def test_products_take_the_best_size():
    m = Machine()
    p = product_rate("fp32", m.multiplying, m.watch, sizes=[256, 512])
    assert p.rate == pytest.approx(2e9) and p.slowest == pytest.approx(1e9)


def test_a_device_that_works_on_is_waited_for():
    m = Machine()
    assert m.watch.seconds(m.reading(256 * MB)) == pytest.approx(256 * MB / 16e9)
    assert m.waits == 2
    assert Stopwatch(m.clock).seconds(m.reading(256 * MB)) == 0.0  # what forgetting it would measure


def test_work_begun_before_is_not_counted():
    m = Machine()
    m.reading(256 * MB)()
    assert m.watch.seconds(lambda: None) == 0.0


def test_a_device_that_cannot_be_waited_for_is_not_timed():
    with pytest.raises(ValueError, match="torch cannot wait for it"):
        Stopwatch.on("meta")


def test_hardware_from_probes():
    def rate(kind, dtype, value, why=""):
        return Probe(kind, dtype, value, 1.0, 1.0, 1, [], why)

    probes = [rate("read", "fp32", 10e9), rate("read", "bf16", 12e9), rate("read", "fp16", None, "a cache")]
    probes += [rate("copy", "fp32", 99e9), rate("matmul", "fp32", 80e9), rate("matmul", "bf16", 20e9)]
    h = hardware_from(probes)
    assert h.bandwidth == 12e9 and h.flops == {"fp32": 80e9, "bf16": 20e9}
    with pytest.raises(ValueError, match="no bandwidth to predict with: a cache"):
        hardware_from([probes[2], probes[3]])


def test_this_machine():
    """Real arrays, small ones, so that rates may be a cache's: only that they are rates, and which."""
    found = probe("cpu", dtypes=("fp32", "bf16"), quick=True)
    assert [(p.kind, p.dtype) for p in found] == [
        (kind, dtype) for dtype in ("fp32", "bf16") for kind in ("matmul", "read", "copy")
    ]
    for p in found:
        assert (p.rate is None) == bool(p.why)
        assert 0 < p.slowest <= p.median <= max(rate for _, rate in p.sizes) * (1 + 1e-12)
