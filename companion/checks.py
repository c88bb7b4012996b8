"""Checks that every room shares: numbers, choices, shapes, near names; invariants. Standard library only.

What an argument lacks is said in one form, by one ValueError: `<argument> must be <what is accepted>, got
<what came>`. `owner` is whose argument it is, e.g. the function's name: it stands before the argument.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any


def require(holds: object, argument: str, accepted: str, value: Any, *, owner: str = "") -> None:
    """Raise ValueError unless it holds: `argument` must be what `accepted` says, and `value` came."""
    if not holds:
        raise _refusal(argument, accepted, value, owner)


def _refusal(argument: str, accepted: str, value: Any, owner: str) -> ValueError:
    where = f"{owner}: {argument}" if owner else argument
    return ValueError(f"{where} must be {accepted}, got {value!r}")


def whole(argument: str, value: Any, least: int = 1, most: float = math.inf, *, owner: str = "") -> int:
    """`value` as an int from `least` to `most`. A bool is none; anything that says it is an index is one."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        kind = kind if most == math.inf else f"an integer from {least} to {most}"
        raise _refusal(argument, kind, value, owner)
    return number


def number(
    argument: str, value: Any, least: float = -math.inf, most: float = math.inf, *, owner: str = ""
) -> float:
    """`value` as a finite float from `least` to `most`."""
    kind = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
    kind = kind if most == math.inf else f"a number from {least:g} to {most:g}"
    require(is_number(value) and least <= value <= most, argument, kind, value, owner=owner)
    return float(value)


def positive(argument: str, value: Any, most: float = math.inf, *, owner: str = "") -> float:
    """`value` as a finite float above 0, and at most `most`."""
    kind = "a positive finite number" if most == math.inf else f"above 0 and at most {most:g}"
    require(is_number(value) and 0 < value <= most, argument, kind, value, owner=owner)
    return float(value)


def is_number(value: Any) -> bool:
    """Whether it is a finite real number. A bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and -math.inf < value < math.inf


def choice(argument: str, value: Any, accepted: Iterable[Any], *, owner: str = "") -> Any:
    """`value`, if it is one of `accepted`."""
    accepted = tuple(accepted)
    require(
        value in accepted, argument, f"one of {', '.join(map(str, accepted)) or '(none)'}", value, owner=owner
    )
    return value


def shape(argument: str, tensor: Any, *expected: int | str) -> None:
    """Whether a tensor has this shape. A name in place of a size stands for any size."""
    got = tuple(tensor.shape)
    if len(got) != len(expected) or any(g != e for g, e in zip(got, expected) if not isinstance(e, str)):
        comma = "," if len(expected) == 1 else ""
        raise ValueError(f"{argument} must be of shape ({', '.join(map(str, expected))}{comma}), got {got}")


def plain(name: str) -> str:
    """A name as tables keep it: lower case, hyphens for spaces and underscores."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def near_names(name: str, known: Iterable[str], limit: int = 4) -> list[str]:
    """Names that the writer of `name` may have meant, best first."""
    import difflib  # only where a name was wrong: a thirtieth of importing `companion.cost`

    known = list(known)
    asked = plain(name).rsplit("/", 1)[-1]  # "meta-llama/Llama-3.1-8B-Instruct"
    hits = [k for k in known if asked and (asked in k or k in asked)]
    hits += difflib.get_close_matches(asked, known, n=limit, cutoff=0.5)
    return list(dict.fromkeys(hits))[:limit]


class BrokenInvariant(RuntimeError):
    """What a `check()` raises: the state contradicts itself, which is a fault here and never the caller's."""


def must(holds: object, message: str, *values: object) -> None:
    """Raise BrokenInvariant unless it holds. The message takes the values in only then: most checks pass."""
    if not holds:
        raise BrokenInvariant(message.format(*values))
