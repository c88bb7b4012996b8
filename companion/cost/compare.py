"""Two sizings side by side: each figure with its unit, and how many times the second is the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .sizing import Sizing

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
