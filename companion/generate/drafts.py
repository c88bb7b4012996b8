"""Drafters: who guesses the next tokens before the target reads its weights to check them.

Any guess leaves the target's output as it is; a good one makes it come sooner. Three sources: the text itself
(`NgramDraft`), a smaller model (`DecoderDraft`), and a head on the target's own hidden state (`MTPDraft`).

That head predicts several tokens in the manner of DeepSeek-V3: one extra block, embedding and output shared.

    h'[i] = block(project([norm(embedding of token i + 1), norm(h[i])]))     ->  logits of token i + 2

h[i] is the residual stream of the main model at token i, or of the head itself where it guesses further. The
block attends over all earlier h', so it has keys and values of its own: one layer more in the cache. Source:
DeepSeek-V3 report (arXiv 2412.19437), section 2.2.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..caches import Cache, make_cache
from ..checks import shape, whole
from ..model import Decoder
from ..model.blocks import RMSNorm
from ..model.products import matrix, product
from .sampling import Sampler, draw, greedy, probabilities


class MTPHead(nn.Module):
    """body: a `Decoder` of the head's layers (one, in DeepSeek-V3) of the main model's width and vocabulary;
    its embedding is not used, its last norm and output matrix make the logits. Share those with the main
    model by assignment: `body.embedding, body.output = model.embedding, model.output`.

    enorm, hnorm: (d,), weights of the norms of the embedding and of the hidden state.
    project: (d, 2 d), over the two of them in this order.
    """

    def __init__(self, body: Decoder, *, enorm: Tensor, hnorm: Tensor, project: Tensor):
        super().__init__()
        d = body.spec.d_model
        for name, x, expected in (
            ("enorm", enorm, (d,)),
            ("hnorm", hnorm, (d,)),
            ("project", project, (d, 2 * d)),
        ):
            shape(name, x, *expected)
        self.body = body
        self.enorm, self.hnorm = (RMSNorm(w, body.spec.norm_eps) for w in (enorm, hnorm))
        self.project = matrix([project])

    def forward(
        self,
        hidden: Float[Tensor, "B S d"],
        embedded: Float[Tensor, "B S d"],
        cache: Cache | None = None,
    ) -> Float[Tensor, "B S d"]:
        """hidden: of tokens i; embedded: of the tokens after them. cache: of the positions before these."""
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        return self.body.through(product(both, self.project), cache)

    def logits(self, hidden: Float[Tensor, "B S d"]) -> Float[Tensor, "B S V"]:
        """Logits of the token two after each position, from what `forward` returned."""
        return self.body.head(hidden)

    def make_cache(self, room: int) -> Cache:
        """An empty cache of the head's own layer for `room` tokens."""
        kind = "contiguous" if self.body.spec.mla is None else "latent"
        return make_cache(
            kind, self.body.spec, max_tokens=room, dtype=self.body.dtype, device=self.body.device
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes that one guess reads: the block, the projection, and the output matrix, shared or not."""
        unread = 0 if self.body.output is self.body.embedding else self.body.embedding.nbytes
        return sum(p.nbytes for p in self.parameters()) - unread


@dataclass(frozen=True)
class Proposal:
    """Drafted ids, in order.

    probs: (len(ids), V), row i the distribution that ids[i] was drawn from; None where they were not drawn
        but chosen (a look-up, a greedy model). It must be the true one: acceptance is measured against it.
    kind: how this guess came about, for whoever keeps count of what such guesses are worth.
    """

    ids: Sequence[int] = ()
    probs: Float[Tensor, "n V"] | None = None
    kind: Hashable = None

    def first(self, n: int) -> "Proposal":
        """The first n of them."""
        return Proposal(self.ids[:n], None if self.probs is None else self.probs[:n], self.kind)


class Draft(ABC):
    """What `speculate` asks of a drafter.

    cost: time of one drafted token, in passes of the target; 0 for next to nothing. needs_hidden: whether
    `observe` wants the target's hidden states.
    """

    cost: float = 0.0
    needs_hidden: bool = False

    def begin(self, target: Decoder, room: int, sampler: Callable) -> None:  # noqa: B027
        """A new text starts, of `room` tokens at most; what was known of the last one is forgotten."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], k: int) -> Proposal:
        """At most k tokens (k >= 1) to follow `tokens`, all of the text so far; none if it has no idea.

        From call to call `tokens` only grows; of what was proposed it holds what was accepted.
        """

    def observe(self, hidden: Float[Tensor, "one n d"]) -> None:  # noqa: B027
        """The residual stream of the target behind its blocks, for the tokens read since the last call.

        Rejected drafts are not among them, nor is the newest token, which the target has not read yet.
        """


class NgramDraft(Draft):
    """The text's own past: what followed the last time that it ended like this ("prompt lookup").

    longest, shortest: lengths of the endings that are looked up, the longest first; of several places the
    latest counts. An index of every such ending grows by longest - shortest + 1 entries per token, and
    nothing is read twice. What is copied may run into itself, so "abab" goes on as "ababab". Guesses are of
    two kinds: what followed an ending of the shortest length, and of a longer one, which is worth more.
    """

    def __init__(self, longest: int = 8, shortest: int = 2):
        self.longest = whole("longest", longest)
        self.shortest = whole("shortest", shortest, 1, longest)
        self._forget()

    def _forget(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # an ending -> where its latest continuation starts
        self._indexed = 0  # endings before this position are in the index

    def begin(self, target, room, sampler):
        self._forget()

    def propose(self, tokens, k):
        n = len(tokens)
        for stop in range(self._indexed + 1, n):  # the ending of the whole text has no continuation yet
            for size in range(self.shortest, min(self.longest, stop) + 1):
                self._after[tuple(tokens[stop - size : stop])] = stop
        self._indexed = max(self._indexed, n - 1)
        for size in range(min(self.longest, n), self.shortest - 1, -1):
            start = self._after.get(tuple(tokens[n - size :]))
            if start is not None:
                ids = list(tokens[start : start + k])
                while len(ids) < k:  # the copy has caught up with its own beginning
                    ids.append(ids[len(ids) - (n - start)])
                return Proposal(ids, kind=min(size, self.shortest + 1))
        return Proposal()


class _Chooser:
    """Takes one drafted token from logits: drawn as the target draws, or the likeliest."""

    def __init__(self, sampler: Callable):
        self.sampler = sampler if isinstance(sampler, Sampler) else None

    def __call__(self, logits: Tensor) -> tuple[int, Tensor | None]:
        """logits (1, V) -> (id, the distribution (1, V) that it was drawn from)."""
        if self.sampler is None:
            return int(greedy(logits)), None
        q = probabilities(logits, **self.sampler.options)
        return int(draw(q, torch.tensor([self.sampler.uniform()], device=q.device))), q

    @staticmethod
    def proposal(chosen: list[tuple[int, Tensor | None]]) -> Proposal:
        qs = [q for _, q in chosen]
        return Proposal([id for id, _ in chosen], None if None in qs or not qs else torch.cat(qs))


class DecoderDraft(Draft):
    """A smaller model of the same vocabulary, with a cache of its own that follows by `crop`.

    cache: a kind for `make_cache` that can be cropped to any length. sampler: how it chooses; None means as
    the target does (same temperature and cut-offs, drawn from the same random numbers). A draft that always
    takes its likeliest token (`greedy`) is right too, only less often accepted when the target draws.
    """

    def __init__(self, model: Decoder, *, cache: str = "contiguous", sampler: Callable | None = None):
        self.model, self.kind, self.sampler = model, cache, sampler

    def begin(self, target, room, sampler):
        mine, theirs = self.model.spec, target.spec
        if mine.vocab != theirs.vocab:
            raise ValueError(
                f"draft: {mine.name} has a vocabulary of {mine.vocab}, {theirs.name} one of {theirs.vocab}; "
                "need the same tokens"
            )
        self._choose = _Chooser(sampler if self.sampler is None else self.sampler)
        limit = room if mine.max_context is None else min(room, mine.max_context)
        options = {"dtype": self.model.dtype, "device": self.model.device}
        self._cache = make_cache(self.kind, mine, max_tokens=limit, **options)
        self._read: list[int] = []  # what the cache holds
        self._sure = 0  # of it, tokens that are in the text for good
        self.cost = self.model.weights_bytes / target.weights_bytes

    def propose(self, tokens, k):
        k = min(k, self._cache.max_tokens - len(tokens) + 1)  # the last drafted token is never read
        if k < 1:
            return Proposal()
        same, most = self._sure, min(len(self._read), len(tokens) - 1)
        while same < most and self._read[same] == tokens[same]:
            same += 1
        self._cache.crop(same)
        self._read[same:], self._sure = tokens[same:], len(tokens)
        fresh, chosen = list(tokens[same:]), []
        while True:
            chosen.append(self._choose(self._logits(fresh)))
            if len(chosen) == k:
                return _Chooser.proposal(chosen)
            fresh = [chosen[-1][0]]
            self._read += fresh

    def _logits(self, ids: list[int]) -> Tensor:
        """Logits (1, V) after these tokens, read in as many passes as the cache needs."""
        step = self._cache.step or len(ids)
        for at in range(0, len(ids), step):
            part = torch.tensor([ids[at : at + step]], device=self.model.device)
            logits = self.model(part, self._cache, logits="last")[:, 0]
        return logits


class MTPDraft(Draft):
    """A multi-token-prediction head: one block on the target's hidden state and the next token's embedding.

    It guesses the token after the next. For further ones its own output takes the place of the target's
    hidden state, so it is right less and less often. Source: DeepSeek-V3 report (arXiv 2412.19437), 2.2.
    """

    needs_hidden = True

    def __init__(self, head: MTPHead, *, sampler: Callable | None = None):
        self.head, self.sampler = head, sampler

    def begin(self, target, room, sampler):
        mine, theirs = self.head.body.spec, target.spec
        if (mine.d_model, mine.vocab) != (theirs.d_model, theirs.vocab):
            raise ValueError(
                f"draft: head of width {mine.d_model} and vocabulary {mine.vocab}; "
                f"{theirs.name} has {theirs.d_model} and {theirs.vocab}"
            )
        self._target, self._choose = target, _Chooser(sampler if self.sampler is None else self.sampler)
        self._cache = self.head.make_cache(room)
        self._waiting: list[Tensor] = []  # hidden states that the head has not read
        self._read = 0  # tokens of the text that it has read
        self.cost = self.head.weights_bytes / target.weights_bytes

    def observe(self, hidden):
        self._waiting.append(hidden)

    def propose(self, tokens, k):
        self._cache.crop(self._read)  # what it read of its own guesses
        hidden, self._waiting = torch.cat(self._waiting, dim=1), []
        behind = tokens[self._read + 1 :]  # position i joins the hidden state of i and the token after it
        self._read += len(behind)
        chosen = []
        while True:
            ids = torch.tensor([behind], device=self._target.device)
            hidden = self.head(hidden, self._target.embed(ids), self._cache)[:, -1:]
            chosen.append(self._choose(self.head.logits(hidden)[:, 0]))
            if len(chosen) == k:
                return _Chooser.proposal(chosen)
            behind = [chosen[-1][0]]
