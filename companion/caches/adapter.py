"""A companion cache inside a transformers model: `model.generate(ids, cache=as_transformers(cache))`.

transformers keeps attention for itself and asks a cache for all keys and values of a layer, so what is stored
in few bits is read back whole, once per layer and step: the memory is saved, the time is not.
"""

from typing import Any

import torch
from torch import Tensor

from ..checks import require
from .base import Cache


def as_transformers(cache: Cache) -> Any:
    """A `transformers.Cache` over an empty or filled companion cache of rows of one length.

    For the kinds that can be read back in order: contiguous, quantized, paged. `.companion` is the cache
    itself. Raises ValueError for other kinds, and for a quantity of heads or a dtype that does not fit when
    the model first writes.
    """
    from transformers.cache_utils import Cache as Theirs

    if not hasattr(cache, "read") or cache.spec.mla is not None:
        raise ValueError(f"cache must be contiguous, quantized or paged, got a {type(cache).__name__}")
    layer = _layer_class()
    theirs = Theirs(layers=[layer(cache, i) for i in range(cache.spec.layers)])
    theirs.companion = cache
    return theirs


def _layer_class() -> type:
    """transformers is imported when it is used, so its base class can't be named before."""
    from transformers.cache_utils import CacheLayerMixin

    class Layer(CacheLayerMixin):
        is_croppable, supports_early_init = True, False

        def __init__(self, cache: Cache, index: int):
            super().__init__()
            self.cache, self.index = cache, index
            self.is_initialized, self.batch_size = True, cache.batch

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            pass  # the companion's cache has all its memory already

        def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
            old = self.cache.read(self.index)
            self.cache.append(self.index, key_states, value_states)
            # The step's own tokens as they came, in full precision.
            k, v = (torch.cat([a, b], dim=2) for a, b in zip(old, (key_states, value_states)))
            return k, v

        def get_seq_length(self) -> int:
            return self.cache.row_lengths(self.index)[0]

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.get_seq_length() + query_length, 0

        def get_max_length(self) -> int:
            return self.cache.max_tokens

        def reset(self) -> None:
            if self.index == 0:
                self.cache.crop(0)

        def crop(self, tokens_to_remove: int) -> None:
            """transformers counts tokens to remove downwards: -3 takes the last three away."""
            require(tokens_to_remove <= 0, "tokens_to_remove", "0 or negative", tokens_to_remove)
            if self.index == 0 and tokens_to_remove:  # once, for all layers
                self.cache.crop(max(0, self.get_seq_length() + tokens_to_remove))

        def reorder_cache(self, beam_idx: Tensor) -> None:
            raise NotImplementedError("beam search reorders rows, which this cache cannot")

    return Layer
