"""The style of the book's figures: small SVG, one colour per thing, units on every axis.

`use()` sets the style, in a notebook or out of one. Colours keep a contrast of at least 3:1 on white and on
the plate that the book's dark mode puts behind a picture, and stay apart under the three common kinds of
colour blindness; a line never relies on colour alone, because `label_line` writes its name beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter

from .checks import choice, number, require

COLORS = {
    "weights": "#3C50F0",
    "cache": "#EC5A10",  # keys and values
    "activations": "#1EA566",
    "compute": "#8A0F8A",
    "prediction": "#564C00",
    "measurement": "#141414",
    "neutral": "#707070",
}

# A prediction is always a dashed line, a measurement always dots: `ax.plot(x, y, **PREDICTION)`.
PREDICTION = {"color": COLORS["prediction"], "linestyle": (0, (4, 2)), "label": "predicted"}
MEASUREMENT = {"color": COLORS["measurement"], "linestyle": "none", "marker": "o", "label": "measured"}

WIDTHS = {"full": 6.5, "half": 3.2}  # inches; at 96 pixels an inch a full figure fills the text column

STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so it is the same everywhere
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": "#141414",
    "axes.edgecolor": "#707070",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.prop_cycle": mpl.cycler(color=[c for k, c in COLORS.items() if k not in ("prediction", "neutral")]),
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "figure.facecolor": "white",  # opaque: the dark theme shows pictures on a plate
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "what-a-token-costs",  # the same drawing gives the same ids
}

_SVG = {"metadata": {"Date": None}}  # no time stamp: the same drawing gives the same file
_UNITS = {
    True: ("B", "KiB", "MiB", "GiB", "TiB", "PiB"),
    False: ("B", "kB", "MB", "GB", "TB", "PB"),
}


def use() -> None:
    """Set the book's style; in a notebook, also ask for deterministic SVG pictures."""
    mpl.rcParams.update(STYLE)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        return
    import matplotlib.pyplot  # noqa: F401  (starts the inline backend, which would reset what follows)
    from matplotlib_inline.config import InlineBackend

    backend = InlineBackend.instance(parent=shell)
    backend.shell = shell
    backend.print_figure_kwargs = {"bbox_inches": None, **_SVG}
    backend.figure_formats = {"svg"}


def figure(width: str = "full", height: float = 2.8, **subplots) -> tuple[Figure, Axes]:
    """A figure and its axes.

    width: "full" (6.5 inches, the text column) or "half" (3.2 inches). height: inches.
    subplots: passed to `matplotlib.pyplot.subplots`, e.g. `ncols=2, sharey=True`.
    """
    import matplotlib.pyplot as plt

    choice("width", width, WIDTHS)
    number("height", height, 0.5, 12)  # inches
    return plt.subplots(figsize=(WIDTHS[width], height), **subplots)


def label_line(
    ax: Axes, line: Line2D | list[Line2D], text: str | None = None, *, x=None, offset=(6, 0), **kw
) -> Annotation:
    """Write the name of a line beside it, in its colour (darkened until it reads as text).

    line: what `ax.plot` returned; `line, = ax.plot(...)` or the list itself.
    text: default is the line's label. x: a value on the x axis; default is the line's last point.
    offset: points to the right of and above that point.
    """
    line = line[0] if isinstance(line, list) else line
    xs, ys = line.get_xdata(), line.get_ydata()
    if len(xs) == 0:
        raise ValueError("line must be of one point or more, got none")
    text = line.get_label() if text is None else text
    if text.startswith("_"):
        raise ValueError(f"text must be given for a line without a label, got the line {text!r}")
    i = len(xs) - 1 if x is None else min(range(len(xs)), key=lambda j: abs(xs[j] - x))
    kw = {"color": readable(line.get_color()), "va": "center", "ha": "left", "annotation_clip": False} | kw
    return ax.annotate(text, (xs[i], ys[i]), xytext=offset, textcoords="offset points", **kw)


def contrast(a: str, b: str) -> float:
    """WCAG contrast ratio of two colours, 1 to 21."""

    def luminance(color):
        rgb = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def readable(color: str, background: str = "white") -> str:
    """The colour, darkened until its contrast on the background is 4.5:1, what small text needs."""
    dark = to_hex(color)
    while contrast(dark, background) < 4.5 and dark != "#000000":
        dark = to_hex([max(0.0, c * 0.97 - 0.004) for c in to_rgb(dark)])
    return dark


def format_bytes(n: float, *, binary: bool = True, both: bool = False, digits: int = 3) -> str:
    """Bytes for a reader: `16.0 GiB`, or `17.2 GB` (binary=False), or `16.0 GiB (17.2 GB)` (both=True)."""
    step, units = (1024, _UNITS[True]) if binary else (1000, _UNITS[False])
    value, i = float(n), 0
    while round(abs(value)) >= step and i < len(units) - 1:  # rounded: 1023.9 MiB is 1.00 GiB to a reader
        value, i = value / step, i + 1
    whole = f"{value:.0f}" if i == 0 or abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"
    text = f"{whole} {units[i]}"
    return f"{text} ({format_bytes(n, binary=not binary, digits=digits)})" if both and i else text


def format_seconds(t: float, *, digits: int = 3) -> str:
    """Seconds for a reader: `4.48 ms`, `33 µs`, `1.5 s`."""
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(t) >= scale:
            return f"{t / scale:.{digits}g} {unit}"
    return f"{t / 1e-9:.{digits}g} ns" if t else "0 s"


def bytes_formatter(*, binary: bool = True) -> FuncFormatter:
    """Tick labels in bytes, KiB to PiB (or kB to PB): `ax.yaxis.set_major_formatter(bytes_formatter())`."""
    return FuncFormatter(lambda n, _: _short(format_bytes(n, binary=binary)))


def seconds_formatter() -> FuncFormatter:
    """Tick labels in s, ms, µs or ns."""
    return FuncFormatter(lambda t, _: format_seconds(t))


def tokens_formatter() -> FuncFormatter:
    """Tick labels for token counts, K = 1024: `512`, `8K`, `128K`, `1M`."""

    def label(n, _):
        for size, unit in ((2**20, "M"), (2**10, "K")):
            if abs(n) >= size:
                return f"{n / size:.4g}{unit}"
        return f"{n:.4g}"

    return FuncFormatter(label)


def save(fig: Figure, path: str | Path) -> Path:
    """Write a figure as SVG: the same drawing gives the same bytes."""
    path = Path(path)
    require(path.suffix == ".svg", "path", "a name that ends in .svg", path.name)
    with mpl.rc_context({"svg.hashsalt": STYLE["svg.hashsalt"], "svg.fonttype": "path"}):
        fig.savefig(path, **_SVG)
    return path


def _short(text: str) -> str:
    """`16.0 GiB` -> `16 GiB`: a tick needs no trailing zeros."""
    value, unit = text.split(" ")
    return f"{value.rstrip('0').rstrip('.') if '.' in value else value} {unit}"
