"""Renumber chapters in a text: numbers after the word, numbers that link to a chapter, file names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NUMBER = r"(?<![\w.,/-])[1-9]\d?(?![\w%]|[.,]\d)"
ITEM = rf"(?:\[{NUMBER}\]\([^)\s]*\)|{NUMBER})"
RANGE = rf"{ITEM}(?:\s+to\s+{ITEM})?"
GAP = r"(?:\s*\n\s*(?:#|//|\*)\s*|\s+)"  # also over the end of a comment's line
SAID = re.compile(
    rf"\b([Cc]hapters{GAP})({RANGE}(?:,\s+{RANGE})*(?:,?\s+(?:and|or)\s+{RANGE})?)|\b([Cc]hapter{GAP})({NUMBER})"
)


@dataclass
class Change:
    """The chapters before and after, by name, and what has to be written for it."""

    old: list[str]
    new: list[str]
    files: dict[str, str | None] = field(default_factory=dict)  # path -> text; None: it goes away
    edits: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)  # for a person to read
    problems: list[str] = field(default_factory=list)

    def number(self, old: int) -> int | None:
        """A chapter's new number; None if it is removed. IndexError for a number that no chapter has."""
        name = self.old[old - 1]
        return self.new.index(name) + 1 if name in self.new else None

    def renumber(self, text: str, where: str) -> str:
        """The text with every number and file name of a chapter replaced."""

        def at(place: int) -> str:
            return f"{where}:{text.count(chr(10), 0, place) + 1}"

        def moved(found: str, place: int) -> str:
            if int(found) > len(self.old):
                return found  # of another book, or an example
            if (number := self.number(int(found))) is None:
                self.problems.append(f"{at(place)}: still names chapter {found}, which goes away")
                return found
            return str(number)

        def said(match: re.Match) -> str:
            start, numbers = (match[1], match[2]) if match[1] else (match[3], match[4])
            place = match.start() + len(start)
            for a, b in re.findall(r"(\d+)\s+to\s+(\d+)", numbers):
                self.look_at_range(int(a), int(b), at(place))
            pieces = re.split(r"(\[\d+\]\([^)]*\))", numbers)  # a link's number follows its file, below
            for i in range(0, len(pieces), 2):
                pieces[i] = re.sub(NUMBER, lambda m: moved(m[0], place), pieces[i])
            return start + "".join(pieces)

        def link(match: re.Match) -> str:
            if int(match[1]) != self.old.index(match[4]) + 1:
                self.problems.append(f"{at(match.start())}: {match[0]!r} has another number than its file")
                return match[0]
            return f"[{moved(match[1], match.start())}{match[2]}{match[3]}{match[4]}"

        def stem(match: re.Match) -> str:
            if match[2] not in self.old or int(match[1]) != self.old.index(match[2]) + 1:
                return match[0]
            if match[2] in self.new:
                return f"{self.new.index(match[2]) + 1:02}_{match[2]}"
            self.problems.append(f"{at(match.start())}: still leads to {match[0]}, which goes away")
            return match[0]

        names = "|".join(sorted(self.old, key=len, reverse=True))
        if where.endswith((".md", ".ipynb")):
            for m in re.finditer(rf"\[[Cc]hapter (\d+)\]\([^)\s]*?\b\d\d_({names})\.", text):
                if int(m[1]) != self.old.index(m[2]) + 1:
                    self.problems.append(f"{at(m.start())}: {m[0]!r} says another number than it leads to")
        new = SAID.sub(said, text)
        new = re.sub(rf"\[(\d\d?)(\]|\. [^\]\n]*\])(\([^)\s]*?\b\d\d_)({names})(?=\.)", link, new)
        new = re.sub(rf"(?<!\w)(\d\d)_({names})(?!\w)", stem, new)
        if new != text:
            for n, (a, b) in enumerate(zip(text.splitlines(), new.splitlines()), 1):
                if a != b:
                    self.edits.append(f"{where}:{n}: {_difference(a, b)}")
        return new

    def look_at_range(self, first: int, last: int, where: str) -> None:
        if last > len(self.old):
            return
        now = [self.number(first), self.number(last)]
        if None not in now and self.old[first - 1 : last] != self.new[now[0] - 1 : now[1]]:
            self.notices.append(
                f"{where}: chapters {first} to {last} become {now[0]} to {now[1]}, not the same ones"
            )


def _difference(a: str, b: str) -> str:
    start = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), 0)
    start = max(0, start - 24)
    return f"...{a[start : start + 60]!r} -> {b[start : start + 60]!r}"
