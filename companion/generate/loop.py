"""The generation loop: read the prompt once, then one token per pass; one sequence or a ragged batch.

`TextStream` makes text of a stream of tokens, never half a character and never past a stop string.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from ..caches import Cache, make_cache
from ..checks import require, whole
from ..model import Decoder
from .sampling import greedy


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
        listed = not isinstance(stop, str) and all(stop)
        require(listed, "stop", "a sequence of strings, none of them empty", stop)
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


Sample = Callable[[Tensor], Tensor]  # logits (B, V) -> ids (B,)


@dataclass
class Generation:
    """What came out for one prompt, and when.

    tokens: ids in order, the stop id included if one ended it. logprobs: natural logarithm of each token's
    probability under the model's own distribution (temperature 1, nothing cut off). finish_reason: "stop" (a
    stop id or a stop string) or "length". text: where a tokenizer was given; without stop id or stop string.
    ttft_s: seconds from the call to the first token; itl_s: seconds between tokens after it.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    text: str | None = None
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt_ids: Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | Int[Tensor, "*B S"],
    *,
    cache: str | Cache | None = "contiguous",
    max_new_tokens: int = 128,
    sampler: Sample = greedy,
    stop_ids: Sequence[int] | None = None,
    prefill_chunk: int | None = None,
    tokenizer: Decodes | None = None,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> Generation | list[Generation]:
    """Continue a prompt (a list of ids), or several at once (a list of lists, of any lengths).

    cache: a kind for `make_cache`; an empty or a filled `Cache`, whose rows the prompts then continue; or
        None, which runs the whole sequence again for every token.
    sampler: logits (B, V) -> ids (B,); `greedy`, or a `Sampler`.
    stop_ids: ids that end a row; None means the model's own (`model.stop_ids`), () none.
    prefill_chunk: read the prompt this many tokens at a time; None reads it in one pass. Never more than
        `cache.step`, where a cache takes no more at once.
    tokenizer: needed for `text`, for `stop` (strings that end a row) and for `on_text(row, piece)`, which is
        called with text as soon as it is certain.

    Returns one Generation, or a list of them for a list of prompts. A row gets what it would get alone.
    Raises ValueError, before any work, for an empty prompt, ids outside the vocabulary, a prompt that with
    max_new_tokens exceeds the model's limit or the given cache's room, and options out of range. A cache that
    bounds its positions (`cache.reach`) has no limit but its room.
    """
    started = time.perf_counter()
    prompts, single = as_prompts(model, prompt_ids)
    check_request(model, prompts, cache, max_new_tokens, prefill_chunk)
    require(tokenizer is not None or not (stop or on_text), "tokenizer", "given for stop and on_text", None)
    stops = set(model.stop_ids if stop_ids is None else stop_ids)
    streams = [TextStream(tokenizer, stop) for _ in prompts] if tokenizer is not None else None
    out = [Generation(len(p)) for p in prompts]
    if isinstance(cache, str):
        room = max(map(len, prompts)) + max_new_tokens
        cache = make_cache(
            cache, model.spec, batch=len(prompts), max_tokens=room, dtype=model.dtype, device=model.device
        )
    steps = (
        _without_cache(model, prompts, out)
        if cache is None
        else _with_cache(model, prompts, out, cache, prefill_chunk)
    )
    before = started
    for logits in steps:  # (B, V)
        ids = _choose(logits, out, sampler)
        now = time.perf_counter()
        for row, (g, id) in enumerate(zip(out, ids)):
            if g.finish_reason is None:
                record(g, id, now - before, stops, max_new_tokens)
                if streams:
                    piece = tell(g, id, stops, streams[row])
                    if piece and on_text:
                        on_text(row, piece)
        before = now
        if all(g.finish_reason for g in out):
            break
    return out[0] if single else out


def _with_cache(
    model: Decoder, prompts: list[list[int]], out: list[Generation], cache: Cache, chunk: int | None
) -> Iterator[Tensor]:
    """Logits of each step: first the prompt's, in chunks, then one pass per token over the cache."""
    yield _prefill(model, prompts, cache, chunk)
    while True:
        going = [g.finish_reason is None for g in out]
        ids = torch.tensor([[g.tokens[-1]] for g in out], device=model.device)
        # A finished row stands still: nothing is written for it.
        yield model(ids, cache, lengths=None if all(going) else [int(x) for x in going], logits="last")[:, 0]


def _prefill(model: Decoder, prompts: list[list[int]], cache: Cache, chunk: int | None) -> Tensor:
    longest = max(map(len, prompts))
    chunk = min(chunk or longest, cache.step or longest)
    last: list[Tensor | None] = [None] * len(prompts)
    for start in range(0, longest, chunk):
        ids, lengths = _padded([p[start : start + chunk] for p in prompts], model.device)
        logits = model(ids, cache, lengths=lengths, logits="last")[:, 0]
        for row, p in enumerate(prompts):
            if start < len(p) <= start + chunk:  # the chunk in which this prompt ends
                last[row] = logits[row]
    return torch.stack(last)


def _without_cache(model: Decoder, prompts: list[list[int]], out: list[Generation]) -> Iterator[Tensor]:
    while True:
        ids, lengths = _padded([p + g.tokens for p, g in zip(prompts, out)], model.device)
        yield model(ids, lengths=lengths, logits="last")[:, 0]


def _choose(logits: Tensor, out: list[Generation], sampler: Sample) -> list[int]:
    finished = torch.tensor([g.finish_reason is not None for g in out], device=logits.device)
    if finished.any():  # a row that stands still computes something of no meaning
        logits = logits.masked_fill(finished[:, None], 0.0)
    ids = sampler(logits)
    chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[:, None])[:, 0].tolist()
    for g, logprob in zip(out, chosen):
        if g.finish_reason is None:
            g.logprobs.append(logprob)
    return ids.tolist()


def record(g: Generation, id: int, seconds: float, stops: set[int], limit: int) -> None:
    if g.tokens:
        g.itl_s.append(seconds)
    else:
        g.ttft_s = seconds
    g.tokens.append(id)
    if id in stops:
        g.finish_reason = "stop"
    elif len(g.tokens) == limit:
        g.finish_reason = "length"


def tell(g: Generation, id: int, stops: set[int], stream: TextStream) -> str:
    """Text that this token settles; a stop string in it ends the row."""
    piece = "" if id in stops else stream.feed(id)
    if g.finish_reason:
        piece += stream.finish()
    if stream.done:
        g.finish_reason = "stop"
    g.text = stream.text
    return piece


def _padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Rows of ids as one tensor, padded on the right with 0, and their lengths."""
    width = max(map(len, rows))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows], device=device)
    return ids, [len(r) for r in rows]


def as_prompts(model: Decoder, prompt_ids) -> tuple[list[list[int]], bool]:
    """The prompts as lists of integers, and whether it was a single one."""
    if isinstance(prompt_ids, str) or any(isinstance(p, str) for p in prompt_ids):
        raise ValueError("prompt_ids must be token ids, as tokenizer.encode(text) gives them, got text")
    if isinstance(prompt_ids, Tensor):
        prompt_ids = prompt_ids.tolist()
    single = not any(isinstance(p, (Sequence, Tensor)) for p in prompt_ids)
    rows = [prompt_ids] if single else prompt_ids
    rows = [r.tolist() if isinstance(r, Tensor) else list(r) for r in rows]
    for row in rows:
        require(row, "prompt_ids", "at least one token to continue", row)
        for id in row:
            whole("prompt_ids", id, 0, model.spec.vocab - 1)
    return rows, single


def check_request(model, prompts, cache, max_new_tokens, prefill_chunk) -> None:
    whole("max_new_tokens", max_new_tokens)
    if prefill_chunk is not None:
        whole("prefill_chunk", prefill_chunk)
    held = [0] * len(prompts)
    if isinstance(cache, Cache):
        require(cache.batch == len(prompts), "cache", f"of batch={len(prompts)}, the prompts", cache)
        held = cache.row_lengths()
        room = cache.max_tokens - max(n + len(p) for n, p in zip(held, prompts))
        if room < max_new_tokens - 1:  # the last token is returned, not stored
            raise ValueError(
                f"cache has max_tokens={cache.max_tokens}, which leaves {room} behind the prompt; "
                f"max_new_tokens={max_new_tokens} needs {max_new_tokens - 1}"
            )
    limit = model.spec.max_context
    for before, prompt in zip(held, prompts):
        total = before + len(prompt) + max_new_tokens
        if isinstance(cache, Cache) and cache.reach is not None:
            total = min(total, cache.reach)
        if limit is not None and total > limit:
            raise ValueError(
                f"prompt of {before + len(prompt)} tokens plus max_new_tokens={max_new_tokens} is {total}; "
                f"{model.spec.name} is made for at most {limit}"
            )
