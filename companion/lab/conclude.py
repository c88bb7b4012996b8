"""From a sweep's runs to fits, verdicts and what to say of them: numbers in, numbers out.

Works on what the JSON file holds, so that a report can be made again from it alone. A prediction is fitted by
the same curve at the same contexts as the measurement: so a slope stands beside a slope, whatever the model.
"""

from collections.abc import Callable, Mapping
from functools import partial

from .fit import Fit, line, mean, parabola, ratio
from .verdicts import Verdict, verdict

FACTOR = 2.0  # a bound from bandwidth and peak is called right up to this many times the time
BELOW = 0.8  # and not below this: what is faster than a bound shows that the bound is wrong
NOT_PREDICTED = "no prediction: neither the device nor the model's shape is known (--hardware, --spec)"


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
    runs, contexts = len(itl[0]), itl[0]
    verdicts = [
        _sign("A step takes longer the more tokens are cached", fits, "itl", "slope", runs, contexts),
        _against(
            "Each cached token adds the time of reading its bytes, within a factor of 2",
            fits, "itl", "slope", runs, contexts, 1 / FACTOR,
        ),
        _against(
            "With an empty cache a step takes as long as reading the weights, at most twice that",
            fits, "itl", "intercept", runs, contexts, BELOW,
        ),
        _sign("TTFT grows faster than the prompt", fits, "ttft", "curvature", len(ttft[0]), ttft[0]),
        _against(
            "Each token of a short prompt takes as long as its multiplications, at most twice that",
            fits, "ttft", "slope", len(ttft[0]), ttft[0], BELOW,
        ),
    ]  # fmt: skip
    return fits, verdicts, {}


def _batch(entry: Mapping):
    """Throughput as a multiple of that at the smallest batch, by rounds."""
    groups = _groups(entry)
    batches = sorted({p["batch"] for p in groups.values()})
    rates = {p["batch"]: _by_round(entry, g, "tokens_per_second") for g, p in groups.items()}
    predicted = {
        p["batch"]: entry["predicted"].get(g, {}).get("tokens_per_second") for g, p in groups.items()
    }
    verdicts, multiples, first, left = [], {}, batches[0], None
    for b in batches[1:]:
        shared = sorted(rates[first].keys() & rates[b].keys())
        if not shared:
            continue
        multiple = ratio([rates[b][r] for r in shared], [rates[first][r] for r in shared])
        multiples[str(b)] = multiple.to_dict()
        if left is None and multiple.high < BELOW * b / first:
            left = b
        if b == batches[-1]:
            sure = predicted[first] and predicted[b]
            expected = predicted[b] / predicted[first] if sure else None
            v = verdict(
                f"Reading the weights once for {b} sequences instead of {first} pays as predicted",
                multiple.scaled(1 / expected) if sure else None,
                low=1 / FACTOR, high=FACTOR, expected=1.0, runs=len(shared), missing=NOT_PREDICTED,
                unit="times the predicted gain",
            )  # fmt: skip
            verdicts.append(v)
            v = verdict(
                f"Batch {b} still follows the bandwidth line: {b / first:g} times the throughput of {first}",
                multiple.scaled(first / b), low=BELOW, expected=expected and expected * first / b,
                runs=len(shared), unit="of the line",
            )  # fmt: skip
            verdicts.append(v)
    return {}, verdicts, {"multiples": multiples, "left_the_line_at_batch": left}


def _prefix(entry: Mapping):
    ttft, itl = _pairs(entry, "ttft_s", "cold", "warm"), _pairs(entry, "itl_s", "cold", "warm")
    expected = _predicted_ratio(entry, "ttft_s", "cold", "warm")
    claim = "A known prefix saves at least half of what it should of the TTFT"
    most = 0.5 if expected is None else (1 + expected) / 2
    verdicts = [
        verdict(
            claim, ratio(*ttft) if ttft else None, high=most, expected=expected,
            runs=len(ttft[0]) if ttft else 0, unit="of the cold TTFT",
        ),
        verdict(
            "A known prefix changes the time per token by less than a quarter",
            ratio(*itl) if itl else None, low=0.8, high=1.25, expected=1.0,
            runs=len(itl[0]) if itl else 0, unit="of the cold ITL",
        ),
    ]  # fmt: skip
    return {}, verdicts, {}


def _pair(entry: Mapping):
    """Two variants at each context and batch: how many times the first one's step the second one's takes."""
    groups = list(_groups(entry).values())
    first, second = entry["variants"]
    verdicts = []
    for n, b in sorted({(p["context"], p["batch"]) for p in groups}):
        here = {"context": n, "batch": b}
        pairs = _pairs(entry, "itl_s", first, second, **here)
        expected = _predicted_ratio(entry, "itl_s", first, second, **here)
        verdicts.append(
            verdict(
                f"{n:,} tokens, batch {b}: a step with {second} is to one with {first} as predicted",
                ratio(*pairs).scaled(1 / expected) if pairs and expected else None,
                low=0.8, high=1.25, expected=1.0, runs=len(pairs[0]) if pairs else 0,
                unit=f"times the predicted {expected:.3g}" if expected else "",
                missing=NOT_PREDICTED if pairs else "nothing was measured",
            )
        )  # fmt: skip
    return {}, verdicts, {}


# Claims -----------------------------------------------------------------------------------------------------


def _sign(claim: str, fits: dict, what: str, part: str, runs: int, contexts: list) -> Verdict:
    fit, predicted = fits[what], fits[f"{what} predicted"]
    if fit is None:
        return verdict(claim, None, low=0.0, missing=f"too few contexts with a measured {what.upper()}")
    expected = predicted[part].value * 1e9 if predicted else None
    unit = {"slope": "ns per token", "curvature": "ns per token squared"}[part]
    options = {"expected": expected, "runs": runs, "contexts": contexts, "unit": unit}
    return verdict(claim, fit[part].scaled(1e9), low=0.0, **options)


def _against(claim, fits, what, part, runs, contexts, low) -> Verdict:
    fit, predicted = fits[what], fits[f"{what} predicted"]
    band = {"low": low, "high": FACTOR}
    if fit is None:
        return verdict(claim, None, **band, missing=f"too few contexts with a measured {what.upper()}")
    if predicted is None or not predicted[part].value > 0:
        return verdict(
            claim, None, **band, missing=NOT_PREDICTED if predicted is None else "predicted to be 0"
        )
    return verdict(
        claim, fit[part].scaled(1 / predicted[part].value), **band, expected=1.0, runs=runs,
        contexts=contexts if part == "slope" else None, unit="times the prediction",
    )  # fmt: skip


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
        x.append(run["context"] if run["context"] is not None else p["context"])
        y.append(run[field])
        predicted = entry["predicted"].get(p["group"], {}).get(field)
        if predicted is not None and p["group"] not in seen:
            seen.add(p["group"])
            px.append(p["context"])
            py.append(predicted)
    return x, y, px, py


def _fit(curve: Callable[..., Fit], x: list, y: list) -> Fit | None:
    try:
        return curve(x, y)
    except ValueError:  # too few points, or of too few contexts
        return None


def _pairs(entry: Mapping, field: str, first: str, second: str, **where) -> tuple[list, list] | None:
    """Values of the second and of the first variant, in the rounds that have both."""
    by_variant: dict[str, dict] = {first: {}, second: {}}
    for group, p in _groups(entry).items():
        if all(p[k] == v for k, v in where.items()):
            by_variant[p["variant"]] |= _by_round(entry, group, field)
    rounds = sorted(by_variant[first].keys() & by_variant[second].keys())
    if not rounds:
        return None
    return [by_variant[second][r] for r in rounds], [by_variant[first][r] for r in rounds]


def _predicted_ratio(entry: Mapping, field: str, first: str, second: str, **where) -> float | None:
    predicted = {}
    for group, p in _groups(entry).items():
        if all(p[k] == v for k, v in where.items()):
            predicted[p["variant"]] = entry["predicted"].get(group, {}).get(field)
    return predicted[second] / predicted[first] if predicted.get(first) and predicted.get(second) else None


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
