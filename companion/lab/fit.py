"""Straight lines through measurements, with intervals, and both as a chart. Standard library only.

Ordinary least squares with Student's t, as in any textbook: if the scatter about the curve is independent
from run to run and roughly normal, a 95 % interval misses the truth in 5 of 100 sweeps. Both are arranged for
rather than hoped for: runs are taken in shuffled rounds, so that a machine that slows down for a minute adds
scatter to all contexts instead of a slope, and a run's own number is the median over its steps.

A chart is SVG text, measured dots over a dashed prediction: no library, no script, no request.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

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
        open_ended = {
            k: None if math.isinf(getattr(self, k)) else getattr(self, k) for k in ("low", "high", "stderr")
        }
        return {"value": self.value, **open_ended, "degrees": self.degrees, "confidence": self.confidence}


@dataclass(frozen=True)
class Fit:
    """y = sum of coefficient x column. scatter: standard deviation about the curve, in the unit of y."""

    coefficients: Mapping[str, Estimate]
    scatter: float
    points: int

    def __getitem__(self, name: str) -> Estimate:
        return self.coefficients[name]

    def to_dict(self) -> dict:
        parts = {name: e.to_dict() for name, e in self.coefficients.items()}
        return {"coefficients": parts, "scatter": self.scatter, "points": self.points}


def line(
    x: Sequence[float], y: Sequence[float], *, relative: bool = False, confidence: float = CONFIDENCE
) -> Fit:
    """y = intercept + slope x. At least two different x.

    relative: each point weighs by 1 / y^2, for scatter that grows with the time, as on a busy machine: there
    equal weights give intervals that miss the truth more often than they say. y must be above 0 then.
    """
    columns = {"intercept": [1.0] * len(x), "slope": x}
    return least_squares(
        columns, y, weights=_relative("line", y) if relative else None, confidence=confidence
    )


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


W, H = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 72, 32, 34, 52  # room for labels of 17 units: on a phone they are drawn that large
Pairs = Sequence[tuple[float, float]]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    measured: dict[str, Pairs],
    predicted: dict[str, Pairs],
    fitted: Pairs = (),
) -> str:
    """Dots for each measured series, a dashed line for each predicted one, a thin one for what was fitted.

    Both axes begin at 0; a fit that goes below is cut there.

    title: said to whoever cannot see it. Returns "" where nothing was measured.
    """
    dots = [p for s in measured.values() for p in s]
    if not dots:
        return ""
    fitted = [(x, max(0.0, y)) for x, y in fitted]
    every = dots + [p for s in predicted.values() for p in s] + fitted
    xs, ys = ticks(max(x for x, _ in every)), ticks(max(y for _, y in every))

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (W - LEFT - RIGHT) * x / xs[-1]
        return round(across, 1), round(H - BOTTOM - (H - TOP - BOTTOM) * y / ys[-1], 1)

    out = [f'<svg viewBox="0 0 {W} {H}" role="img"><title>{escape(title)}</title>']
    for y in ys:
        _, down = at(0, y)
        out.append(f'<path class="grid" d="M{LEFT} {down}H{W - RIGHT}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{down + 4}" text-anchor="end">{_label(y)}</text>')
    for x in xs:
        across, _ = at(x, 0)
        out.append(f'<text x="{across}" y="{H - BOTTOM + 19}" text-anchor="middle">{_label(x)}</text>')
    middle = (LEFT + W - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{H - 9}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text x="10" y="20">{escape(y_label)}</text>')
    for i, (name, pairs) in enumerate(predicted.items()):
        path = "L".join("{} {}".format(*at(x, y)) for x, y in sorted(pairs))
        out.append(
            f'<path class="predicted s{i % 3}" d="M{path}"><title>{escape(name)}, predicted</title></path>'
        )
    if fitted:
        path = "L".join("{} {}".format(*at(x, y)) for x, y in fitted)
        out.append(f'<path class="fitted s0" d="M{path}"><title>fitted</title></path>')
    for i, (name, pairs) in enumerate(measured.items()):
        for x, y in pairs:
            across, down = at(x, y)
            tip = f"{escape(name)}: {_label(y)} at {_label(x)}"
            out.append(
                f'<circle class="s{i % 3}" cx="{across}" cy="{down}" r="3.5"><title>{tip}</title></circle>'
            )
    if len(measured) > 1:
        for i, name in enumerate(measured):
            x, y = LEFT + 14, TOP + 8 + 19 * i
            out.append(f'<circle class="s{i % 3}" cx="{x}" cy="{y}" r="3.5"/>')
            out.append(f'<text x="{x + 10}" y="{y + 5}">{escape(name)}</text>')
    return "".join(out) + "</svg>"


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `most`: four to eight of them."""
    if not most > 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(most / 4))
    step *= next(m for m in (1, 2, 5, 10) if most / (m * step) <= 7)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
