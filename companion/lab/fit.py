"""Curves through measurements, with intervals, and verdicts: an interval against the band of a claim.

Ordinary least squares with Student's t, as in any textbook: if the scatter about the curve is independent
from run to run and roughly normal, a 95 % interval misses the truth in 5 of 100 sweeps. Both are arranged for
rather than hoped for: runs are taken in shuffled rounds, so that a machine that slows down for a minute adds
scatter to all contexts instead of a slope, and a run's own number is the median over its steps.

    holds here           the whole interval lies in the band
    does not hold here   the whole interval lies outside
    cannot be told       anything else; then, how many runs or how long a context could tell

A verdict of the first or the second kind is wrong in at most 5 of 100 sweeps, and in 2.5 where only one edge
of the band is near: it takes an interval that misses the truth on that side. Standard library only.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..stats import t_quantile

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with its interval at `confidence`; degrees: of freedom left, 0 for no interval at all.

    low and high are infinite where nothing is left to estimate the scatter from.
    """

    value: float
    low: float
    high: float
    stderr: float
    degrees: int
    confidence: float = CONFIDENCE

    def scaled(self, factor: float) -> "Estimate":
        """The same in another unit, or as a multiple of 1 / factor."""
        low, high = sorted((self.low * factor, self.high * factor))
        stderr = self.stderr * abs(factor)
        return Estimate(self.value * factor, low, high, stderr, self.degrees, self.confidence)

    def to_dict(self) -> dict:
        """For JSON, which has no infinity: an open end is None."""
        return {k: None if math.isinf(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Fit:
    """y = sum of coefficient x column. scatter: standard deviation about the curve, in the unit of y."""

    coefficients: Mapping[str, Estimate]
    scatter: float
    points: int

    def __getitem__(self, name: str) -> Estimate:
        return self.coefficients[name]

    def to_dict(self) -> dict:
        return vars(self) | {"coefficients": {name: e.to_dict() for name, e in self.coefficients.items()}}


def line(
    x: Sequence[float], y: Sequence[float], *, relative: bool = False, confidence: float = CONFIDENCE
) -> Fit:
    """y = intercept + slope x. At least two different x.

    relative: each point weighs by 1 / y^2, for scatter that grows with the time, as on a busy machine: there
    equal weights give intervals that miss the truth more often than they say. y must be above 0 then.
    """
    columns, weights = {"intercept": [1.0] * len(x), "slope": x}, _relative("line", y) if relative else None
    return least_squares(columns, y, weights=weights, confidence=confidence)


def parabola(x: Sequence[float], y: Sequence[float], *, confidence: float = CONFIDENCE) -> Fit:
    """y = intercept + slope x + curvature x^2, each point weighing by 1 / y^2: scatter grows with the time.

    At least three different x, and y above 0.
    """
    columns = {"intercept": [1.0] * len(x), "slope": x, "curvature": [v * v for v in x]}
    return least_squares(columns, y, weights=_relative("parabola", y), confidence=confidence)


def _relative(curve: str, y: Sequence[float]) -> list[float]:
    if any(not v > 0 for v in y):
        raise ValueError(f"{curve}: y must be above 0")
    return [1 / (v * v) for v in y]


def mean(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of independent runs, with its interval."""
    return least_squares({"mean": [1.0] * len(values)}, values, confidence=confidence)["mean"]


def ratio(a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """a / b of pairs taken in the same rounds: the geometric mean, and the interval of its logarithm.

    What slows a whole round drops out.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"ratio: need as many a as b, got {len(a)} and {len(b)}")
    if any(not v > 0 for v in (*a, *b)):
        raise ValueError("ratio: every value must be above 0")
    e = mean([math.log(p / q) for p, q in zip(a, b)], confidence=confidence)
    value = math.exp(e.value)
    high = math.inf if e.high > 700 else math.exp(e.high)
    return Estimate(value, math.exp(e.low), high, value * e.stderr, e.degrees, confidence)


def least_squares(
    columns: Mapping[str, Sequence[float]],
    y: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    confidence: float = CONFIDENCE,
) -> Fit:
    """Fit y by a sum of columns. weights: 1 / variance of each point, up to a common factor.

    Raises ValueError for too few points, for lengths that differ, for columns that depend on each other and
    for values that are not finite.
    """
    names, n, p = list(columns), len(y), len(columns)
    for name, column in columns.items():
        if len(column) != n:
            raise ValueError(f"{name} has {len(column)} values, y has {n}")
        if not all(map(math.isfinite, column)):
            raise ValueError(f"{name} holds a value that is not finite")
    if not all(map(math.isfinite, y)):
        raise ValueError("y holds a value that is not finite")
    if n < p:
        raise ValueError(f"{n} points cannot give {' and '.join(names)}; need at least {p}")
    roots = [1.0] * n if weights is None else [math.sqrt(w) for w in weights]
    Q, R = _orthogonal([[v * r for v, r in zip(columns[name], roots)] for name in names], names)
    target = [v * r for v, r in zip(y, roots)]
    projected = [_dot(q, target) for q in Q]
    values = _back_substitute(R, projected)
    fitted = [sum(q[i] * c for q, c in zip(Q, projected)) for i in range(n)]
    squares = sum((t - f) ** 2 for t, f in zip(target, fitted))
    degrees = n - p
    sigma = math.sqrt(squares / degrees) if degrees else math.inf
    t = t_quantile(0.5 + confidence / 2, degrees) if degrees else math.inf
    found = {}
    for j, name in enumerate(names):
        # Row j of R^-1 has the length of the coefficient's standard error over sigma.
        row = [_back_substitute(R, [float(i == k) for i in range(p)])[j] for k in range(p)]
        stderr = math.sqrt(_dot(row, row)) * sigma
        half = t * stderr if stderr else 0.0
        found[name] = Estimate(values[j], values[j] - half, values[j] + half, stderr, degrees, confidence)
    mean_weight = sum(r * r for r in roots) / n
    return Fit(found, sigma / math.sqrt(mean_weight) if degrees else 0.0, n)


def _orthogonal(vectors: list[list[float]], names: list[str]) -> tuple[list[list[float]], list[list[float]]]:
    """Gram and Schmidt, twice over, which is as accurate as anything for a few columns."""
    Q, R = [], [[0.0] * len(vectors) for _ in vectors]
    for j, vector in enumerate(vectors):
        before, rest = math.sqrt(_dot(vector, vector)), list(vector)
        for _ in range(2):
            for i, q in enumerate(Q):
                share = _dot(q, rest)
                R[i][j] += share
                rest = [r - share * v for r, v in zip(rest, q)]
        size = math.sqrt(_dot(rest, rest))
        if size <= 1e-10 * before or before == 0:
            raise ValueError(f"these points cannot tell {names[j]} from the rest: too few different values")
        R[j][j] = size
        Q.append([r / size for r in rest])
    return Q, R


def _back_substitute(R: list[list[float]], b: list[float]) -> list[float]:
    x = [0.0] * len(b)
    for i in reversed(range(len(b))):
        x[i] = (b[i] - sum(R[i][k] * x[k] for k in range(i + 1, len(b)))) / R[i][i]
    return x


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(p * q for p, q in zip(a, b))


HOLDS, FAILS, UNTOLD = "holds here", "does not hold here", "cannot be told"
MOST = 1_000_000  # runs; more than that is no plan


@dataclass(frozen=True)
class Verdict:
    """claim: a sentence. low, high: the band, None where it has no edge. value, interval: what was found.

    runs_needed     fewest runs, at the same contexts, that could tell; None where told, or beyond a million
    context_needed  shortest longest context, with as many runs, that could tell; None likewise. Whether the
                    model takes as many is not asked
    reason          in words, with these numbers
    """

    claim: str
    outcome: str
    reason: str
    value: float | None = None
    interval: tuple[float | None, float | None] = (None, None)
    low: float | None = None
    high: float | None = None
    runs: int = 0
    runs_needed: int | None = None
    context_needed: int | None = None
    unit: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


def verdict(
    claim: str,
    estimate: Estimate | None,
    *,
    low: float | None = None,
    high: float | None = None,
    expected: float | None = None,
    runs: int = 0,
    contexts: Sequence[int] | None = None,
    unit: str = "",
    missing: str = "nothing was measured",
) -> Verdict:
    """Judge one claim.

    claim     what is said, a sentence
    estimate  what was found; None where it could not be, and `missing` says why
    low, high   the claim's band; None for no edge. At least one is given
    expected  the value predicted; tells how many runs could tell if the prediction is right
    runs      how many there were
    contexts  the contexts measured, for a slope: a longer one would narrow its interval
    """
    if low is None and high is None:
        raise ValueError(f"verdict on {claim!r}: neither low nor high is given")
    if low is not None and high is not None and not low < high:
        raise ValueError(f"verdict on {claim!r}: low={low!r} must be below high={high!r}")
    band = {"low": low, "high": high, "runs": runs, "unit": unit}
    if estimate is None:
        return Verdict(claim, UNTOLD, missing, **band)
    interval = tuple(None if math.isinf(v) else v for v in (estimate.low, estimate.high))
    found = band | {"value": estimate.value, "interval": interval}
    text = f"{_number(estimate.value)}{unit and f' {unit}'} ({_between(*interval)})"
    beside = "" if expected is None else f", predicted {_number(expected)}"
    text += f"; the claim says {_between(low, high)}{beside}"
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    if estimate.high < least or estimate.low > most:
        return Verdict(claim, FAILS, text, **found)
    if (low is None or estimate.low > low) and (high is None or estimate.high < high):
        return Verdict(claim, HOLDS, text, **found)
    # How wide half an interval may be to decide, where the estimate is or where the prediction is.
    places = [estimate.value] + ([] if expected is None else [expected])
    distance = max(min(abs(place - least), abs(place - most)) for place in places)
    needed = _runs_needed(estimate, distance, runs)
    longer = None if contexts is None else _context_needed(estimate, distance, contexts)
    could = [] if needed is None else [f"{needed:,} runs instead of {runs:,}"]
    if longer is not None:
        could.append(f"a context of {longer:,} tokens instead of {max(contexts):,}")
    hint = f"at least {' or '.join(could)} could tell" if could else "no feasible number of runs could tell"
    return Verdict(claim, UNTOLD, f"{text}; {hint}", **found, runs_needed=needed, context_needed=longer)


def _runs_needed(estimate: Estimate, distance: float, runs: int) -> int | None:
    """The fewest runs after which half the interval is narrower than `distance`."""
    lost = max(1, runs - estimate.degrees)  # runs that the coefficients themselves use up
    if not estimate.degrees:
        return max(runs, lost) + 2  # the scatter is unknown: the least that shows any
    if not distance:
        return None
    p = 0.5 + estimate.confidence / 2

    def decides(n: int) -> bool:
        return t_quantile(p, n - lost) * estimate.stderr * math.sqrt(runs / n) < distance

    needed = runs + 1 + bisect_left(range(runs + 1, MOST + 1), True, key=decides)
    return needed if needed <= MOST else None


def _context_needed(estimate: Estimate, distance: float, contexts: Sequence[int]) -> int | None:
    """A slope's interval shrinks as the contexts spread; a fifth is added to be on the safe side of noise."""
    half = (estimate.high - estimate.low) / 2
    if not distance or math.isinf(half):
        return None
    shortest, longest = min(contexts), max(contexts)
    factor = 1.2 * max(1.0, half / distance)
    return None if factor > 1e4 else math.ceil(shortest + (longest - shortest) * factor)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _between(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "no interval"
    if low is None:
        return f"below {_number(high)}"
    return f"above {_number(low)}" if high is None else f"{_number(low)} to {_number(high)}"
