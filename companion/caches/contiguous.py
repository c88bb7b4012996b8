"""The plain cache: room for max_tokens tokens per row, filled from the left.

Stored as (B, Hkv, max_tokens, D), so that the keys of one head lie in one piece, which is how a decode step
reads them. Sliding layers are stored whole too; their window is applied when attending.

The cache of multi-head latent attention is such a room for one vector of kv_rank + rope_dim numbers per token
and layer. All heads share it. Attention over it is in the absorbed form: the query has been brought into the
latent's space by the model, the latent's first kv_rank numbers serve as the value, and the model projects the
result up again. Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1.
"""

import torch

from .attend import attend
from .base import Cache, Room, refuse_latent
from .dispatch import write


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
        write_rows(self._k[layer], k, before, new)
        write_rows(self._v[layer], v, before, new)
        self._commit(layer, before, new)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, -1, self.spec.head_dim))
        n = max(self._rows[layer])
        return attend(
            q,
            self._k[layer][:, :, :n],
            self._v[layer][:, :, :n],
            starts=self._starts(layer, q.shape[2]),
            stops=self._rows[layer],
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


def write_rows(store: torch.Tensor, x: torch.Tensor, before: list[int], new: list[int]) -> None:
    """Put the first new[b] tokens of x (B, H, S, D) behind the before[b] tokens that row b holds."""
    start, count = before[0], new[0]
    if all(b == start and n == count for b, n in zip(before, new)):
        store[:, :, start : start + count] = x[:, :, :count]  # one copy for the common case
        return
    if write(x, None, store.transpose(1, 2), None, before=before, counts=new):
        return
    for row, (b, n) in enumerate(zip(before, new)):
        store[row, :, b : b + n] = x[row, :, :n]


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
        write_rows(self._k[layer], k, before, new)
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
