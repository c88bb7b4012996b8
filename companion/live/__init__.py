"""What the interactive parts of the pages call: JSON in, JSON out, in the reader's browser.

A part asks one of the rooms `cost`, `paging` and `serving`; each has one function `live(request) -> reply`.
What these share is here.
"""

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..checks import require

TOKENS = 65536  # of one request


def answer(request: Any, run: Callable[[dict], object]) -> str:
    """What `run` makes of a request: {"ok": true, "result": ...}, or {"ok": false, "error": "..."}."""
    try:
        data = json.loads(request)
        require(isinstance(data, dict), "request", "a JSON object", data)
        reply = {"ok": True, "result": run(data)}
    except (ValueError, TypeError, RecursionError) as error:
        reply = {"ok": False, "error": str(error)}
    return json.dumps(reply)


def known(owner: str, given: object, accepted: Collection[str]) -> dict:
    """An object, if it has no other keys than the accepted ones."""
    require(isinstance(given, dict), owner, "an object", given)
    require(set(given) <= set(accepted), owner, f"of keys {', '.join(accepted)}", sorted(given))
    return given


class Words:
    """Numbers for words and integers: each different one is a token. A request may name `TOKENS` of them."""

    def __init__(self) -> None:
        self.list: list[object] = []
        self.numbers: dict[tuple[type, object], int] = {}
        self.seen = 0

    def count(self, n: int) -> int:
        self.seen += n
        require(self.seen <= TOKENS, "tokens", f"at most {TOKENS} tokens in all", self.seen)
        return n

    def read(self, argument: str, words: object) -> list:
        """A text split at spaces, or a list."""
        words = words.split() if isinstance(words, str) else words
        fits = isinstance(words, list | tuple) and all(type(w) in (int, str) for w in words)
        require(fits, argument, "a text, or a list of words and integers", words)
        self.count(len(words))
        return list(words)

    def tokens(self, words: list) -> list[int]:
        for word in words:
            if self.numbers.setdefault((type(word), word), len(self.list)) == len(self.list):
                self.list.append(word)
        return [self.numbers[type(word), word] for word in words]


def counted(n: int, thing: str = "token") -> str:
    return f"{n} {thing}{'s' * (n != 1)}"


def said(ids: Iterable[object], one: str, many: str) -> str:
    """`A writes`, or `A, B and C write`."""
    *most, last = map(str, ids)
    return f"{', '.join(most)} and {last} {many}" if most else f"{last} {one}"
