"""The plain cache: room for max_tokens tokens per row, filled from the left.

Stored as (B, Hkv, max_tokens, D), so that the keys of one head lie in one piece, which is how a decode step
reads them. Sliding layers are stored whole too; their window is applied when attending.
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
        _write(self._k[layer], k, before, new)
        _write(self._v[layer], v, before, new)
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


def _write(store: torch.Tensor, x: torch.Tensor, before: list[int], new: list[int]) -> None:
    """Put the first new[b] tokens of x (B, H, S, D) behind the before[b] tokens that row b holds."""
    start, count = before[0], new[0]
    if all(b == start and n == count for b, n in zip(before, new)):
        store[:, :, start : start + count] = x[:, :, :count]  # one copy for the common case
        return
    if write(x, None, store.transpose(1, 2), None, before=before, counts=new):
        return
    for row, (b, n) in enumerate(zip(before, new)):
        store[row, :, b : b + n] = x[row, :, :n]
