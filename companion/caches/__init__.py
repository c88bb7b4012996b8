"""What a model keeps between steps: keys and values of every token seen, one store per layer.

>>> from companion.caches import make_cache
>>> from companion.cost import models
>>> cache = make_cache("contiguous", models["smollm2-135m"], max_tokens=64)
>>> cache.nbytes   # 64 tokens x 2 x 30 layers x 3 heads x 64 numbers x 4 bytes
2949120
"""

import torch

from ..checks import choice
from ..cost import ModelSpec
from .adapter import as_transformers
from .base import Attendable, Cache
from .contiguous import ContiguousCache, LatentCache
from .evicting import EvictingCache
from .linear import LinearCache
from .paged import PagedCache, PagedStorage
from .quantized import PagedQuantizedCache, QuantizedCache
from .sliding import SlidingCache, StreamingCache

__all__ = [
    "KINDS",
    "Attendable",
    "Cache",
    "ContiguousCache",
    "EvictingCache",
    "LatentCache",
    "LinearCache",
    "PagedCache",
    "PagedQuantizedCache",
    "PagedStorage",
    "QuantizedCache",
    "SlidingCache",
    "StreamingCache",
    "as_transformers",
    "make_cache",
]

KINDS: dict[str, type[Cache]] = {
    "contiguous": ContiguousCache,
    "sliding": SlidingCache,
    "quantized": QuantizedCache,
    "paged": PagedCache,
    "latent": LatentCache,
    "streaming": StreamingCache,
    "evicting": EvictingCache,
    "linear": LinearCache,
}
OPTIONS = {  # what a kind takes beside the arguments that all share
    "sliding": ("step", "sink_tokens"),
    "quantized": ("codec", "residual"),
    "paged": ("block_size", "num_blocks", "storage", "sequences"),
    "paged, with a codec": ("block_size", "num_blocks", "codec", "residual"),
    "streaming": ("window", "sink_tokens", "positions", "step", "rope"),
    "evicting": ("budget", "recent", "step"),
    "linear": ("rule",),
}


def make_cache(
    kind: str,
    spec: ModelSpec,
    *,
    batch: int = 1,
    max_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options,
) -> Cache:
    """An empty cache for `batch` sequences of up to `max_tokens` tokens of the model `spec`.

    kind: what is stored, and its options; the classes say more.
        "contiguous"  every key and value of every layer
        "sliding"     a ring for layers with a window, the rest whole: step, sink_tokens
        "quantized"   old tokens in few bits, new ones in full precision: codec, residual
        "paged"       blocks out of a pool: block_size, num_blocks, storage, sequences; or, with a codec,
                      blocks that are quantized when full: block_size, num_blocks, codec, residual
        "latent"      the 512 + 64 numbers of multi-head latent attention
        "streaming"   the first tokens and a window, for layers without one: window, sink_tokens, positions,
                      step, rope
        "evicting"    a budget of tokens per key head, the newest and the heaviest: budget, recent, step
        "linear"      the state of linear attention, which is another function than softmax's: rule
    Memory is allocated here, all of it, and never grows. In the last three max_tokens limits the text alone.

    Raises ValueError for an unknown kind or option, a size below 1, or a kind that does not fit the model.
    """
    make, known = KINDS[choice("kind", kind, KINDS)], OPTIONS.get(kind, ())
    if kind == "paged" and options.get("codec") is not None:
        make, known = PagedQuantizedCache, OPTIONS["paged, with a codec"]
    elif kind == "paged":
        options.pop("codec", None)
    for option in options:
        choice(f"option of a {kind} cache", option, known)
    return make(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=torch.device(device), **options)
