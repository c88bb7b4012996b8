"""A study as one HTML page that asks nothing of anyone: no script, no font, no picture from elsewhere."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

from .fit import chart
from .verdicts import FAILS, HOLDS, UNTOLD

TITLES = {
    "context": "Time to the first token and time per token, against context",
    "batch": "Throughput against batch",
    "prefix": "A prefix that is known, and one that is not",
    "kv": "Precision of the cache",
    "weights": "Precision of the weights, the cache as it was",
    "heads": "Grouped heads against full heads, random weights",
    "moe": "Dense against a mixture of experts of as many active parameters, random weights",
}
PROTOCOL = (
    "The prediction of each sweep was made by companion.cost and written down before its first run.",
    "Points were taken in rounds, each shuffled, so that a slow minute adds scatter and not a slope.",
    "What happens once (loading, the first pass, a connection) is in no time. TTFT ends with the first text, "
    "not with headers or a role. A time per token is the median over the steps of a run on this machine, and "
    "the mean between first and last text of an answer from an endpoint.",
    "Intervals are Student's t at 95 %. A claim holds here if its whole interval lies in the claim's band, "
    "does not if it lies outside, and otherwise cannot be told: at most 5 of 100 such verdicts are wrong by "
    "chance.",
    "A prediction is a bound, from bytes and products alone. A time well above it shows what else costs "
    "time; a time below it shows that the bound's inputs are wrong.",
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--soft:#5c5c5c;--line:#d8d8d8;--back:#fff;--plate:#f5f5f3;
--yes:#0b6b3a;--no:#a3201a;--open:#7a5b00;--s0:#1d3fc4;--s1:#b8420a;--s2:#6d0f6d}
@media(prefers-color-scheme:dark){:root{--ink:#ececec;--soft:#a8a8a8;--line:#444;--back:#161616;
--plate:#202020;--yes:#5fd394;--no:#ff8f86;--open:#e6c35c;--s0:#8fa6ff;--s1:#ff9b66;--s2:#e08be0}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:60rem;
margin:2rem auto;padding:0 1rem;overflow-wrap:break-word}
h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.2rem;line-height:1.3;margin-top:2.5rem}
.soft,small{color:var(--soft)}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.5rem 0}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600}td.n,th.n{text-align:right}.verdicts table{width:100%}
.wide:not(.verdicts) :is(th,td){white-space:nowrap}.wide td:last-child{white-space:normal;min-width:10rem}
.yes{color:var(--yes)}.no{color:var(--no)}.open{color:var(--open)}.yes,.no,.open{font-weight:600;white-space:nowrap}
figure{margin:.75rem 0;max-width:38rem}figcaption{color:var(--soft);font-size:.875rem}
svg{width:100%;background:var(--plate);border-radius:6px;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}.grid{stroke:var(--line);fill:none}
circle.s0{fill:var(--s0)}circle.s1{fill:var(--s1)}circle.s2{fill:var(--s2)}
.predicted,.fitted{fill:none;stroke-width:2}.predicted{stroke-dasharray:6 4}.fitted{stroke-width:1;opacity:.8}
path.s0{stroke:var(--s0)}path.s1{stroke:var(--s1)}path.s2{stroke:var(--s2)}
details{margin:.75rem 0}summary{cursor:pointer}
@media(max-width:40rem){svg text{font-size:17px}
.verdicts :is(table,tbody){display:block}.verdicts tr{display:flex;flex-direction:column;padding:.5rem 0;
border-bottom:1px solid var(--line)}.verdicts tr:first-child{display:none}.verdicts td{border:0;padding:0}
.verdicts td:nth-child(3){order:-1}.verdicts td:nth-child(4){color:var(--soft)}
.verdicts td:first-child{order:1;color:var(--soft)}.verdicts td:first-child::before{content:"sweep: "}}
"""


def report(study: Mapping) -> str:
    """The page, from what a study's JSON file holds (`companion.lab.studies.read`)."""
    target, sweeps = study.get("target", {}), study.get("sweeps", {})
    what = _subject(target)
    parts = [
        f"<h1>What a token costs: {escape(str(what))}</h1>",
        f'<p class="soft">{_facts(study)}</p>',
        "<h2>Verdicts</h2>",
        _verdicts(sweeps),
        _device(study),
        *[_sweep(name, entry) for name, entry in sweeps.items()],
        "<h2>How this was measured, and how to read it</h2>",
        "<ul>" + "".join(f"<li>{escape(p)}</li>" for p in PROTOCOL) + "</ul>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>What a token costs: {escape(str(what))}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(p for p in parts if p)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _subject(target: Mapping) -> str:
    """What was measured, in a few words."""
    first = next(iter(target.get("variants", {}).values()), {})
    return target.get("model") or first.get("model") or target.get("kind", "a model")


def write_report(study: Mapping, path: str | Path) -> None:
    """The page into a file, whole or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    partial.write_text(report(study), encoding="utf-8")
    partial.replace(path)


def _facts(study: Mapping) -> str:
    facts = {"begun": _moment(study.get("begun"))}
    facts |= {k: v for k, v in study.get("target", {}).items() if not isinstance(v, (dict, list))}
    facts |= study.get("machine", {})
    return " · ".join(f"{escape(str(k))}: {escape(str(v))}" for k, v in facts.items() if v is not None)


def _moment(at: str | None) -> str | None:
    """2026-11-30T07:57:17+00:00 as a reader would write it."""
    return at and at.replace("T", " ", 1).replace("+00:00", " UTC")


def _grid(heads: str, rows: list[list], kind: str = "") -> str:
    """A table. heads: names between bars; one that ends in # stands over numbers. Cells are escaped.

    A column without a single value is left out. A table wider than the page scrolls by itself.
    """
    names = [h.strip() for h in heads.split("|")]
    if not rows:
        return ""
    used = [i for i in range(len(names)) if any(row[i] not in (None, "") for row in rows)]
    names, rows = [names[i] for i in used], [[row[i] for i in used] for row in rows]
    number = [" class=n" if n.endswith("#") else "" for n in names]
    top = "".join(f"<th{c}>{escape(n.rstrip('# '))}</th>" for n, c in zip(names, number))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{_cell(v)}</td>" for v, c in zip(row, number)) + "</tr>" for row in rows
    )
    return f'<div class="wide {kind}" tabindex="0"><table><tr>{top}</tr>{body}</table></div>'


def _cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        mark = {HOLDS: "yes", FAILS: "no", UNTOLD: "open"}.get(value)
        return f'<span class="{mark}">{value}</span>' if mark else escape(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _verdicts(sweeps: Mapping) -> str:
    found = [(name, v) for name, e in sweeps.items() for v in e.get("result", {}).get("verdicts", [])]
    if not found:
        return "<p>Nothing has been concluded yet.</p>"
    rows = [[name, v["claim"], v["outcome"], v["reason"]] for name, v in found]
    return _grid("Sweep | Claim | Verdict | Why", rows, "verdicts")


def _device(study: Mapping) -> str:
    device, probes = study.get("hardware"), study.get("probes") or []
    if not device:
        return "<h2>The device</h2><p>It is not known, so no times were predicted.</p>"
    rates = ", ".join(f"{k} {v / 1e9:,.1f} GFLOP/s" for k, v in device["flops"].items())
    text = f"Predicted with {device['name']}: {device['bandwidth'] / 1e9:,.1f} GB/s; {rates}."
    rows = []
    for p in probes:
        product = p["kind"] == "matmul"
        rate = "refused" if p["rate"] is None else p["rate"] / 1e9
        size = f"{p['size']:,} rows" if product else f"{p['size'] / 2**20:,.0f} MiB"
        spread = [p["median"] / 1e9, p["slowest"] / 1e9]
        rows.append([p["kind"], p["dtype"], rate, *spread, "GFLOP/s" if product else "GB/s", size, p["why"]])
    table = _grid("Probe | Format | Best # | Median # | Slowest # | Unit | Size | Refused because", rows)
    return f"<h2>The device</h2><p>{escape(text)}</p>{table}"


def _sweep(name: str, entry: Mapping) -> str:
    result = entry.get("result", {})
    out = [f'<h2 id="{escape(name)}">{escape(TITLES.get(name, name))}</h2>']
    done, planned = len(entry["runs"]), len(entry["plan"])
    state = f"{done} of {planned} runs. Predicted {_moment(entry['predicted_at'])}, before the first of them."
    if name == "batch" and result.get("multiples"):
        left = result.get("left_the_line_at_batch")
        state += (
            f" It leaves the bandwidth line at batch {left}." if left else " It stays on the bandwidth line."
        )
    out.append(f"<p>{escape(state)}</p>")
    if name == "batch":
        out.append(_chart(entry, "batch", "tokens_per_second", "sequences", "tokens/s", 1))
    else:
        out.append(_chart(entry, "context", "itl_s", "tokens in the cache", "ms per token", 1e3))
        out.append(_chart(entry, "context", "ttft_s", "tokens in the cache", "TTFT, ms", 1e3))
    out += [_fits(result.get("fits", {})), _table(result.get("table", [])), _faults(entry), _runs(entry)]
    return "\n".join(p for p in out if p)


def _chart(entry: Mapping, x: str, field: str, x_label: str, y_label: str, scale: float) -> str:
    measured: dict[str, list] = {}
    predicted: dict[str, set] = {}
    for p in entry["plan"]:
        run, guess = entry["runs"].get(p["id"]), entry["predicted"].get(p["group"], {}).get(field)
        if run and run[field] is not None:
            at = run["context"] if x == "context" and run["context"] is not None else p[x]
            measured.setdefault(p["variant"], []).append((at, run[field] * scale))
        if guess is not None:
            predicted.setdefault(p["variant"], set()).add((p[x], guess * scale))
    measured = {v: measured[v] for v in entry["variants"] if v in measured}
    dashed = {v: sorted(predicted.get(v, ())) for v in measured}
    dashed = dashed if any(dashed.values()) else {}
    fitted = _curve(entry, field, measured, scale)
    dashes, line = ", dashes predicted" if dashed else "", ", the thin line is fitted" if fitted else ""
    caption = f"Dots are measured{dashes}{line}."
    title = f"{y_label} against {x_label}. {caption}"
    picture = chart(title, x_label, y_label, measured, dashed, fitted)
    return picture and f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _curve(entry: Mapping, field: str, measured: Mapping, scale: float) -> list[tuple[float, float]]:
    """The fit of a series, from the first to the last place where it was measured."""
    fit = (entry.get("result", {}).get("fits") or {}).get(field.removesuffix("_s"))
    if not fit or not measured:
        return []
    low, *_, high = sorted(x for pairs in measured.values() for x, _ in pairs)
    at = [low + (high - low) * i / 24 for i in range(25)]
    powers = [fit["coefficients"].get(k, {}).get("value", 0) for k in ("intercept", "slope", "curvature")]
    return [(x, scale * sum(c * x**i for i, c in enumerate(powers))) for x in at]


_UNITS = {
    ("itl", "intercept"): (1e3, "ms"), ("itl", "slope"): (1e9, "ns per token"),
    ("ttft", "intercept"): (1e3, "ms"), ("ttft", "slope"): (1e3, "ms per token"),
    ("ttft", "curvature"): (1e9, "ns per token squared"),
}  # fmt: skip


def _fits(fits: Mapping) -> str:
    rows = []
    for what in ("itl", "ttft"):
        fit, predicted = fits.get(what), fits.get(f"{what} predicted")
        for part, e in (fit or {}).get("coefficients", {}).items():
            scale, unit = _UNITS[what, part]
            guess = predicted["coefficients"][part]["value"] if predicted else None
            ends = [None if e[k] is None else e[k] * scale for k in ("low", "high")]
            beside = [None, None] if not guess else [guess * scale, e["value"] / guess]
            rows.append([f"{what.upper()}, {part}", e["value"] * scale, *ends, *beside, unit])
    return _grid("Fit | Measured # | from # | to # | Predicted # | Ratio # | Unit", rows)


def _table(table: list) -> str:
    rows = []
    several = len({r["variant"] for r in table}) > 1
    for r in table:
        predicted, row = r["predicted"] or {}, [r["variant"] if several else None]
        row += [r["context"], r["batch"], r["runs"]]
        for field, scale in (("ttft_s", 1e3), ("itl_s", 1e3), ("tokens_per_second", 1.0)):
            e, guess = r[field], predicted.get(field)
            row += [None if e is None else e["value"] * scale, None if guess is None else guess * scale]
        rows.append(row)
    times = "TTFT, ms # | predicted # | ITL, ms # | predicted # | tokens/s # | predicted #"
    return _grid(f"Variant | Context # | Batch # | Runs # | {times}", rows)


def _faults(entry: Mapping) -> str:
    notes = {f"{escape(p)}: {escape(why)}" for p, why in entry["faults"].items()}
    notes |= {escape(run["note"]) for run in entry["runs"].values() if run["note"]}
    return "<ul>" + "".join(f"<li>{n}</li>" for n in sorted(notes)) + "</ul>" if notes else ""


def _runs(entry: Mapping) -> str:
    rows = []
    for p in entry["plan"]:
        if run := entry["runs"].get(p["id"]):
            times = [None if run[k] is None else run[k] * 1e3 for k in ("ttft_s", "itl_s")]
            rows.append([p["id"], *times, _moment(run["at"])])
    table = _grid("Run, in the order taken | TTFT, ms # | ITL, ms # | At", rows)
    return f"<details><summary>Every run</summary>{table}</details>" if rows else ""
