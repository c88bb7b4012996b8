"""The plain cache: room for max_tokens tokens per row, filled from the left; and the same for latents.

Stored as (B, Hkv, max_tokens, D), so that the keys of one head lie in one piece, which is how a decode step
reads them. Sliding layers are stored whole too; their window is applied when attending.

Multi-head latent attention stores one vector of kv_rank + rope_dim numbers per token and layer instead, which
all heads share. Attention over it is in the absorbed form: the query has been brought into the latent's space
by the model, the latent's first kv_rank numbers serve as the value, and the model projects the result up
again. Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1.
"""

import torch

from ..attend import backend
from .base import Cache, Room, refuse_latent


class ContiguousCache(Cache):
    """Every key and value of every layer. Slots that hold no token are zero, always."""

    def __init__(self, spec, *, batch=1, max_tokens, dtype=torch.float32, device="cpu"):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        refuse_latent(spec)
        widths = spec.head_dim, spec.v_head_dim
        self._k, self._v = ([self._room(spec.kv_heads, w) for _ in range(spec.layers)] for w in widths)

    def _room(self, heads: int, width: int) -> torch.Tensor:
        return torch.zeros(self.batch, heads, self.max_tokens, width, dtype=self.dtype, device=self.device)

    def append(self, layer, k, v, *, lengths=None):
        self._check_kv(k, v)
        before, new = self._plan(layer, k.shape[2], lengths)
        self._put(layer, k, v, before, new)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, "S", self.spec.head_dim))
        return self._look(layer, q, softmax_scale, softcap, sinks, return_lse)

    def _put(self, layer: int, k, v, before: list[int], new: list[int]) -> None:
        step = self._step_of(before, [b + n for b, n in zip(before, new)])
        backend(k).append(k, v, self._k[layer], self._v[layer], step)
        self._commit(layer, before, new)

    def _look(self, layer: int, q, softmax_scale, softcap, sinks, return_lse):
        step = self._step_of(self._starts(layer, q.shape[2]), self._rows[layer])
        return backend(q).attend(
            q,
            self._k[layer][:, :, : step.n],
            self._v[layer][:, :, : step.n],
            step,
            window=self._window(layer),
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            return_lse=return_lse,
        )

    def room(self):
        if (before := self._even()) is None:
            return None
        layout = self._k[0].transpose(1, 2), self._v[0].transpose(1, 2)
        return Room(self._k, self._v, layout, None, before)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All stored keys and values in order, (B, Hkv, n, D) each; for rows of one length."""
        n = self._one_length(layer)
        return self._k[layer][:, :, :n], self._v[layer][:, :, :n]

    @property
    def nbytes(self):
        return sum(t.nbytes for t in (*self._k, *self._v))

    @property
    def nbytes_used(self):
        per_token = [
            (k.nbytes + v.nbytes) // (self.batch * self.max_tokens) for k, v in zip(self._k, self._v)
        ]
        return sum(size * sum(rows) for size, rows in zip(per_token, self._rows))

    def _drop(self, layer, row, start, stop):
        self._k[layer][row, :, start:stop] = 0
        self._v[layer][row, :, start:stop] = 0


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
        self._check("k", k, (self.batch, 1, "S", self.spec.mla.width))
        if v is not None:
            raise ValueError("v must be None: a latent cache reads its values from the latent")
        before, new = self._plan(layer, k.shape[2], lengths)
        self._put(layer, k, None, before, new)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        mla = self.spec.mla
        self._check("q", q, (self.batch, self.spec.heads, "S", mla.width))
        if softmax_scale is None:  # the trained scale is that of one unabsorbed head, not of the 576 numbers
            softmax_scale = mla.qk_dim**-0.5
        return self._look(layer, q, softmax_scale, softcap, sinks, return_lse)

    @property
    def nbytes(self):
        return sum(k.nbytes for k in self._k)

    @property
    def nbytes_used(self):
        per_token = self._k[0].nbytes // (self.batch * self.max_tokens)
        return per_token * sum(map(sum, self._rows))
