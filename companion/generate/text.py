"""Text out of a stream of tokens, never half a character and never past a stop string."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Decodes(Protocol):
    """What is needed of a tokenizer here."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Feed token ids, get the text that is certain.

    A character may be spread over several tokens (an emoji is four bytes, each perhaps a token of its own);
    it is held back until it is whole. So is text that may yet become a stop string. The pieces, joined, are
    the text of all tokens, cut before the first stop string.

    tokenizer: anything with `decode(ids) -> str`. stop: strings that end the text. Attributes: `text`, all
    that was given out; `done`, True once a stop string was met.
    """

    def __init__(self, tokenizer: Decodes, stop: Sequence[str] = ()):
        if isinstance(stop, str) or any(not s for s in stop):
            raise ValueError(f"stop={stop!r}; need a sequence of strings, none of them empty")
        self._decode, self._stop = tokenizer.decode, tuple(stop)
        self._ids: list[int] = []  # one settled token as context, then those whose text is not settled
        self._settled = 0  # characters of that context
        self._held = ""  # whole characters that may be the beginning of a stop string
        self.text, self.done = "", False

    def feed(self, id: int) -> str:
        """Add one token; returns the text that became certain, often all of it, sometimes none."""
        if self.done:
            return ""
        self._ids.append(id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):  # the decoder's mark for bytes that are no character yet
            return ""
        fresh = text[self._settled :]
        # Some tokenizers write a first token differently, so one token stays as context.
        self._ids = [id]
        self._settled = len(self._decode(self._ids))
        return self._give(fresh)

    def finish(self) -> str:
        """The rest: what was held back, and bytes that never became a character (as U+FFFD)."""
        if self.done or not self._ids:
            return ""
        fresh = self._decode(self._ids)[self._settled :]
        self._ids, self._settled = [], 0
        return self._give(fresh, last=True)

    def _give(self, fresh: str, *, last: bool = False) -> str:
        text = self._held + fresh
        # The one that is complete first, so that it does not matter how the text is cut into tokens.
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            text, self._held, self.done = text[: min(found)[1]], "", True
        else:
            keep = 0 if last else max((_overlap(text, s) for s in self._stop), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
