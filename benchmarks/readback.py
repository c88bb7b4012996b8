"""A quantized cache that keeps what it would read back, so that it is decoded once and not at every step.

What `QuantizedCache` has quantized it never changes, so each group can be decoded once, when it is written,
and kept in full precision beside the codes. Attention then sees exactly the numbers that it would see, at the
speed of the plain cache and with more than its memory: for measuring quality, and for nothing else.
"""

from companion.caches import ContiguousCache, QuantizedCache


class ReadBack(QuantizedCache):
    """Rows of one length only; it can't be cropped."""

    def __init__(self, spec, *, batch=1, max_tokens, codec, residual=0):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, codec=codec, residual=residual)
        self.seen = ContiguousCache(spec, batch=batch, max_tokens=max_tokens)
        self.decoded = [0] * spec.layers

    def append(self, layer, k, v, *, lengths=None):
        if lengths is not None:
            raise ValueError(f"lengths={lengths!r}; this cache takes rows of one length")
        before = self.row_lengths(layer)[0]
        super().append(layer, k, v)
        self.seen.append(layer, k, v)
        # The tokens of this step stay exact until the next one, as in QuantizedCache.
        start, stop = self.decoded[layer], min(before, self._layers[layer].quantized[0])
        if stop > start:
            keys, values = self.seen.read(layer)
            keys[:, :, start:stop], values[:, :, start:stop] = self._layers[layer].tile(start, stop)
            self.decoded[layer] = stop

    def attend(self, layer, q, **options):
        return self.seen.attend(layer, q, **options)

    def crop(self, n):
        raise ValueError("a ReadBack cache can't be cropped")
