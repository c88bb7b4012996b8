"""A docstring as Markdown: paragraphs, code, doctests, and lists of arguments and of their values.

Docstrings are plain text with `code` in backticks. Read as it stands, Markdown would take the `>>>` of a
doctest for quotations, a column of names for one paragraph, and `"text"` or `--flag` for words whose
quotes and dashes are to be made typographic.
"""

from __future__ import annotations

import re
import textwrap

_WORD = r"`?\*?[a-z_][\w.]*`?"
_VALUE = r'(?:\w+=)?"[^"]+"'
_NAME = rf"(?:{_WORD}|{_VALUE})"
ITEM = re.compile(rf"({_WORD}(?:(?:, | / ){_WORD})*): (\S.*)")  # `width: inches`
COLUMNS = re.compile(rf"({_NAME}(?:(?:, | / ){_NAME})*) {{2,}}(\S.*)")  # `width   inches`, `"in"   inches`
# Code that stands in a text without backticks: an object, a quoted value, an option, an infinity.
BARE = re.compile(
    r"""(\{[^{}]*"[^{}]*\}|(?:\w+=)?"[a-z0-9/.][^"\s]*"|(?<![\w-])--[a-z][\w-]*|(?<![\w-])-inf\b)"""
)
LONGEST_KEPT = 24  # characters of code that are not broken at the end of a line


def markdown(text: str) -> str:
    """A docstring as Markdown, block by block; arguments become a list, indented blocks stay code."""
    blocks = [b.splitlines() for b in re.split(r"\n\s*\n", text.strip("\n")) if b.strip()]
    return "\n\n".join(_block(b, first=i == 0) for i, b in enumerate(blocks))


def names(text: str) -> list[str]:
    """The names that open the items of a docstring's lists; quoted values stay quoted."""
    found = re.findall(r"^ *- `(.+?)`:", markdown(text), re.M)
    return [name for names in found for name in re.split(", | / ", names)]


def _block(lines: list[str], *, first: bool) -> str:
    flat = textwrap.dedent("\n".join(lines)).splitlines()
    if flat[0].startswith(">>>"):
        return "```pycon\n" + "\n".join(flat) + "\n```"
    if lines[0].startswith("    ") and flat[0] == lines[0][4:] and not any(map(_starts_column, lines)):
        return "```python\n" + "\n".join(flat) + "\n```"
    if first:
        return "\n".join(_escape(line.strip()) for line in lines)
    return _lists(flat)


def _starts_column(line: str) -> bool:
    return COLUMNS.match(line.strip()) is not None


def _lists(lines: list[str]) -> str:
    """Items at the margin, items of quoted values below them, and the paragraphs before and after.

    A list begins with the block or behind a colon: elsewhere `word: text` is the middle of a sentence.
    A line at the margin that begins no item continues the last one, unless others hang or a sentence ended.
    """
    hanging = any(line.startswith(" ") for line in lines)
    out: list[str] = []
    open_at: list[int] = []  # the indents of the items that a line may continue
    listed, last = False, ""
    for line in lines:
        indent, text = len(line) - len(line.lstrip()), line.strip()
        depth = sum(i < indent for i in open_at)
        found = COLUMNS.match(text) or (ITEM.match(text) if indent == 0 else None)
        if found and (listed or not last or last.endswith(":")) and (indent == 0 or '"' in found.group(1)):
            if last and not listed:
                out.append("")
            name = found.group(1).replace("`", "")
            out.append("  " * depth + f"- `{name}`: {_escape(found.group(2))}")
            open_at, listed = [*open_at[:depth], indent], True
        else:
            if depth < len(open_at):
                if hanging or (last.endswith((".", ":")) and text[0].isupper()):
                    open_at = open_at[:depth]
                    out.append("")
                else:
                    depth = len(open_at)
            out.append("  " * depth + _escape(text))
        last = text
    return "\n".join(out)


def _escape(line: str) -> str:
    """What Markdown would read as markup is escaped, but for code, which BARE and backticks tell."""
    pieces = re.split(r"(`+[^`]+`+)", line)
    return "".join(_code(p) if i % 2 else _text(p) for i, p in enumerate(pieces))


def _text(piece: str) -> str:
    parts = BARE.split(piece)
    return "".join(
        _code(f"`{p}`") if i % 2 else re.sub(r"([*_<$|\[\]])", r"\\\1", p) for i, p in enumerate(parts)
    )


def _code(code: str) -> str:
    """Code in backticks; `-inf` and `f(x) -> y` are not to end a line behind the hyphen."""
    if "-" in code and len(code) <= LONGEST_KEPT + 2:
        return f'<span style="white-space: nowrap">{code}</span>'
    return code
