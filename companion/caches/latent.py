"""The cache of multi-head latent attention: one vector of kv_rank + rope_dim numbers per token and layer.

All heads share it. Attention over it is in the absorbed form: the query has been brought into the latent's
space by the model, the latent's first kv_rank numbers serve as the value, and the model projects the result
up again. Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1.
"""

import torch

from .attend import attend
from .base import Cache
from .contiguous import ContiguousCache, _write


class LatentCache(ContiguousCache):
    """k is the latent, (B, 1, S, kv_rank + rope_dim); v is None; out has the width kv_rank."""

    def __init__(self, spec, *, batch=1, max_tokens, dtype=torch.float32, device="cpu"):
        if spec.mla is None:
            raise ValueError(f"{spec.name} has no latent attention; use kind='contiguous'")
        Cache.__init__(self, spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        self._k = [self._room(1, spec.mla.width) for _ in range(spec.layers)]
        # Values are the front of the same numbers: a view, which allocates nothing.
        self._v = [k[..., : spec.mla.kv_rank] for k in self._k]

    def append(self, layer, k, v=None, *, lengths=None):
        self._check("k", k, (self.batch, 1, -1, self.spec.mla.width))
        if v is not None:
            raise ValueError("v must be None: a latent cache reads its values from the latent")
        before, new = self._plan(layer, k.shape[2], lengths)
        _write(self._k[layer], k, before, new)
        self._commit(layer, before, new)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        mla = self.spec.mla
        self._check("q", q, (self.batch, self.spec.heads, -1, mla.width))
        n = max(self._rows[layer])
        return attend(
            q,
            self._k[layer][:, :, :n],
            self._v[layer][:, :, :n],
            starts=self._starts(layer, q.shape[2]),
            stops=self._rows[layer],
            window=self._window(layer),
            # The trained scale is that of one unabsorbed head, not of the 576-wide latent.
            softmax_scale=mla.qk_dim**-0.5 if softmax_scale is None else softmax_scale,
            softcap=softcap,
            sinks=sinks,
            return_lse=return_lse,
        )

    @property
    def nbytes(self):
        return sum(k.nbytes for k in self._k)

    @property
    def nbytes_used(self):
        per_token = self._k[0].nbytes // (self.batch * self.max_tokens)
        return per_token * sum(map(sum, self._rows))
