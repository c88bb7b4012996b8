"""How far a model's next-token distributions over one cache are from those over another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..caches import Cache, ContiguousCache, make_cache
from ..checks import shape
from ..stats import Estimate, estimate


@dataclass(frozen=True)
class Divergence:
    """One number per chunk of text (B) and scored token (S), float64, in nats.

    kl: KL(reference || other), never below 0.
    agree: whether both find the same token likeliest.
    nll, nll_reference: negative log-likelihood of the token that the text goes on with.
    """

    kl: Float[Tensor, "B S"]
    agree: Bool[Tensor, "B S"]
    nll: Float[Tensor, "B S"]
    nll_reference: Float[Tensor, "B S"]

    def per_chunk(self) -> dict[str, list[float]]:
        """Means over the tokens of each chunk: "kl", "agree", "dnll" (nll less that of the reference)."""
        parts = {"kl": self.kl, "agree": self.agree.double(), "dnll": self.nll - self.nll_reference}
        return {name: x.mean(1).tolist() for name, x in parts.items()}

    def summary(self) -> dict[str, Estimate]:
        """Mean over the chunks and its standard error, for each of `per_chunk`.

        Tokens of one chunk are no independent samples; the chunks are what is counted. With one chunk there
        is no standard error (None).
        """
        return {name: estimate(values) for name, values in self.per_chunk().items()}

    @staticmethod
    def join(parts: Sequence["Divergence"]) -> "Divergence":
        """The same chunks, scored a few tokens at a time."""
        names = "kl", "agree", "nll", "nll_reference"
        return Divergence(*(torch.cat([getattr(p, name) for p in parts], dim=1) for name in names))


def compare(
    reference_logits: Float[Tensor, "B S V"], logits: Float[Tensor, "B S V"], targets: Int[Tensor, "B S"]
) -> Divergence:
    """Distances between two models' next-token distributions, token by token.

    Both logits (B, S, V): B chunks of text, S tokens of each. targets (B, S): the tokens that follow.
    In float64: a KL of 1e-6 is below what float32 can tell from 0.
    """
    shape("logits", logits, *reference_logits.shape)
    shape("targets", targets, *logits.shape[:2])
    a, b = (torch.log_softmax(x.double(), dim=-1) for x in (reference_logits, logits))
    kl = (a.exp() * (a - b)).sum(-1).clamp_min(0)  # rounding of 1e-16 may fall below
    at = targets.long().unsqueeze(-1)
    nll_reference, nll = (-x.gather(-1, at).squeeze(-1) for x in (a, b))
    return Divergence(kl, reference_logits.argmax(-1) == logits.argmax(-1), nll, nll_reference)


STEP = 8  # tokens read at a time: one at a time is what decoding does, and eight times the work


@torch.inference_mode()
def prompt(
    model: torch.nn.Module, ids: Int[Tensor, "B S"], *, room: int = 0, chunk: int = 512
) -> ContiguousCache:
    """A plain cache that holds these tokens, read `chunk` at a time, with room for `room` more."""
    B, S = ids.shape
    cache = make_cache("contiguous", model.spec, batch=B, max_tokens=S + room, dtype=model.dtype)
    for start in range(0, S, chunk):
        model(ids[:, start : start + chunk], cache, logits="last")
    return cache


def fill(cache: Cache, held: ContiguousCache) -> None:
    """Append everything that `held` holds to an empty cache, in one step.

    What a cache in few bits then stores is the exact keys and values, quantized: the same as if it had been
    handed the prompt in one pass, where each layer attends to its own step in full precision.
    """
    if len(cache):
        raise ValueError(f"cache must be an empty one, got one of {len(cache)} tokens")
    for layer in range(cache.spec.layers):
        cache.append(layer, *held.read(layer))


@torch.inference_mode()
def continued(
    model: torch.nn.Module, cache: Cache, ids: Int[Tensor, "B S"], *, step: int = STEP
) -> list[Float[Tensor, "B _ V"]]:
    """Logits for the tokens after each of ids[:, :-1], `step` tokens at a time; `cache` grows by them.

    The tokens of a step see each other in full precision and are quantized with it, so a small step is close
    to decoding, in which a token sees only itself so.
    """
    return [model(part, cache) for part in ids[:, :-1].split(step, dim=1)]


@torch.inference_mode()
def distance(
    reference: Sequence[Float[Tensor, "B _ V"]], model: torch.nn.Module, cache: Cache, ids: Int[Tensor, "B S"]
) -> Divergence:
    """Read `ids` over `cache` in the steps of `reference`, which `continued` returned for the exact cache."""
    parts, at = [], 0
    for exact in reference:
        stop = at + exact.shape[1]
        parts.append(compare(exact, model(ids[:, at:stop], cache), ids[:, at + 1 : stop + 1]))
        at = stop
    return Divergence.join(parts)
