"""From a sweep's runs to fits, verdicts and what to say of them: numbers in, numbers out.

Works on what the JSON file holds, so that a report can be made again from it alone. A prediction is fitted by
the same curve at the same contexts as the measurement: so a slope stands beside a slope, whatever the model.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from .fit import Estimate, Fit, Verdict, line, mean, parabola, ratio, verdict

FACTOR = 2.0  # a bound from bandwidth and peak is called right up to this many times the time
BELOW = 0.8  # and not below this: what is faster than a bound shows that the bound is wrong
SAME = {"low": 0.8, "high": 1.25, "expected": 1.0}  # two times that should be one, within a quarter
NOT_PREDICTED = "no prediction: neither the device nor the model's shape is known (--hardware, --spec)"
CLAIMS = (
    ("itl", "slope", None, "A step takes longer the more tokens are cached"),
    ("itl", "slope", 1 / FACTOR, 
     "Each cached token adds the time of reading its bytes, within a factor of 2"),
    ("itl", "intercept", BELOW,
     "With an empty cache a step takes as long as reading the weights, at most twice that"),
    ("ttft", "curvature", None, "TTFT grows faster than the prompt"),
    ("ttft", "slope", BELOW,
     "Each token of a short prompt takes as long as its multiplications, at most twice that"),
)  # fmt: skip


def conclude(sweep: str, entry: Mapping) -> dict:
    """{"fits", "verdicts", "table"} of one sweep's entry in a study."""
    kind = {"context": _context, "batch": _batch, "prefix": _prefix}.get(sweep, _pair)
    fits, verdicts, more = kind(entry)
    return {
        "fits": {name: fit and fit.to_dict() for name, fit in fits.items()},
        "verdicts": [v.to_dict() for v in verdicts],
        "table": _table(entry),
        **more,
        "planned": len(entry["plan"]),
        "measured": len(entry["runs"]),
    }


def _context(entry: Mapping):
    itl, ttft = _series(entry, "itl_s"), _series(entry, "ttft_s")
    steps = partial(line, relative=True)
    fits = {
        "itl": _fit(steps, *itl[:2]), "itl predicted": _fit(steps, *itl[2:]),
        "ttft": _fit(parabola, *ttft[:2]), "ttft predicted": _fit(parabola, *ttft[2:]),
    }  # fmt: skip
    contexts = {"itl": itl[0], "ttft": ttft[0]}
    return fits, [_judged(fits, contexts[what], what, *claim) for what, *claim in CLAIMS], {}


def _judged(fits: dict, contexts: list, what: str, part: str, low: float | None, claim: str) -> Verdict:
    """Whether a coefficient is `low` to FACTOR times that predicted; without low, whether above 0."""
    fit, predicted = fits[what], fits[f"{what} predicted"]
    band = {"low": 0.0} if low is None else {"low": low, "high": FACTOR}
    if fit is None:
        return verdict(claim, None, **band, missing=f"too few contexts with a measured {what.upper()}")
    guess = predicted and predicted[part].value
    band |= {"runs": len(contexts), "contexts": None if part == "intercept" else contexts}
    if low is None:
        unit = {"slope": "ns per token", "curvature": "ns per token squared"}[part]
        expected = None if guess is None else guess * 1e9
        return verdict(claim, fit[part].scaled(1e9), **band, expected=expected, unit=unit)
    if guess is None or not guess > 0:
        missing = NOT_PREDICTED if guess is None else "predicted to be 0"
        return verdict(claim, None, low=low, high=FACTOR, missing=missing)
    return verdict(claim, fit[part].scaled(1 / guess), **band, expected=1.0, unit="times the prediction")


def _batch(entry: Mapping):
    """Throughput as a multiple of that at the smallest batch, by rounds."""
    first, *more = sorted({p["batch"] for p in entry["plan"]})
    verdicts, multiples, left = [], {}, None
    for b in more:
        multiple, runs, expected = _ratio(entry, "tokens_per_second", first, b, key="batch")
        if multiple is None:
            continue
        multiples[str(b)] = multiple.to_dict()
        if left is None and multiple.high < BELOW * b / first:
            left = b
        if b == more[-1]:
            verdicts = [
                verdict(
                    f"Reading the weights once for {b} sequences instead of {first} pays as predicted",
                    multiple.scaled(1 / expected) if expected else None, low=1 / FACTOR, high=FACTOR,
                    expected=1.0, runs=runs, missing=NOT_PREDICTED, unit="times the predicted gain",
                ),
                verdict(
                    f"Batch {b} still follows the bandwidth line: {b / first:g} times the throughput "
                    f"of {first}",
                    multiple.scaled(first / b), low=BELOW, expected=expected and expected * first / b,
                    runs=runs, unit="of the line",
                ),
            ]  # fmt: skip
    return {}, verdicts, {"multiples": multiples, "left_the_line_at_batch": left}


def _prefix(entry: Mapping):
    ttft, ttfts, expected = _ratio(entry, "ttft_s", "cold", "warm")
    itl, itls, _ = _ratio(entry, "itl_s", "cold", "warm")
    verdicts = [
        verdict(
            "A known prefix saves at least half of what it should of the TTFT", ttft,
            high=0.5 if expected is None else (1 + expected) / 2, expected=expected, runs=ttfts,
            unit="of the cold TTFT",
        ),
        verdict(
            "A known prefix changes the time per token by less than a quarter", itl,
            **SAME, runs=itls, unit="of the cold ITL",
        ),
    ]  # fmt: skip
    return {}, verdicts, {}


def _pair(entry: Mapping):
    """Two variants at each context and batch: how many times the first one's step the second one's takes."""
    first, second = entry["variants"]
    verdicts = []
    for n, b in sorted({(p["context"], p["batch"]) for p in entry["plan"]}):
        found, runs, expected = _ratio(entry, "itl_s", first, second, context=n, batch=b)
        verdicts.append(
            verdict(
                f"{n:,} tokens, batch {b}: a step with {second} is to one with {first} as predicted",
                found.scaled(1 / expected) if found and expected else None, **SAME, runs=runs,
                unit=f"times the predicted {expected:.3g}" if expected else "",
                missing=NOT_PREDICTED if found else "nothing was measured",
            )
        )  # fmt: skip
    return {}, verdicts, {}


# Looking up -------------------------------------------------------------------------------------------------


def _groups(entry: Mapping) -> dict[str, dict]:
    """One planned point for each group, by group."""
    found: dict[str, dict] = {}
    for p in entry["plan"]:
        found.setdefault(p["group"], p)
    return found


def _by_round(entry: Mapping, group: str, field: str) -> dict[int, float]:
    found = {}
    for p in entry["plan"]:
        run = entry["runs"].get(p["id"])
        if p["group"] == group and run and run[field] is not None:
            found[p["round"]] = run[field]
    return found


def _series(entry: Mapping, field: str) -> tuple[list, list, list, list]:
    """(contexts, measured, contexts, predicted): of every run, and of every group that has a run."""
    x, y, px, py, seen = [], [], [], [], set()
    for p in entry["plan"]:
        run = entry["runs"].get(p["id"])
        if not run or run[field] is None:
            continue
        x.append(_place(p, run, "context"))
        y.append(run[field])
        predicted = entry["predicted"].get(p["group"], {}).get(field)
        if predicted is not None and p["group"] not in seen:
            seen.add(p["group"])
            px.append(p["context"])
            py.append(predicted)
    return x, y, px, py


def _place(p: Mapping, run: Mapping, x: str) -> int:
    """Where a run stands on an axis: a context is the one that really was in the cache."""
    return run["context"] if x == "context" and run["context"] is not None else p[x]


Pairs = Sequence[tuple[float, float]]


def series(
    entry: Mapping, x: str, field: str, scale: float
) -> tuple[dict[str, Pairs], dict[str, Pairs], Pairs]:
    """(measured by variant, predicted by variant or nothing, points on the fitted curve) for a chart."""
    measured: dict[str, list] = {}
    predicted: dict[str, set] = {}
    for p in entry["plan"]:
        run, guess = entry["runs"].get(p["id"]), entry["predicted"].get(p["group"], {}).get(field)
        if run and run[field] is not None:
            measured.setdefault(p["variant"], []).append((_place(p, run, x), run[field] * scale))
        if guess is not None:
            predicted.setdefault(p["variant"], set()).add((p[x], guess * scale))
    measured = {v: measured[v] for v in entry["variants"] if v in measured}
    dashed = {v: sorted(predicted.get(v, ())) for v in measured}
    fit, fitted = (entry.get("result", {}).get("fits") or {}).get(field.removesuffix("_s")), []
    if fit and measured:  # from the first to the last place where something was measured
        low, *_, high = sorted(x for pairs in measured.values() for x, _ in pairs)
        powers = [fit["coefficients"].get(k, {}).get("value", 0) for k in ("intercept", "slope", "curvature")]
        places = [low + (high - low) * i / 24 for i in range(25)]
        fitted = [(at, scale * sum(c * at**i for i, c in enumerate(powers))) for at in places]
    return measured, dashed if any(dashed.values()) else {}, fitted


def _fit(curve: Callable[..., Fit], x: list, y: list) -> Fit | None:
    try:
        return curve(x, y)
    except ValueError:  # too few points, or of too few contexts
        return None


def _ratio(
    entry: Mapping, field: str, first, second, *, key: str = "variant", **where
) -> tuple[Estimate | None, int, float | None]:
    """(second / first in the rounds that have both, how many these are, the ratio predicted)."""
    runs: dict = {first: {}, second: {}}
    predicted = {}
    for group, p in _groups(entry).items():
        if p[key] in runs and all(p[k] == v for k, v in where.items()):
            runs[p[key]] |= _by_round(entry, group, field)
            predicted[p[key]] = entry["predicted"].get(group, {}).get(field)
    rounds = sorted(runs[first].keys() & runs[second].keys())
    found = ratio(*([runs[which][r] for r in rounds] for which in (second, first))) if rounds else None
    sure = predicted.get(first) and predicted.get(second)
    return found, len(rounds), predicted[second] / predicted[first] if sure else None


def _table(entry: Mapping) -> list[dict]:
    """A row per group: means with intervals, beside the prediction."""
    rows = []
    for group, p in _groups(entry).items():
        row = {k: p[k] for k in ("variant", "context", "batch", "prompt")}
        row["predicted"] = entry["predicted"].get(group)
        for field in ("ttft_s", "itl_s", "tokens_per_second"):
            values = list(_by_round(entry, group, field).values())
            row[field] = mean(values).to_dict() if values else None
            row["runs"] = max(row.get("runs", 0), len(values))
        rows.append(row)
    return sorted(rows, key=lambda r: (r["context"], r["batch"], r["variant"]))
