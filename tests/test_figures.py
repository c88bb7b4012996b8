"""The figures' style: equal bytes for equal drawings, and colours that can be told apart."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from companion import figures


def draw():
    figures.use()
    fig, ax = figures.figure(height=2.0)
    lines = ax.plot([1, 2, 3], [1e9, 2e9, 4e9], color=figures.COLORS["weights"], label="weights")
    figures.label_line(ax, lines)
    ax.fill_between([1, 2], [0, 0], [1e9, 2e9])  # needs a clip path, whose id would be random
    ax.yaxis.set_major_formatter(figures.bytes_formatter())
    return fig


def test_the_same_drawing_gives_the_same_bytes(tmp_path):
    import matplotlib.pyplot as plt

    paths = [figures.save(draw(), tmp_path / f"{i}.svg") for i in range(2)]
    plt.close("all")
    one, two = (p.read_bytes() for p in paths)
    assert one == two
    assert b"<dc:date>" not in one and b"<path" in one


def test_without_the_style_it_would_not(tmp_path):
    import matplotlib.pyplot as plt

    fig = draw()
    with plt.rc_context({"svg.hashsalt": None}):
        for i in range(2):
            fig.savefig(tmp_path / f"{i}.svg", metadata={"Date": None})
    plt.close(fig)
    assert (tmp_path / "0.svg").read_bytes() != (tmp_path / "1.svg").read_bytes()


def dark_plate(color):
    """What pydata's dark theme does to a picture: brightness(.8), then contrast(1.2)."""
    return to_hex(np.clip(1.2 * (0.8 * np.array(to_rgb(color)) - 0.5) + 0.5, 0, 1))


@pytest.mark.parametrize("name", figures.COLORS)
def test_contrast_on_white_and_on_the_dark_theme(name):
    color = figures.COLORS[name]
    assert figures.contrast(color, "white") >= 3
    assert figures.contrast(dark_plate(color), dark_plate("white")) >= 3
    assert figures.contrast(figures.readable(color), "white") >= 4.5


def test_contrast_is_the_published_formula():
    assert figures.contrast("black", "white") == pytest.approx(21)
    assert figures.contrast("#777777", "white") == pytest.approx(4.48, abs=0.01)  # a well-known near miss
    assert figures.contrast("#E69F00", "white") < 3  # a colour that would not do


# Machado, Oliveira, Fernandes 2009, severity 1.0, in linear RGB
VISION = {
    "normal": [1, 0, 0, 0, 1, 0, 0, 0, 1],
    "protan": [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    "deutan": [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881],
    "tritan": [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900],
}


def oklab(linear):
    to_lms = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    to_lab = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ np.clip(linear, 0, 1))


def nearest_pair(colors, vision):
    """The smallest OKLab distance between two of the colours, as an eye of that kind sees them."""
    rgb = np.array([to_rgb(c) for c in colors.values()])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = [oklab(np.reshape(VISION[vision], (3, 3)) @ c) for c in linear]
    pairs = itertools.combinations(zip(colors, seen), 2)
    return min((float(np.linalg.norm(a - b)), x, y) for (x, a), (y, b) in pairs)


@pytest.mark.parametrize("vision", VISION)
def test_colours_stay_apart_for_every_eye(vision):
    distance, one, two = nearest_pair(figures.COLORS, vision)
    assert distance > 0.09, f"{one} and {two} look alike ({vision})"


def test_two_like_colours_would_be_found():
    distance, *_ = nearest_pair({"a": "#0072B2", "b": "#00875F"}, "tritan")
    assert distance < 0.09


def test_no_warning_about_fonts():
    code = (
        "from companion import figures\n"
        "figures.use()\n"
        "fig, ax = figures.figure()\n"
        "ax.set_title('µ − × ≥ ∞')\n"
        "fig.canvas.draw()"
    )
    env = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "n, kw, text",
    [
        (0, {}, "0 B"),
        (1023, {}, "1023 B"),
        (1024, {}, "1.00 KiB"),
        (131072, {}, "128 KiB"),
        (17179869184, {"both": True}, "16.0 GiB (17.2 GB)"),
        (80e9, {"binary": False, "both": True}, "80.0 GB (74.5 GiB)"),
        (1023.9999 * 2**20, {}, "1.00 GiB"),
        (999_999, {"binary": False}, "1.00 MB"),
    ],
)
def test_format_bytes(n, kw, text):
    assert figures.format_bytes(n, **kw) == text


@pytest.mark.parametrize(
    "t, text", [(0, "0 s"), (1.5, "1.5 s"), (0.00448, "4.48 ms"), (3.3e-5, "33 µs"), (2e-8, "20 ns")]
)
def test_format_seconds(t, text):
    assert figures.format_seconds(t) == text


def test_tick_labels():
    assert figures.bytes_formatter()(16 * 2**30, 0) == "16 GiB"
    assert figures.bytes_formatter(binary=False)(1e10, 0) == "10 GB"
    assert [figures.tokens_formatter()(n, 0) for n in (512, 8192, 131072, 2**20)] == [
        "512",
        "8K",
        "128K",
        "1M",
    ]
    assert figures.seconds_formatter()(0.033, 0) == "33 ms"


def test_label_stands_at_the_end_of_the_line_in_its_colour():
    fig, ax = figures.figure()
    (line,) = ax.plot([1, 2, 3], [4, 5, 6], color=figures.COLORS["cache"], label="cache")
    note = figures.label_line(ax, line)
    assert (note.get_text(), note.xy) == ("cache", (3, 6))
    assert note.get_color() == figures.readable(figures.COLORS["cache"])
    assert figures.label_line(ax, line, "here", x=1.2).xy == (1, 4)
    (unlabelled,) = ax.plot([1], [1])
    for bad in (
        lambda: figures.label_line(ax, unlabelled),
        lambda: figures.label_line(ax, ax.plot([], []), "x"),
    ):
        with pytest.raises(ValueError, match="got"):
            bad()


@pytest.mark.parametrize("kw", [{"width": "wide"}, {"height": 0}, {"height": 100}, {"height": float("nan")}])
def test_bad_sizes_are_refused(kw):
    with pytest.raises(ValueError, match=f"{next(iter(kw))} must .* got {next(iter(kw.values()))!r}"):
        figures.figure(**kw)


def test_save_refuses_other_formats(tmp_path):
    fig, _ = figures.figure()
    with pytest.raises(ValueError, match="path must .* got 'a.png'"):
        figures.save(fig, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
