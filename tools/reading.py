"""How long a chapter takes: words and lines of code to read, minutes of exercises, and who runs its cells.

The two rates below are assumptions, said on the first page beside the numbers that come from them.
Only what the book's own environment has is imported here, so that a build can use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WORDS_A_MINUTE = 200
SECONDS_A_LINE = 5

_EXERCISE = re.compile(r"^### Exercise \d+ \(\w+, (.+?) minutes?\)", re.M)
_NUMBERS = {"five": 5, "ten": 10, "fifteen": 15, "twenty": 20, "twenty-five": 25, "thirty": 30, "forty": 40}


@dataclass(frozen=True)
class Reading:
    """What one chapter asks of a reader."""

    words: int  # of prose, exercises and their solutions left out
    lines: int  # of code in the same part, the set-up cell left out
    exercises: int  # minutes, as their headings say

    @property
    def minutes(self) -> int:
        """To read the chapter, to the nearest five."""
        exact = self.words / WORDS_A_MINUTE + self.lines * SECONDS_A_LINE / 60
        return max(5, 5 * round(exact / 5))


def reading(notebook) -> Reading:
    """Count a notebook (nbformat 4). ValueError if an exercise's heading gives minutes that are no number."""
    words = lines = exercises = 0
    telling = True  # until the exercises, and again behind them
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if telling and "setup" not in cell.metadata.get("tags", []):
                lines += sum(1 for line in cell.source.splitlines() if line.strip())
            continue
        for piece in re.split(r"(?m)^(?=## )", cell.source):
            if piece.startswith("## "):
                telling = not piece.startswith("## Exercises")
            words += count_words(piece) if telling else 0
        exercises += sum(map(_minutes, _EXERCISE.findall(cell.source)))
    return Reading(words, lines, exercises)


def _minutes(text: str) -> int:
    if text.isdigit():
        return int(text)
    if text not in _NUMBERS:
        raise ValueError(f"an exercise takes {text!r} minutes; accepted: {', '.join(_NUMBERS)}, or digits")
    return _NUMBERS[text]


def count_words(text: str) -> int:
    """Words of prose: no code, no display mathematics, no tables, no HTML tags."""
    text = re.sub(r"^```.*?^```\s*$|\$\$.*?\$\$", " ", text, flags=re.M | re.S)
    text = re.sub(r"^\|.*$|<[^>]+>", " ", text, flags=re.M)
    text = re.sub(r"\]\([^)]*\)", "] ", text)
    return len(re.findall(r"[A-Za-z][\w'’-]*|\d[\d.,]*", text))


def title(notebook) -> str:
    """The first heading."""
    return re.search(r"^# (.+)$", notebook.cells[0].source, re.M).group(1).strip()


def question(notebook) -> str:
    """The last question of the paragraph that begins with **Question.**"""
    paragraph = re.search(r"\*\*Question\.\*\*\s*(.+?)(?:\n\n|$)", notebook.cells[0].source, re.S).group(1)
    return re.split(r"(?<=[.?!:])\s+", " ".join(paragraph.split()))[-1]


def times_on_a_gpu(notebook) -> bool:
    """Whether some cells measure only where there is a GPU; everything else runs on any machine."""
    return any(
        cell.cell_type == "code"
        and "measurement" in cell.metadata.get("tags", [])
        and re.search(r"device(?:\.type)? == \"cuda\"", cell.source)
        for cell in notebook.cells
    )
