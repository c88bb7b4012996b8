"""The book's first figure, the picture that a link to the book shows, and what such a link says of a page.

    python -m tools.cards      draw both pictures again (needs matplotlib); the build takes them as stored

A page's description is its first paragraph, a chapter's its question, cut behind a whole sentence.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
MODEL, DEVICE = "llama-3.1-8b", "h100-sxm"
FIGURE, CARD = ROOT / "book" / "figures" / "ratio.svg", ROOT / "_static" / "card.png"
COLUMNS = 37
LENGTH = 220  # characters of a description


def ratio() -> tuple[float, float]:
    """Seconds that one token takes for reading the weights and for multiplying with them."""
    from companion.cost import decode_step

    step = decode_step(MODEL, DEVICE, batch=1, context=1)
    return step.weights_seconds, step.matmul_seconds


def squares() -> int:
    """How many times the second of these goes into the first."""
    reading, multiplying = ratio()
    return round(reading / multiplying)


def field(ax) -> None:
    """One square for multiplying, and for reading as many as it takes longer; multiplying comes last."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    from companion.figures import COLORS

    count = squares()
    rows = -(-(count + 1) // COLUMNS)
    at = [(i // rows, -(i % rows)) for i in range(count + 1)]
    for name, places, color in (("reading", at[:-1], "weights"), ("multiplying", at[-1:], "compute")):
        boxes = [Rectangle((x, y), 0.82, 0.82) for x, y in places]
        ax.add_collection(
            PatchCollection(boxes, facecolor=COLORS[color], edgecolor="none", gid=name, clip_on=False)
        )
    ax.set(xlim=(-0.3, COLUMNS + 0.1), ylim=(at[-1][1] - 0.3, 1.1), aspect="equal")
    ax.axis("off")


def draw(figure: Path = FIGURE, card: Path = CARD) -> None:
    """Write the figure of the first page, and the picture for links: 1200 x 630 pixels, with the title."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from companion import figures

    figures.use()
    fig, ax = figures.figure(height=1.5)
    field(ax)
    figures.save(fig, figure)
    fig = plt.figure(figsize=(12, 6.3), dpi=100, layout="none")
    reading, multiplying = (figures.format_seconds(s, digits=2) for s in ratio())
    fig.text(0.06, 0.84, "What a Token Costs", size=48, weight="bold", va="center")
    fig.text(0.06, 0.715, "An executable book on language-model inference", size=24, va="center")
    field(fig.add_axes((0.045, 0.22, 0.9, 0.42)))
    said = f"One token of Llama-3.1-8B on an H100: {reading} to read its weights, {multiplying} to multiply."
    fig.text(0.06, 0.12, said, size=17, va="center")
    fig.savefig(card, metadata={"Software": None})
    plt.close("all")


# --- what a link says --------------------------------------------------------------------------------------


def description(doctree: nodes.document) -> str:
    """The first paragraph of running text, shortened."""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section) and not all(
            isinstance(node, (nodes.image, nodes.raw)) for node in paragraph.children
        ):
            return shorten(re.sub(r"^Question\. ", "", " ".join(paragraph.astext().split())))
    return ""


def shorten(text: str) -> str:
    """Whole sentences of at most LENGTH characters; of a longer first one, whole words and an ellipsis."""
    kept = ""
    for sentence in re.split(r"(?<=[.?!:]) (?=[A-Z\"“])", text):
        if len(kept) + len(sentence) > LENGTH:
            break
        kept += f" {sentence}" if kept else sentence
    return kept or text[:LENGTH].rsplit(" ", 1)[0] + " …"


def describe(app, pagename, templatename, context, doctree) -> None:
    """For the page's own description and the one of Open Graph, which comes after this."""
    if doctree is not None and (said := description(doctree)):
        context["meta"] = (context.get("meta") or {}) | {"og:description": said}
        context["metatags"] += f'<meta name="description" content="{html.escape(said)}" />\n'


def setup(app) -> dict:
    app.connect("html-page-context", describe, priority=400)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    draw()
