"""Reading on over a cache: a prompt's exact keys and values are put into it, and the next tokens are scored.

held = prompt(model, ids[:, :1024])                      # read once, in full precision
exact = continued(model, held.fork(), ids[:, 1024:])
cache = make_cache("quantized", model.spec, batch=B, max_tokens=..., codec="kivi4")
fill(cache, held)
distance(exact, model, cache, ids[:, 1024:])             # a Divergence
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..caches import Cache, ContiguousCache, make_cache
from .divergence import Divergence, compare

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
        raise ValueError(f"cache holds {len(cache)} tokens already; need an empty one")
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
