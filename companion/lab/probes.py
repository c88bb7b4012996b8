"""What this device reaches: bytes read and copied per second, products per second, by format.

A rate is the best of several timings, since everything that disturbs a run makes it longer; the spread stands
beside it. An array that fits into a cache would measure the cache, so sizes are swept upwards, the largest is
taken, and a rate above what the memory can do is not reported at all.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from ..checks import near_names
from ..cost import HardwareSpec, hardware
from .transport import Clock, SystemClock

SIZES = tuple(2**i for i in range(20, 29))  # bytes: 1 MiB to 256 MiB
LARGE = tuple(2**i for i in range(24, 33))  # on a GPU, whose caches hold up to 256 MB
PRODUCTS = (512, 1024, 1536)
LARGE_PRODUCTS = (2048, 4096, 8192)
SETTLED = 1.25  # the largest two sizes may differ by this factor
TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # its names for them
DTYPES = ("fp32", "bf16", "fp16")
TRIES = 3  # on a machine that is disturbed


@dataclass(frozen=True)
class Probe:
    """Rates in bytes or FLOPs per second. kind: "read", "copy" (read and written: counts twice) or "matmul".

    rate     best at the largest size, or None where it is refused; `why` then says so
    median, slowest   of the same timings: the spread
    size     bytes of the array, or rows of the square matrices
    sizes    (size, best rate) of all that were tried
    """

    kind: str
    dtype: str
    rate: float | None
    median: float
    slowest: float
    size: int
    sizes: list[tuple[int, float]] = field(default_factory=list)
    why: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


class Stopwatch:
    """Seconds of a call, waiting for the device before it starts and before it stops."""

    def __init__(self, clock: Clock | None = None, synchronise: Callable[[], object] = lambda: None):
        self.clock, self._synchronise = clock or SystemClock(), synchronise

    @classmethod
    def on(cls, device: str, clock: Clock | None = None) -> "Stopwatch":
        """For a torch device; a GPU works on while Python goes ahead, so it is waited for."""
        import torch

        kind = torch.device(device).type
        if kind == "cpu":
            return cls(clock)
        backend = getattr(torch, kind, None)
        if not hasattr(backend, "synchronize"):
            raise ValueError(f"device={device!r}: torch cannot wait for it, so nothing on it can be timed")
        return cls(clock, backend.synchronize)

    def seconds(self, run: Callable[[], object]) -> float:
        """How long `run()` took, with all the device's work for it done."""
        self._synchronise()
        start = self.clock.now()
        run()
        self._synchronise()
        return self.clock.now() - start


def memory_rate(
    kind: str,
    dtype: str,
    make: Callable[[int], Callable[[], object]],
    watch: Stopwatch,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 8,
    peak: float | None = None,
) -> Probe:
    """Bytes per second over growing arrays. make(nbytes) returns the call to time, which moves nbytes.

    peak: bytes per second that the memory can do at most, if known. A rate above it, or one that still falls
    from the last size but one to the last, was a cache's, and is refused.
    """
    found, times = [], []
    for nbytes in sorted(sizes):
        times = _timed(watch, make(nbytes), repeats)
        found.append((nbytes, nbytes / min(times)))
    nbytes, rate = found[-1]
    why = ""
    if peak is not None and rate > peak:
        why = f"{rate / 1e9:.1f} GB/s is above the memory's {peak / 1e9:.1f}: a cache was measured"
    elif len(found) > 1 and found[-2][1] > SETTLED * rate:
        before = found[-2][1]
        why = f"it still falls with the size, {before / 1e9:.1f} to {rate / 1e9:.1f} GB/s: take larger arrays"
    median, slowest = nbytes / statistics.median(times), nbytes / max(times)
    return Probe(kind, dtype, None if why else rate, median, slowest, nbytes, found, why)


def product_rate(
    dtype: str,
    make: Callable[[int], Callable[[], object]],
    watch: Stopwatch,
    *,
    sizes: Sequence[int] = PRODUCTS,
    repeats: int = 4,
) -> Probe:
    """FLOPs per second of square products: the best size. make(n) returns a product of two n x n matrices."""
    found, all_times = [], {}
    for n in sorted(sizes):
        all_times[n] = _timed(watch, make(n), repeats)
        found.append((n, 2 * n**3 / min(all_times[n])))
    n, rate = max(found, key=lambda pair: pair[1])
    times, work = all_times[n], 2 * n**3
    return Probe("matmul", dtype, rate, work / statistics.median(times), work / max(times), n, found)


def probe(
    device: str = "cpu",
    *,
    dtypes: Sequence[str] = DTYPES,
    watch: Stopwatch | None = None,
    peak: float | None = None,
    quick: bool = False,
) -> list[Probe]:
    """Read, copy and product rates of a torch device.

    peak: the memory's bytes per second, if known. quick: fewer sizes and repeats, about a second on a laptop.
    A format that the device cannot multiply in is left out.
    """
    import torch

    watch = watch or Stopwatch.on(device)
    large = torch.device(device).type != "cpu"
    sizes, squares = (LARGE, LARGE_PRODUCTS) if large else (SIZES, PRODUCTS)
    if quick:
        sizes, squares = sizes[-3:], squares[:2]
    repeats = 4 if quick else 8
    out = []
    for name in dtypes:
        dtype = getattr(torch, TORCH[name])

        def reading(nbytes: int, dtype=dtype):
            x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=device)
            return x.sum

        def copying(nbytes: int, dtype=dtype):
            x = torch.ones(nbytes // 2 // dtype.itemsize, dtype=dtype, device=device)
            y = torch.empty_like(x)
            return lambda: y.copy_(x)

        def multiplying(n: int, dtype=dtype):
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            return lambda: a @ b

        options = {"sizes": sizes, "repeats": repeats, "peak": peak}
        try:
            out.append(product_rate(name, multiplying, watch, sizes=squares, repeats=repeats // 2))
        except RuntimeError:
            continue
        out.append(memory_rate("read", name, reading, watch, **options))
        out.append(memory_rate("copy", name, copying, watch, **options))
    return out


def hardware_from(probes: Sequence[Probe], name: str = "this machine") -> HardwareSpec:
    """A device to predict with: the best read rate of any format, and a product rate for each.

    Raises ValueError, with the reasons, if every read rate was refused.
    """
    reads = [p for p in probes if p.kind == "read"]
    accepted = [p.rate for p in reads if p.rate is not None]
    if not accepted:
        reasons = "; ".join(sorted({p.why for p in reads})) or "none was measured"
        raise ValueError(f"no bandwidth to predict with: {reasons}")
    flops = {p.dtype: p.rate for p in probes if p.kind == "matmul"}
    return HardwareSpec.measured(name, bandwidth=max(accepted), flops=flops)


def probed(device: str, dtypes: Sequence[str]) -> tuple[list[Probe], HardwareSpec]:
    """The rates of a torch device and what to predict with; taken again where something disturbed them."""
    import torch

    peak = None
    if torch.device(device).type == "cuda":
        peak = peak_bandwidth(torch.cuda.get_device_name(device))
    for again in reversed(range(TRIES)):
        found = probe(device, dtypes=dtypes, peak=peak)
        try:
            return found, hardware_from(found)
        except ValueError as e:
            if not again:
                raise ValueError(f"{e}; or name the device with --hardware") from None


def peak_bandwidth(device_name: str) -> float | None:
    """The most that the memory of a GPU of this name does, of all in the table that may be meant."""
    words = [w for w in device_name.lower().replace("-", " ").split() if any(c.isdigit() for c in w)]
    rates = [hardware[n].bandwidth for w in words for n in near_names(w, [*hardware]) if w in n]
    return max(rates, default=None)


def _timed(watch: Stopwatch, run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after one that is not counted."""
    watch.seconds(run)
    return [watch.seconds(run) for _ in range(repeats)]
