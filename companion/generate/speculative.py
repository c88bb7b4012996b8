"""Speculative decoding: guess several tokens cheaply, check them all in one pass of the target.

A decode step reads every weight to make one token. A pass over the last token and k guesses reads them once
as well and says what the target would have put at each of the k + 1 places. What it would have chosen itself
stands; the first guess that it would not ends the pass, with the target's own choice in its place. So a pass
yields 1 to k + 1 tokens, and their distribution is the target's, whoever guessed.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..caches import Cache, EvictingCache, LinearCache, PagedCache, QuantizedCache, make_cache
from ..checks import require, shape, whole
from ..model import Decoder
from .drafts import Draft, Proposal
from .lengths import Adaptive, Fixed
from .loop import Decodes, Generation, Sample, TextStream, as_prompts, check_request, record, tell
from .sampling import Sampler, draw, greedy, probabilities


@dataclass
class Speculation(Generation):
    """A `Generation`, and what each pass after the prompt's did.

    drafted, accepted: per pass, guesses that were checked and guesses that stood (in the last pass perhaps
    beyond the end of the text). Tokens of one pass arrive together: `itl_s` has the whole time at the first
    of them and 0.0 at the others.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """Passes of the target after the prompt was read."""
        return len(self.drafted)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of a pass: accepted guesses and the target's own. Plain decoding has 1."""
        return (len(self.tokens) - 1) / max(1, self.passes)

    @property
    def acceptance(self) -> float:
        """Share of guesses that stood among those judged: alpha of the formulas, 0 if there were none.

        Guesses behind the first wrong one were not judged; accepted / drafted would count them as wrong.
        """
        judged = sum(a + (a < d) for a, d in zip(self.accepted, self.drafted))
        return sum(self.accepted) / max(1, judged)


def accept(
    p: Float[Tensor, " V"], q: Float[Tensor, " V"], drafted: int, u: float, v: float
) -> tuple[int, bool]:
    """One guess before the target: (the token that stands, whether it is the guess).

    p, q: the target's and the drafter's distribution; drafted ~ q. u, v: independent uniform numbers in
    [0, 1). The guess stands with probability min(1, p / q); otherwise the token is drawn from what p has
    beyond q, max(0, p - q) normalised. Then it has the law p: q(x) min(1, p(x)/q(x)) = min(p(x), q(x)) from
    guesses that stand, and p(x) - min(p(x), q(x)) from the others. (Leviathan et al. 2023, appendix A.1.)
    """
    if u * float(q[drafted]) < float(p[drafted]):
        return drafted, True
    rest = (p.double() - q.double()).clamp(min=0)
    if not rest.any():  # p equals q: a guess is refused by rounding only
        rest = p
    return int(draw(rest[None], torch.tensor([v], dtype=torch.float64, device=p.device))), False


def acceptance(p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """Probability that a guess drawn from q stands: the sum of min(p, q), 1 where they are equal."""
    return torch.minimum(p, q).sum(dim=-1)


def verify(logits: Float[Tensor, "rows V"], proposal: Proposal, sampler: Sample) -> list[int]:
    """The tokens of a pass: accepted guesses, then one of the target's own; 1 to rows of them.

    logits: (len(proposal.ids) + 1, V), the target's at the last token and at each guess. A `Sampler`'s
    temperature and cut-offs make the target's distribution. Where guesses were not drawn from a
    distribution, or the sampler has none, the target chooses as it would alone, and a guess stands if it is
    that choice: the same law, and with the same seed the very tokens of plain decoding.
    """
    out: list[int] = []
    by_ratio = proposal.probs is not None and isinstance(sampler, Sampler)
    for row, guess in enumerate(proposal.ids):
        here = logits[row : row + 1]
        if by_ratio:
            p = probabilities(here, **sampler.options)[0]
            q = proposal.probs[row].to(p.device)
            token, stands = accept(p, q, guess, sampler.uniform(), sampler.uniform())
        else:
            token = int(sampler(here))
            stands = token == guess
        out.append(token)
        if not stands:
            return out
    return [*out, int(sampler(logits[-1:]))]  # all stand: one more for nothing


@torch.inference_mode()
def speculate(
    model: Decoder,
    prompt_ids: Sequence[int] | Int[Tensor, " S"],
    draft: Draft,
    *,
    draft_tokens: int | Adaptive | None = None,
    cache: str | Cache | None = "contiguous",
    max_new_tokens: int = 128,
    sampler: Sample = greedy,
    stop_ids: Sequence[int] | None = None,
    prefill_chunk: int | None = None,
    tokenizer: Decodes | None = None,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> Speculation:
    """Continue one prompt as `generate` does, reading the weights less often where `draft` guesses well.

    draft: `NgramDraft()`, `DecoderDraft(small_model)`, `MTPDraft(head)`, or a `Draft` of one's own.
    draft_tokens: guesses per pass; an integer for always as many, an `Adaptive` for as many as pay. None is
        Adaptive().
    cache: as in `generate`; each rejected guess is taken back by `crop`. A ring (sliding) needs a `step` of
        the longest draft and one more, a cache that quantizes groups of tokens a `residual` of the longest
        draft. A row of a manager's sequence grows with its sequence.
    The other arguments are those of `generate`; with `greedy`, and with guesses that are not drawn, so are
    the tokens, as far as rounding lets passes of one row and of several agree. A quantized cache that
    quantizes behind its residual does so up to a draft's length earlier than in single steps.

    Raises ValueError, before any work, as `generate` does, for more than one prompt, and for a cache that
    cannot take back a draft; and, when it comes, for a draft with ids outside the vocabulary.
    """
    started = time.perf_counter()
    prompts, single = as_prompts(model, prompt_ids)
    require(single, "prompt_ids", "one prompt", prompt_ids)
    check_request(model, prompts, cache, max_new_tokens, prefill_chunk)
    require(isinstance(draft, Draft), "draft", "a Draft, such as NgramDraft()", draft)
    lengths = Adaptive() if draft_tokens is None else draft_tokens
    lengths = lengths if isinstance(lengths, Fixed) else Fixed(lengths)
    longest = min(lengths.longest, max(0, max_new_tokens - 1))
    require(tokenizer is not None or not (stop or on_text), "tokenizer", "given for stop and on_text", None)
    tokens, room = prompts[0], len(prompts[0]) + max_new_tokens
    if isinstance(cache, str):
        cache = _new_cache(cache, model, room, longest)
    if cache is not None:
        _check_cache(cache, longest)
    lengths.begin(model)
    draft.begin(model, room, sampler)
    target = _Target(model, cache, draft)
    stops = set(model.stop_ids if stop_ids is None else stop_ids)
    stream = TextStream(tokenizer, stop) if tokenizer is not None else None
    out = Speculation(len(tokens))
    before = started
    for logits, chosen in _passes(target, tokens, out, lengths, sampler, prefill_chunk, max_new_tokens):
        logprobs = torch.log_softmax(logits[: len(chosen)], dim=-1)
        now = time.perf_counter()
        for row, id in enumerate(chosen):
            record(out, id, 0.0 if row else now - before, stops, max_new_tokens)
            out.logprobs.append(float(logprobs[row, id]))
            tokens.append(id)
            piece = tell(out, id, stops, stream) if stream else ""
            if piece and on_text:
                on_text(0, piece)
            if out.finish_reason:  # what stood behind it is not wanted
                break
        before = now
    return out


def _passes(
    target: "_Target", tokens: list[int], out: Speculation, lengths: Fixed, sampler: Sample, chunk, limit: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """(logits, tokens) of each pass; before the next one the caller appends what it takes to `tokens`."""
    draft, vocab = target.draft, target.model.spec.vocab
    logits = target.prompt(tokens, chunk)
    yield logits, verify(logits, Proposal(), sampler)
    while out.finish_reason is None:
        most = min(lengths.longest, limit - len(out.tokens) - 1)
        if draft.cost:  # what costs something is asked for what will be used
            guess = used = _proposed(draft, tokens, min(most, lengths.chosen(None, draft.cost)), vocab)
        else:
            guess = _proposed(draft, tokens, most, vocab)
            used = guess.first(lengths.chosen(guess.kind, 0.0))
        logits = target.read([tokens[-1], *used.ids])
        chosen = verify(logits, used, sampler)
        yield logits, chosen
        target.keep(len(tokens) - 1)
        out.drafted.append(len(used.ids))
        out.accepted.append(len(chosen) - 1)
        judged = used if used.ids else guess.first(1)  # an unused guess may have been right too
        if judged.ids:
            hits = len(chosen) - 1 if used.ids else int(judged.ids[0] == chosen[0])
            kind = None if draft.cost else judged.kind
            lengths.learn(kind, hits, hits + (hits < len(judged.ids)))


def _proposed(draft: Draft, tokens: list[int], k: int, vocab: int) -> Proposal:
    """At most k guesses, checked: a drafter may be anyone's."""
    if k < 1:
        return Proposal()
    got, name = draft.propose(tokens, k), type(draft).__name__
    n = len(got.ids)
    require(n <= k, "proposal", f"at most {k} tokens", n, owner=f"draft: {name}")
    for id in got.ids:
        whole("proposal", id, 0, vocab - 1, owner=f"draft: {name}")
    if got.probs is not None:
        q = got.probs
        shape(f"draft: {name}: probs", q, n, vocab)
        sums_right = ((q >= 0).all(dim=-1) & ((q.sum(dim=-1) - 1).abs() < 1e-3)).all()
        if not sums_right or any(not q[row, id] > 0 for row, id in enumerate(got.ids)):
            raise ValueError(f"draft: {name} gave probs that its tokens cannot have been drawn from")
    return got


class _Target:
    """The model over its cache: reads tokens, forgets those that did not stand, shows hidden states."""

    def __init__(self, model: Decoder, cache: Cache | None, draft: Draft):
        self.model, self.cache, self.draft = model, cache, draft
        self.behind = 0 if cache is None else cache.row_lengths()[0]  # tokens before the prompt
        self.text: list[int] = []  # read so far, where there is no cache
        self.read_to, self.hidden = 0, None

    def prompt(self, tokens: list[int], chunk: int | None) -> Tensor:
        """Logits (1, V) behind the prompt."""
        whole = len(tokens)  # without a cache every pass reads it all
        chunk = whole if self.cache is None else min(chunk or whole, self.cache.step or whole)
        for at in range(0, len(tokens), chunk):
            logits = self.read(tokens[at : at + chunk], logits="last")
            self.keep(self.read_to)
        return logits

    def read(self, ids: list[int], logits: str = "all") -> Tensor:
        """Logits (len(ids), V), or (1, V) of the last one."""
        if self.cache is None:
            self.text[self.read_to :] = ids
            x = torch.tensor([self.text], device=self.model.device)
        else:
            if isinstance(self.cache, PagedCache):
                self.cache.announce(0, ids)
            x = torch.tensor([ids], device=self.model.device)
        rows = len(ids)
        self.kept, self.read_to = self.read_to, self.read_to + rows
        if not self.draft.needs_hidden:
            return self.model(x, self.cache, logits=logits)[0, -(rows if logits == "all" else 1) :]
        self.hidden = self.model.through(self.model.embed(x), self.cache)[:, -rows:]
        return self.model.head(self.hidden if logits == "all" else self.hidden[:, -1:])[0]

    def keep(self, n: int) -> None:
        """Of what was read, the first n tokens stand."""
        if self.cache is not None and n < self.read_to:
            self.cache.crop(self.behind + n)
        if self.hidden is not None:
            self.draft.observe(self.hidden[:, : n - self.kept])
        self.read_to, self.hidden = n, None


def _new_cache(kind: str, model: Decoder, room: int, longest: int) -> Cache:
    options = {}
    if kind == "sliding":
        options["step"] = max(longest + 1, min(model.spec.window or 1, room))
    return make_cache(kind, model.spec, max_tokens=room, dtype=model.dtype, device=model.device, **options)


def _check_cache(cache: Cache, longest: int) -> None:
    """Whether a draft of this length can be read at once and taken back; said now, not in the middle."""
    if isinstance(cache, (LinearCache, EvictingCache)):
        raise ValueError(
            f"cache is a {type(cache).__name__}, in which a rejected draft leaves its mark; accepted: "
            "contiguous, sliding, streaming, quantized, paged, latent"
        )
    if cache.step is not None and cache.step < longest + 1:
        raise ValueError(
            f"cache has step={cache.step}; drafts of up to {longest} tokens need a step of {longest + 1}"
        )
    if isinstance(cache, QuantizedCache) and cache.unit > 1 and cache.residual < longest:
        raise ValueError(
            f"cache has residual={cache.residual} and quantizes {cache.unit} tokens together; drafts of up "
            f"to {longest} tokens need a residual of at least {longest} to be taken back"
        )
