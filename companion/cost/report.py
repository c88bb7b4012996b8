"""A sizing for people: bytes with GiB and GB beside them, what follows, what would help; two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .answer import Lever, Sizing
from .engines import vllm_command

_BYTES, _COUNT, _SECONDS, _RATE, _TEXT = "bytes", "count", "seconds", "tokens/s", "text"
# label, field of Sizing, unit
ROWS = (
    ("model", "model", _TEXT),
    ("hardware", "hardware", _TEXT),
    ("devices", "devices", _COUNT),
    ("memory of all", "memory", _BYTES),
    ("weights", "weights_bytes", _BYTES),
    ("cache per token", "kv_bytes_per_token", _BYTES),
    ("cache of the batch", "kv_allocated_bytes", _BYTES),
    ("total, copies included", "total_bytes", _BYTES),
    ("fits", "fits", _TEXT),
    ("users at this context", "max_batch", _COUNT),
    ("longest context", "max_context", _COUNT),
    ("decode step", "decode_seconds", _SECONDS),
    ("decode", "decode_tokens_per_second", _RATE),
    ("first token", "ttft_seconds", _SECONDS),
    ("bound by", "bound_by", _TEXT),
)


@dataclass(frozen=True)
class Comparison:
    """`a` and `b`; `ratios` by field: b over a, None where one of them has no figure or a is 0."""

    a: Sizing
    b: Sizing

    @property
    def ratios(self) -> dict[str, float | None]:
        """By field: b over a."""
        return {name: _ratio(value(self.a, name), value(self.b, name)) for _, name, u in ROWS if u != _TEXT}

    def to_dict(self) -> dict:
        return {"a": self.a.to_dict(), "b": self.b.to_dict(), "ratios": self.ratios}


def value(sizing: Sizing, name: str) -> Any:
    """A field of a sizing, or the memory of its devices together."""
    return sizing.device_bytes * sizing.devices if name == "memory" else getattr(sizing, name)


def _ratio(a: Any, b: Any) -> float | None:
    return b / a if a and b is not None else None


def table(comparison: Comparison) -> str:
    """For people: one figure a line, bytes with GiB and GB."""
    rows = [("", "a", "b", "b / a")]
    ratios = comparison.ratios
    for label, name, unit in ROWS:
        a, b = (show(value(s, name), unit, name) for s in (comparison.a, comparison.b))
        ratio = ratios.get(name)
        rows.append((label, a, b, "" if ratio is None else f"{ratio:,.2f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  " + "  ".join(f"{x:>{w}}" for x, w in zip(row[1:], widths[1:]))
        for row in rows
    ]
    for letter, sizing in (("a", comparison.a), ("b", comparison.b)):
        lines += [f"warning: {letter}: {note}" for note in sizing.warnings]
    return "\n".join(line.rstrip() for line in lines)


def show(figure: Any, unit: str, name: str = "") -> str:
    """A figure with its unit."""
    if figure is None:
        return "unbounded" if name == "max_context" else "-"
    if unit == _BYTES:
        if figure < 2**20:
            return f"{figure:,} B ({figure / 1024:,.1f} KiB)"
        return f"{figure / 2**30:,.2f} GiB {figure / 1e9:,.2f} GB"
    if unit == _COUNT:
        return f"{figure:,} tokens" if name == "max_context" else f"{figure:,}"
    if unit == _SECONDS:
        return duration(figure)
    if unit == _RATE:
        return f"{figure:,.0f} tokens/s"
    return {True: "yes", False: "no"}.get(figure, figure) if isinstance(figure, bool) else str(figure)


def duration(seconds: float) -> str:
    """Seconds in a unit that reads well."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} us"


_BAR = 48


def report(sizing: Sizing) -> str:
    """The human-readable answer: bytes, GiB and GB side by side, then what follows from them."""
    memory = sizing.device_bytes * sizing.devices
    lines = [
        f"{sizing.model} on {sizing.devices} x {sizing.hardware}: "
        f"{sizing.batch:,} {'sequence' if sizing.batch == 1 else 'sequences'} of {sizing.context:,} tokens",
        "",
        _row("weights", sizing.weights, sizing.weights_bytes),
        _row("cache", sizing.kv, sizing.kv_bytes),
    ]
    pages = sizing.kv_allocated_bytes - sizing.kv_bytes
    if pages:
        lines.append(_row("pages", sizing.pages, pages))
    stated = sizing.activation_bytes + sizing.overhead_bytes
    copies = sizing.total_bytes - sizing.weights_bytes - sizing.kv_allocated_bytes - stated
    if sizing.tensor is None:  # one row, as far as it is more than rounding
        stated, copies = stated + copies, 0
    if copies:
        lines.append(_row("copies", "", copies))
    if stated > sizing.devices:
        lines.append(_row("other", "", stated))
    lines += [_row("total", "", sizing.total_bytes), _row("memory", "", memory), _bar(sizing), ""]
    growth, every = sizing.kv_growth_bytes_per_token, sizing.kv_bytes_per_token
    grows = f", {growth:,} B once the windows are full" if growth != every else ""
    lines.append(f"cache per token  {every:,} B ({every / 1024:,.1f} KiB){grows}")
    longest = "unbounded" if sizing.max_context is None else f"{sizing.max_context:,} tokens"
    limit = f" (the model's limit: {sizing.model_max_context:,})" if sizing.model_max_context else ""
    lines.append(f"fits             {'yes' if sizing.fits else 'no'}")
    lines.append(f"users            {sizing.max_batch:,} at {sizing.context:,} tokens")
    lines.append(f"longest context  {longest} at batch {sizing.batch:,}{limit}")
    if sizing.fits:
        lines.append(
            f"decode           at most {sizing.decode_tokens_per_second:,.0f} tokens/s, "
            f"{duration(sizing.decode_seconds)} a step; bound by {sizing.bound_by}"
        )
        lines.append(
            f"first token      at least {duration(sizing.ttft_seconds)} for {sizing.context:,} prompt tokens"
        )
        if sizing.communication_seconds:
            lines.append(f"between devices  {duration(sizing.communication_seconds)} of each step")
        lines += ["", vllm_command(sizing)]
    lines += [f"warning: {note}" for note in sizing.warnings]
    return "\n".join(lines)


def details(
    sizing: Sizing,
    crossings: dict[str, int | None],
    better: Sequence[Lever],
    notes: Sequence[str] = (),
    plot: str | None = None,
) -> str:
    """What the command prints below the answer."""
    lines = [""]
    cache, full = crossings["cache_equals_weights"], crossings["full"]
    equal = "never" if cache is None else f"at {cache:,} tokens per sequence"
    lines.append(f"cache = weights  {equal}")
    end = (
        "never"
        if full is None
        else "already without a token"
        if full == 1
        else f"at {full:,} tokens per sequence"
    )
    lines.append(f"memory full      {end}")
    able = [lever for lever in better if lever.max_batch]
    if able:
        lines += ["", "what each change would buy, by tokens/s at the most users that fit:", *_levers(able)]
    elif not sizing.max_batch:
        lines += ["", "no one change makes it fit"]
    lines += ["", "rests on:"] + [f"  {note}" for note in (*notes, *sizing.assumptions)]
    if plot:
        lines += ["", f"wrote {plot}"]
    return "\n".join(lines)


def _levers(better: Sequence[Lever]) -> list[str]:
    rows = [("", "gain", "tokens/s", "users", "longest context", "step now")]
    for lever in better:
        longest = "unbounded" if lever.max_context is None else f"{lever.max_context:,}"
        step = "-" if lever.decode_seconds is None else duration(lever.decode_seconds)
        gain = "now fits" if lever.gain is None and lever.max_batch else "-"
        if lever.gain is not None:
            gain = f"{lever.gain:,.2f} x"
        rows.append((lever.name, gain, f"{lever.throughput:,.0f}", f"{lever.max_batch:,}", longest, step))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return [
        f"  {row[0]:<{widths[0]}}  " + "  ".join(f"{x:>{w}}" for x, w in zip(row[1:], widths[1:]))
        for row in rows
    ]


def _row(label: str, note: str, count: int) -> str:
    return f"{label:<10} {note:<9} {count:>21,} B {count / 2**30:>10,.2f} GiB {count / 1e9:>10,.2f} GB"


def _bar(sizing: Sizing) -> str:
    """Weights as #, cache as =, free memory as dots, on the scale of the larger of need and memory."""
    memory = sizing.device_bytes * sizing.devices
    scale = _BAR / max(memory, sizing.total_bytes)
    weights = round(sizing.weights_bytes * scale)
    used = max(weights, round(sizing.total_bytes * scale))
    bar = ("#" * weights + "=" * (used - weights)).ljust(_BAR, ".")
    if not sizing.fits:
        edge = round(memory * scale)
        bar = bar[:edge] + "|" + bar[edge:]
    return f"[{bar}] {sizing.total_bytes / memory:.0%} of the memory   # weights  = cache"
