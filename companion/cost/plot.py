"""The stacked budget as an SVG picture: weights below, cache on top, a line for the memory.

Colours and the order of the parts are those of the book's figures; light and dark follow the reader's
setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..checks import whole
from .answer import Sizing

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 76, 58
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; } .title { font-size: 15px; font-weight: 600; }
svg { background: #ffffff; }
.weights { fill: #3c50f0; } .cache { fill: #ec5a10; } .other { fill: #8c8c8c; }
.memory { stroke: #141414; stroke-width: 2; stroke-dasharray: 6 3; } .axis { stroke: #8c8c8c; }
.back { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117; } text { fill: #e6edf3; } .back { fill: #0d1117; } .memory { stroke: #e6edf3; } }
"""


@dataclass(frozen=True)
class Stack:
    """One bar: bytes over all devices, copies included, at one context."""

    context: int
    weights: int
    other: int
    cache: int
    memory: int

    @property
    def total(self) -> int:
        return self.weights + self.other + self.cache


def stack(sizing: Sizing) -> Stack:
    """The bar of one sizing."""
    n = sizing.devices
    weights, cache = sizing.weights_bytes_per_device * n, sizing.kv_bytes_per_device * n
    other = sizing.overhead_bytes + sizing.activation_bytes
    return Stack(sizing.context, weights, other, cache, sizing.device_bytes * n)


def contexts_for(asked: int, full: int | None) -> list[int]:
    """Powers of two around what was asked for and where the memory is full: five to seven bars."""
    end = 4096
    while end < max(asked, min(full or asked, 64 * asked)):
        end *= 2
    return [max(1, end >> shift) for shift in range(6, -1, -1) if end >> shift >= 1]


def svg(stacks: Sequence[Stack], *, title: str, subtitle: str = "", marks: Sequence[str] = ()) -> str:
    """The picture. marks: lines of text below the title, e.g. where the lines cross."""
    if not stacks:
        raise ValueError("stacks must hold at least one bar, got none")
    whole("memory", stacks[0].memory, owner="svg")
    top = 1.08 * max(max(s.memory, s.total) for s in stacks)
    plot_w, plot_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    slot, floor = plot_w / len(stacks), _HEIGHT - _BOTTOM
    bar = min(64.0, 0.64 * slot)

    def y(amount: float) -> float:
        return _TOP + plot_h * (1 - amount / top)

    description = "; ".join(
        f"{s.context:,} tokens: weights {s.weights / 1e9:.1f} GB, cache {s.cache / 1e9:.1f} GB, "
        f"total {s.total / 1e9:.1f} of {s.memory / 1e9:.1f} GB"
        for s in stacks
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title><desc id="desc">{escape(description)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
    ]
    for i, line in enumerate((subtitle, *marks)[:3]):
        out.append(f'<text x="{_LEFT}" y="{40 + 15 * i}">{escape(line)}</text>')
    for amount in _ticks(top):
        out.append(
            f'<line class="axis" x1="{_LEFT - 4}" x2="{_LEFT}" y1="{y(amount):.1f}" y2="{y(amount):.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y(amount) + 4:.1f}" text-anchor="end">{amount / 1e9:,.4g}</text>'
        )
    for i, s in enumerate(stacks):
        x, at = _LEFT + slot * (i + 0.5) - bar / 2, 0
        for part, amount in (("weights", s.weights), ("other", s.other), ("cache", s.cache)):
            if amount:
                out.append(
                    f'<rect class="{part}" data-bytes="{amount}" x="{x:.1f}" width="{bar:.1f}" '
                    f'y="{y(at + amount):.2f}" height="{plot_h * amount / top:.2f}"/>'
                )
            at += amount
        middle, above = x + bar / 2, y(at) - 5
        if above - 12 < y(s.memory) < above + 5:  # the line would strike the number through
            above = y(s.memory) - 5
        out.append(
            f'<text x="{middle:.1f}" y="{above:.1f}" text-anchor="middle">{s.total / 1e9:,.4g}</text>'
            f'<text x="{middle:.1f}" y="{floor + 16}" text-anchor="middle">{_tokens(s.context)}</text>'
        )
    limit = stacks[0].memory
    out += [
        f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="{_TOP}" y2="{floor}"/>',
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>',
        f'<line class="memory" data-bytes="{limit}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(limit):.2f}" '
        f'y2="{y(limit):.2f}"/>',
        f'<text x="{_LEFT - 52}" y="{_TOP - 8}">GB</text>',
        f'<text x="{_LEFT + plot_w / 2}" y="{_HEIGHT - 22}" text-anchor="middle">tokens cached per sequence'
        "</text>",
        _legend(any(s.other for s in stacks), limit),
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def _legend(other: bool, memory: int) -> str:
    names = ["weights", "cache"] + (["other"] if other else [])
    x, out = _LEFT, []
    for name in names:
        out.append(
            f'<rect class="{name}" x="{x}" y="{_HEIGHT - 15}" width="10" height="10"/>'
            f'<text x="{x + 15}" y="{_HEIGHT - 6}">{name}</text>'
        )
        x += 80
    said = f"memory: {memory / 1e9:,.4g} GB ({memory / 2**30:,.4g} GiB)"
    middle = _HEIGHT - 10
    out.append(f'<line class="memory" x1="{x}" x2="{x + 22}" y1="{middle}" y2="{middle}"/>')
    return "".join(out) + f'<text x="{x + 28}" y="{_HEIGHT - 6}">{said}</text>'


def _ticks(top: float) -> list[float]:
    """Four or five round amounts from 0 to `top`."""
    step = 10.0 ** (len(str(int(top))) - 1)
    while top / step < 4:
        step /= 2
    return [i * step for i in range(int(top / step) + 1)]


def _tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}"
