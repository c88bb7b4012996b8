"""Charts as SVG text: measured dots over a dashed prediction. No library, no script, no request."""

import math
from collections.abc import Sequence
from html import escape

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
            told = f"{escape(name)}: {_label(y)} at {_label(x)}"
            out.append(
                f'<circle class="s{i % 3}" cx="{across}" cy="{down}" r="3.5"><title>{told}</title></circle>'
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
