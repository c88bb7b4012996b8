"""A study as one HTML page that asks nothing of anyone: no script, no font, no picture from elsewhere."""

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

from .conclude import Pairs, series
from .fit import FAILS, HOLDS, UNTOLD
from .points import TITLES
from .studies import replace_file

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
    first = next(iter(target.get("variants", {}).values()), {})
    what = target.get("model") or first.get("model") or target.get("kind", "a model")
    title = f"What a token costs: {escape(str(what))}"
    parts = [
        f"<h1>{title}</h1>",
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
        '<meta http-equiv="Content-Security-Policy" '
        """content="default-src 'none'; style-src 'unsafe-inline'">"""
        f"<title>{title}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(p for p in parts if p)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def write_report(study: Mapping, path: str | Path) -> None:
    """The page into a file, whole or not at all."""
    replace_file(Path(path), report(study))


def _facts(study: Mapping) -> str:
    facts = {k: v for k, v in study.get("target", {}).items() if not isinstance(v, (dict, list))}
    facts = {"begun": _moment(study.get("begun"))} | facts | study.get("machine", {})
    return " · ".join(f"{escape(str(k))}: {escape(str(v))}" for k, v in facts.items() if v is not None)


def _moment(at: str | None) -> str | None:
    """2026-11-30T07:57:17+00:00 as a reader would write it."""
    return at and at.replace("T", " ", 1).replace("+00:00", " UTC")


def _grid(heads: str, rows: list[list], kind: str = "") -> str:
    """A table. heads: names between bars; one that ends in # stands over numbers. Cells are escaped.

    A column without a single value is left out. A table wider than the page scrolls by itself.
    """
    if not rows:
        return ""
    names = [h.strip() for h in heads.split("|")]
    used = [i for i in range(len(names)) if any(row[i] not in (None, "") for row in rows)]
    names, rows = [names[i] for i in used], [[row[i] for i in used] for row in rows]
    number = [" class=n" if n.endswith("#") else "" for n in names]

    def line(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{c}>{v}</{tag}>" for v, c in zip(cells, number)) + "</tr>"

    top = line("th", [escape(n.rstrip("# ")) for n in names])
    body = "".join(line("td", [_cell(v) for v in row]) for row in rows)
    return f'<div class="wide {kind}" tabindex="0"><table>{top}{body}</table></div>'


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


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
    rows = [[name, v["claim"], v["outcome"], v["reason"]] for name, v in found]
    table = _grid("Sweep | Claim | Verdict | Why", rows, "verdicts")
    return table or "<p>Nothing has been concluded yet.</p>"


def _device(study: Mapping) -> str:
    device, probes = study.get("hardware"), study.get("probes") or []
    if not device:
        return "<h2>The device</h2><p>It is not known, so no times were predicted.</p>"
    rates = ", ".join(f"{k} {v / 1e9:,.1f} GFLOP/s" for k, v in device["flops"].items())
    text = f"Predicted with {device['name']}: {device['bandwidth'] / 1e9:,.1f} GB/s; {rates}."
    rows = []
    for p in probes:
        found = ["refused" if p[k] is None else p[k] / 1e9 for k in ("rate", "median", "slowest")]
        units = ["GB/s", f"{p['size'] / 2**20:,.0f} MiB"]
        if p["kind"] == "matmul":
            units = ["GFLOP/s", f"{p['size']:,} rows"]
        rows.append([p["kind"], p["dtype"], *found, *units, p["why"]])
    table = _grid("Probe | Format | Best # | Median # | Slowest # | Unit | Size | Refused because", rows)
    return f"<h2>The device</h2><p>{escape(text)}</p>{table}"


def _sweep(name: str, entry: Mapping) -> str:
    result = entry.get("result", {})
    out = [f'<h2 id="{escape(name)}">{escape(TITLES.get(name, name))}</h2>']
    done, planned = len(entry["runs"]), len(entry["plan"])
    state = f"{done} of {planned} runs. Predicted {_moment(entry['predicted_at'])}, before the first of them."
    if result.get("multiples"):
        left = result.get("left_the_line_at_batch")
        where = f"leaves the bandwidth line at batch {left}" if left else "stays on the bandwidth line"
        state += f" It {where}."
    out.append(f"<p>{escape(state)}</p>")
    if name == "batch":
        out.append(_chart(entry, "batch", "tokens_per_second", "sequences", "tokens/s", 1))
    else:
        out.append(_chart(entry, "context", "itl_s", "tokens in the cache", "ms per token", 1e3))
        out.append(_chart(entry, "context", "ttft_s", "tokens in the cache", "TTFT, ms", 1e3))
    out += [_fits(result.get("fits", {})), _table(result.get("table", [])), _faults(entry), _runs(entry)]
    return "\n".join(p for p in out if p)


def _chart(entry: Mapping, x: str, field: str, x_label: str, y_label: str, scale: float) -> str:
    measured, dashed, fitted = series(entry, x, field, scale)
    dashes, line = ", dashes predicted" if dashed else "", ", the thin line is fitted" if fitted else ""
    caption = f"Dots are measured{dashes}{line}."
    picture = chart(f"{y_label} against {x_label}. {caption}", x_label, y_label, measured, dashed, fitted)
    return picture and f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


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
            found = [_scaled(e[k], scale) for k in ("value", "low", "high")]
            beside = [guess * scale, e["value"] / guess] if guess else [None, None]
            rows.append([f"{what.upper()}, {part}", *found, *beside, unit])
    return _grid("Fit | Measured # | from # | to # | Predicted # | Ratio # | Unit", rows)


def _table(table: list) -> str:
    rows, several = [], len({r["variant"] for r in table}) > 1
    for r in table:
        predicted, row = r["predicted"] or {}, [r["variant"] if several else None]
        row += [r["context"], r["batch"], r["runs"]]
        for field, scale in (("ttft_s", 1e3), ("itl_s", 1e3), ("tokens_per_second", 1.0)):
            row += [_scaled((r[field] or {}).get("value"), scale), _scaled(predicted.get(field), scale)]
        rows.append(row)
    times = "TTFT, ms # | predicted # | ITL, ms # | predicted # | tokens/s # | predicted #"
    return _grid(f"Variant | Context # | Batch # | Runs # | {times}", rows)


def _faults(entry: Mapping) -> str:
    notes = {f"{escape(p)}: {escape(why)}" for p, why in entry["faults"].items()}
    notes |= {escape(run["note"]) for run in entry["runs"].values() if run["note"]}
    return "<ul>" + "".join(f"<li>{n}</li>" for n in sorted(notes)) + "</ul>" if notes else ""


def _runs(entry: Mapping) -> str:
    rows = [
        [p["id"], _scaled(run["ttft_s"], 1e3), _scaled(run["itl_s"], 1e3), _moment(run["at"])]
        for p in entry["plan"]
        if (run := entry["runs"].get(p["id"]))
    ]
    table = _grid("Run, in the order taken | TTFT, ms # | ITL, ms # | At", rows)
    return f"<details><summary>Every run</summary>{table}</details>" if rows else ""


W, H = 560, 280


LEFT, RIGHT, TOP, BOTTOM = 72, 32, 34, 52  # room for labels of 17 units: on a phone they are drawn that large


def chart(
    title: str,
    x_label: str,
    y_label: str,
    measured: dict[str, Pairs],
    predicted: dict[str, Pairs],
    fitted: Pairs = (),
) -> str:
    """Dots for each measured series, a dashed line for each predicted one, a thin one for what was fitted.

    Both axes begin at 0; a fit that goes below is cut there. title: said to whoever cannot see it. Returns ""
    where nothing was measured.
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
        down = at(0, y)[1]
        out.append(f'<path class="grid" d="M{LEFT} {down}H{W - RIGHT}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{down + 4}" text-anchor="end">{_label(y)}</text>')
    for x in xs:
        across = at(x, 0)[0]
        out.append(f'<text x="{across}" y="{H - BOTTOM + 19}" text-anchor="middle">{_label(x)}</text>')
    middle = (LEFT + W - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{H - 9}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text x="10" y="20">{escape(y_label)}</text>')
    for i, (name, pairs) in enumerate(predicted.items()):
        path = "L".join("{} {}".format(*at(x, y)) for x, y in sorted(pairs))
        tip = f"{escape(name)}, predicted"
        out.append(f'<path class="predicted s{i % 3}" d="M{path}"><title>{tip}</title></path>')
    if fitted:
        path = "L".join("{} {}".format(*at(x, y)) for x, y in fitted)
        out.append(f'<path class="fitted s0" d="M{path}"><title>fitted</title></path>')
    for i, (name, pairs) in enumerate(measured.items()):
        for x, y in pairs:
            across, down = at(x, y)
            tip = f"<title>{escape(name)}: {_label(y)} at {_label(x)}</title>"
            out.append(f'<circle class="s{i % 3}" cx="{across}" cy="{down}" r="3.5">{tip}</circle>')
    for i, name in enumerate(measured if len(measured) > 1 else ()):
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
