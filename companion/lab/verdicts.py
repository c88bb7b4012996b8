"""Whether a claim holds here: an interval against the band in which the claim says the number lies.

    holds here           the whole interval lies in the band
    does not hold here   the whole interval lies outside
    cannot be told       anything else; then, how many runs or how long a context could tell

With intervals at 95 % a verdict of the first or the second kind is wrong in at most 5 of 100 sweeps, and in
2.5 where only one edge of the band is near: it takes an interval that misses the truth on that side.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..stats import t_quantile
from .fit import Estimate

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
    low, high   the band that the claim puts it in; None for no edge. At least one is given
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
    below = low is not None and estimate.high < low
    above = high is not None and estimate.low > high
    text = f"{_number(estimate.value)}{_unit(unit)} ({_between(*interval)})"
    beside = "" if expected is None else f", predicted {_number(expected)}"
    edges = f"the claim says {_between(low, high)}{beside}"
    if below or above:
        return Verdict(claim, FAILS, f"{text}; {edges}", **found)
    if (low is None or estimate.low > low) and (high is None or estimate.high < high):
        return Verdict(claim, HOLDS, f"{text}; {edges}", **found)
    needed = _runs_needed(estimate, low, high, expected, runs)
    longer = None if contexts is None else _context_needed(estimate, low, high, expected, contexts)
    could = [] if needed is None else [f"{needed:,} runs instead of {runs:,}"]
    if longer is not None:
        could.append(f"a context of {longer:,} tokens instead of {max(contexts):,}")
    hint = f"at least {' or '.join(could)} could tell" if could else "no feasible number of runs could tell"
    return Verdict(
        claim, UNTOLD, f"{text}; {edges}; {hint}", **found, runs_needed=needed, context_needed=longer
    )


def _distance(estimate: Estimate, low, high, expected) -> float:
    """How wide half an interval may be to decide, where the estimate is or where the prediction is."""
    edges = [e for e in (low, high) if e is not None]
    places = [estimate.value] + ([] if expected is None else [expected])
    return max(min(abs(place - edge) for edge in edges) for place in places)


def _runs_needed(estimate: Estimate, low, high, expected, runs: int) -> int | None:
    distance = _distance(estimate, low, high, expected)
    lost = max(1, runs - estimate.degrees)  # runs that the coefficients themselves use up
    if not estimate.degrees:
        return max(runs, lost) + 2  # the scatter is unknown: the least that shows any
    if not distance:
        return None
    p = 0.5 + estimate.confidence / 2

    def decides(n: int) -> bool:
        return t_quantile(p, n - lost) * estimate.stderr * math.sqrt(runs / n) < distance

    first, last = runs, runs + 1
    while not decides(last):
        first, last = last, 2 * last
        if first > MOST:
            return None
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (first, middle) if decides(middle) else (middle, last)
    return last


def _context_needed(estimate: Estimate, low, high, expected, contexts: Sequence[int]) -> int | None:
    """A slope's interval shrinks as the contexts spread; a fifth is added to be on the safe side of noise."""
    distance, half = _distance(estimate, low, high, expected), (estimate.high - estimate.low) / 2
    if not distance or math.isinf(half):
        return None
    shortest, longest = min(contexts), max(contexts)
    factor = 1.2 * max(1.0, half / distance)
    return None if factor > 1e4 else math.ceil(shortest + (longest - shortest) * factor)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


def _between(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "no interval"
    if low is None:
        return f"below {_number(high)}"
    return f"above {_number(low)}" if high is None else f"{_number(low)} to {_number(high)}"
