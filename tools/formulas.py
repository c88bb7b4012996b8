"""The formulas of the cheat sheet, read from its tables and computed as they are printed.

A formula is a small part of TeX: numbers, letters with subscripts, + and -, products (side by side or with
\\cdot), powers, \\frac and \\dfrac, \\min, \\max, \\ln, \\lfloor \\rfloor, \\lceil \\rceil, with \\left and
\\right or without, and e for the exponential. What stands in front of the last = sign is its name.
Whole numbers stay exact.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational

ROW = re.compile(r"^\| (.+?) \| \$(.+?)\$ \| (.+?) \| \[`([\w.]+)`\]\((.+?)\) \| (.+?) \|$", re.M)
SYMBOL = re.compile(r"^\| \$(.+?)\$ \| (.+?) \|$", re.M)
TOKEN = re.compile(r"\s+|(\d+(?:\.\d+)?)|(\\[A-Za-z]+|\\[,;]|[A-Za-z])|([-+(){}^_,])")
SILENT = {r"\left", r"\right", r"\,", r"\;"}
CLOSING = {r"\lfloor": (r"\rfloor", math.floor), r"\lceil": (r"\rceil", math.ceil)}


@dataclass(frozen=True)
class Row:
    """One line of the sheet."""

    what: str
    formula: str
    unit: str
    function: str  # below `companion`
    place: str  # where the reference has it
    chapter: str


def rows(page: str) -> list[Row]:
    return [Row(*found) for found in ROW.findall(page)]


def symbols(page: str) -> dict[str, str]:
    """What the page says of each letter: name -> meaning."""
    return {name(formula): meaning for formula, meaning in SYMBOL.findall(page)}


def name(formula: str) -> str:
    """`h_{kv}` -> `h_kv`, `\\kappa` -> `kappa`."""
    return re.sub(r"[\\{}]", "", formula)


def evaluate(formula: str, values: dict[str, object]):
    """The number that a formula gives.

    ValueError for TeX that isn't understood, KeyError for a letter without a value.
    """
    reader = _Reader(formula.split("=")[-1], values)
    result = reader.sum()
    if reader.peek() is not None:
        raise ValueError(f"{formula!r}: not understood from {' '.join(reader.tokens[reader.at :])!r} on")
    return result


class _Reader:
    """Recursive descent: sum, product, power, one thing."""

    def __init__(self, formula: str, values: dict[str, object]):
        self.formula, self.values, self.tokens, self.at = formula, values, [], 0
        end = 0
        while end < len(formula):
            if not (found := TOKEN.match(formula, end)):
                raise ValueError(f"{formula!r}: not understood from {formula[end:]!r} on")
            end = found.end()
            if (token := found.group().strip()) and token not in SILENT:
                self.tokens.append(token)

    def peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, wanted: str | None = None) -> str:
        token = self.peek()
        if token is None or wanted not in (None, token):
            raise ValueError(f"{self.formula!r}: expected {wanted or 'more'}, found {token or 'the end'}")
        self.at += 1
        return token

    def sum(self):
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self):
        value = self.power()
        while (token := self.peek()) and (token == r"\cdot" or self.starts(token)):
            if token == r"\cdot":
                self.take()
            value = value * self.power()
        return value

    def starts(self, token: str) -> bool:
        """Whether another factor begins here."""
        return token in ("(", "{") or token[0].isalnum() or token.startswith("\\") and not self.ends(token)

    def ends(self, token: str) -> bool:
        return token in [closing for closing, _ in CLOSING.values()]

    def power(self):
        value = self.one()
        if self.peek() == "^":
            self.take()
            exponent = self.group()
            return math.exp(exponent) if value is math.e else value**exponent
        return value

    def group(self):
        """{...}, or a single thing."""
        if self.peek() != "{":
            return self.one()
        self.take("{")
        value = self.sum()
        self.take("}")
        return value

    def one(self):
        token = self.take()
        if token == "-":
            return -self.power()
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token[0].isdigit():
            return float(token) if "." in token else int(token)
        if token in (r"\frac", r"\dfrac"):
            return _divide(self.group(), self.group())
        if token in (r"\min", r"\max", r"\ln"):
            return {r"\min": min, r"\max": max, r"\ln": math.log}[token](*self.arguments())
        if token in CLOSING:
            closing, rounded = CLOSING[token]
            value = self.sum()
            self.take(closing)
            return rounded(value)
        if token == "e":
            return math.e
        if not token.lstrip("\\").isalpha() or self.ends(token):
            raise ValueError(f"{self.formula!r}: did not expect {token}")
        return self.values[name(token) + self.subscript()]

    def arguments(self) -> list:
        self.take("(")
        found = [self.sum()]
        while self.peek() == ",":
            self.take()
            found.append(self.sum())
        self.take(")")
        return found

    def subscript(self) -> str:
        if self.peek() != "_":
            return ""
        self.take()
        if self.peek() != "{":
            return "_" + self.take()
        self.take("{")
        letters = ""
        while self.peek() != "}":
            letters += self.take()
        self.take("}")
        return "_" + letters


def _divide(a, b):
    return Fraction(a) / Fraction(b) if isinstance(a, Rational) and isinstance(b, Rational) else a / b


def letters(formula: str) -> set[str]:
    """The letters that a formula needs values for."""

    class Asked(dict):
        def __missing__(self, key):
            self[key] = 0.5 + len(self)
            return self[key]

    asked = Asked()
    evaluate(formula, asked)
    return set(asked)
