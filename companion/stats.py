"""What a handful of samples decides: standard errors, paired tests, many comparisons, how many more it takes.

A sample is whatever was drawn independently: a chunk of text, a haystack, a training seed. Values inside one
(its tokens, its facts) share the text around them; they are averaged first, and the averages are counted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

Number = int | float


@dataclass(frozen=True)
class Estimate:
    """A mean over n samples; se: its standard error, None for a single sample."""

    mean: float
    se: float | None
    n: int


@dataclass(frozen=True)
class Paired:
    """a less b over the same samples. sd: of one sample's difference; p: two-sided, Student's t test."""

    difference: float
    se: float
    sd: float
    n: int
    p: float


def estimate(values: Sequence[Number]) -> Estimate:
    """Mean and standard error, s / sqrt(n) with s**2 = sum (x - mean)**2 / (n - 1)."""
    n = len(values)
    if n == 0:
        raise ValueError("values must be at least one sample, got none")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n), n)


def clustered(samples: Sequence[Sequence[Number]]) -> Estimate:
    """The mean of all values, where the values inside one sample are not independent.

    For samples of one size, such as the 8 facts of each haystack: the means of the samples are what varies.
    Raises ValueError for samples of different sizes, whose means would not weigh the same.
    """
    if len({len(s) for s in samples}) != 1 or not samples[0]:
        raise ValueError(f"samples must be of one size, at least 1, got {sorted({len(s) for s in samples})}")
    return estimate([math.fsum(s) / len(s) for s in samples])


def paired(a: Sequence[Number], b: Sequence[Number]) -> Paired:
    """The mean of a - b with its test; a and b are of the same samples, in the same order, at least two.

    With differences that are all the same the standard error is 0, and p is 1 (all of them 0) or 0.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"a and b must be of one length, at least 2, got {len(a)} and {len(b)}")
    n = len(a)
    e = estimate([x - y for x, y in zip(a, b)])
    if e.se == 0:
        p = 1.0 if e.mean == 0 else 0.0
    else:
        p = two_sided(e.mean / e.se, n - 1)
    return Paired(e.mean, e.se, e.se * math.sqrt(n), n, p)


def two_sided(t: Number, df: int) -> float:
    """P(|T| > |t|) of Student's t with df degrees of freedom, by the finite sums for whole df.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4. From about 1e-15 down rounding is all there is.
    """
    _whole("df", df, 1)
    angle = math.atan(abs(t) / math.sqrt(df))
    c2, sine = math.cos(angle) ** 2, math.sin(angle)
    term = total = 0.0
    if df % 2:
        if df > 1:
            term = total = math.cos(angle)
            for j in range(3, df - 1, 2):
                term *= c2 * (j - 1) / j
                total += term
        inside = 2 / math.pi * (angle + sine * total)
    else:
        term = total = 1.0
        for j in range(2, df - 1, 2):
            term *= c2 * (j - 1) / j
            total += term
        inside = sine * total
    return min(1.0, max(0.0, 1.0 - inside))


@lru_cache(maxsize=4096)
def t_quantile(p: Number, df: int) -> float:
    """The number that Student's t with df degrees of freedom stays below with probability p, 0.5 <= p < 1."""
    if not 0.5 <= p < 1:
        raise ValueError(f"p must be a probability from 0.5 to below 1, got {p!r}")
    if df > 200:  # Abramowitz and Stegun 26.7.5, right to 1e-7 here
        z = NormalDist().inv_cdf(p)
        g = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        return z + g[0] / df + g[1] / df**2
    return _bisect(lambda t: 1 - two_sided(t, df) / 2 >= p, 1.0)


def holm(p: Sequence[Number]) -> list[float]:
    """p values adjusted for how many there are (Holm 1979): those below alpha hold together at level alpha.

    The smallest is multiplied by their number m, the next by m - 1 and so on; none falls below one before it.
    """
    out, worst = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        worst = max(worst, min(1.0, (len(p) - rank) * p[i]))
        out[i] = worst
    return out


def needed(difference: Number, sd: Number, *, alpha: Number = 0.05, power: Number = 0.8) -> int:
    """Samples after which a paired test at level alpha finds `difference` with probability `power`.

    difference: the true mean difference, which nobody knows; put in an observed one and the answer is as
    uncertain as that is. sd: of the difference of one sample. The usual approximation by two quantiles of t,
    n = ((t_alpha/2 + t_power) sd / difference)**2; within one or two samples of the exact power.
    """
    if not (difference and math.isfinite(difference)):
        raise ValueError(f"difference must be a finite number other than 0, got {difference!r}")
    found = lambda n: detectable(sd, int(n), alpha=alpha, power=power) <= abs(difference)  # noqa: E731
    return int(_bisect(found, 2.0, 2))


def detectable(sd: Number, n: int, *, alpha: Number = 0.05, power: Number = 0.8) -> float:
    """The true difference that n samples find with probability `power`, by a paired test at level alpha."""
    _whole("n", n, 2)
    if not sd >= 0:
        raise ValueError(f"sd must be a number of at least 0, got {sd!r}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be above 0 and below 1, got {alpha!r}")
    if not 0.5 <= power < 1:
        raise ValueError(f"power must be from 0.5 to below 1, got {power!r}")
    return (t_quantile(1 - alpha / 2, n - 1) + t_quantile(power, n - 1)) * sd / math.sqrt(n)


def separated(
    settings: dict[str, Sequence[Number]], *, alpha: Number = 0.05, power: Number = 0.8
) -> list[dict[str, object]]:
    """Every pair of settings, tested on the samples that they share, and adjusted by `holm`.

    A row for each pair: "a", "b", "difference" (a less b), "se", "p", "p_holm", "apart" (p_holm below alpha),
    "two_se" (difference beyond two standard errors, unadjusted), and "needed": samples for `power` at level
    alpha of this one comparison, if the truth is the difference that was observed; None where that is 0, or
    beyond a million.
    """
    names = list(settings)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    tests = [paired(settings[a], settings[b]) for a, b in pairs]
    rows = []
    for (a, b), t, p in zip(pairs, tests, holm([t.p for t in tests])):
        hopeless = abs(t.difference) < 2e-3 * t.sd  # over a million samples
        n = None if hopeless or not t.difference else needed(t.difference, t.sd, alpha=alpha, power=power)
        rows.append({
            "a": a, "b": b, "difference": t.difference, "se": t.se, "p": t.p, "p_holm": p,
            "apart": p < alpha, "two_se": abs(t.difference) > 2 * t.se, "needed": n,
        })  # fmt: skip
    return rows


def _whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _bisect(enough: Callable[[float], bool], high: float, least: int | None = None) -> float:
    """The smallest number at which `enough` holds, which then holds for all larger ones.

    least: look among whole numbers, from this one on.
    """
    while not enough(high):
        high *= 2
        if high > 1e15:
            return math.inf
    low = 0.0 if least is None else least - 1
    while high - low > (1 if least is not None else 1e-12 * high):
        middle = (low + high) // 2 if least is not None else (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
