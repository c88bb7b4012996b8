"""Checks that every room shares: whole numbers, choices, near names. Standard library only.

Each raises one ValueError that names the argument, what came, and what is accepted.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any


def whole(argument: str, value: Any, least: int = 1, *, owner: str = "") -> int:
    """`value` as an int of at least `least`. A bool is none; anything that says it is an index is one.

    owner   whose argument it is, e.g. the function's name: it stands before the argument in the message
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{_named(owner, argument)} must be {kind}, got {value!r}")
    return number


def choice(argument: str, value: Any, accepted: Iterable[Any], *, owner: str = "") -> Any:
    """`value`, if it is one of `accepted`."""
    accepted = tuple(accepted)
    if value not in accepted:
        known = ", ".join(map(str, accepted))
        raise ValueError(f"{_named(owner, argument)} must be one of {known}; got {value!r}")
    return value


def positive(argument: str, value: Any, most: float = math.inf, *, owner: str = "") -> float:
    """`value` as a finite float above 0, and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf or value > most:
        kind = "a positive finite number" if most == math.inf else f"above 0 and at most {most:g}"
        raise ValueError(f"{_named(owner, argument)} must be {kind}, got {value!r}")
    return float(value)


def plain(name: str) -> str:
    """A name as tables keep it: lower case, hyphens for spaces and underscores."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def near_names(name: str, known: Iterable[str], limit: int = 4) -> list[str]:
    """Names that the writer of `name` may have meant, best first."""
    known = list(known)
    asked = plain(name).rsplit("/", 1)[-1]  # "meta-llama/Llama-3.1-8B-Instruct"
    hits = [k for k in known if asked and (asked in k or k in asked)]
    hits += difflib.get_close_matches(asked, known, n=limit, cutoff=0.5)
    return list(dict.fromkeys(hits))[:limit]


def _named(owner: str, argument: str) -> str:
    return f"{owner}: {argument}" if owner else argument
