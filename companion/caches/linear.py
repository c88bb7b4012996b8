"""The state that linear attention keeps instead of a cache: one matrix per head, however long the text.

Katharopoulos et al. 2020, "Transformers are RNNs", section 3.3. With exp(q . k) replaced by phi(q) . phi(k)
the sum over keys can be taken before the query is known:

    S_i = S_(i-1) + phi(k_i) v_i^T     z_i = z_(i-1) + phi(k_i)     out_i = phi(q_i)^T S_i / (phi(q_i) . z_i)

with phi(x) = elu(x) + 1. It is D x Dv + D numbers per head: as much as (D + 1) / 2 tokens of keys and values
for Dv = D. All pairs share these numbers, so old ones blur.

rule="delta" (Schlag et al. 2021, section 4; Yang et al. 2024, section 3) writes what is new in a value and
not the value: u_i = v_i - S_(i-1)^T phi(k_i), with phi(x) = x / |x| and no normaliser, so that a key read
back at once gives its value exactly, and up to D orthogonal keys do for good. Models of this kind learn a
gate on u; there is none here. Within a step, with the strict lower triangle L of phi(K) phi(K)^T,

    (I + L) U = V - phi(K) S_0

is one triangular solve; from there on it is the sum above with u in the place of v.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import choice, require
from .base import Cache, refuse_latent

RULES = ("sum", "delta")


class LinearCache(Cache):
    """A recurrent state in the place of keys and values: constant bytes, no token can be taken out again.

    It does not compute what a model trained with softmax attention expects: such a model over this cache
    answers with noise. It is here for its size, for its capacity, and for models trained this way. Queries
    and keys are taken as they come, rotated or not.

    rule: how a pair of key and value enters the state S.
        "sum"    S + phi(k) v^T, and a normaliser z beside it (Katharopoulos et al. 2020, section 3.3)
        "delta"  S + phi(k) (v - S^T phi(k))^T: what is new in a value (Schlag et al. 2021, section 4)

    The state is float32 (float64 for float64 caches), whatever the `dtype` of keys and values. max_tokens is
    a limit on the text, not memory. While a step is read, its own keys and values and the state before it
    are held too, of one layer; `nbytes` does not count them. A crop to anything between 0 and the present
    length is refused: fork before what may have to be undone.
    """

    def __init__(self, spec, *, batch=1, max_tokens, dtype=torch.float32, device="cpu", rule="sum"):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        refuse_latent(spec)
        if spec.sliding_layers:
            raise ValueError(f"{spec.name} has sliding layers; a state that sums all tokens has no window")
        self.rule = choice("rule", rule, RULES)
        shape, wide = (batch, spec.kv_heads, spec.head_dim), torch.promote_types(dtype, torch.float32)
        to = dict(dtype=wide, device=device)
        self._s = [torch.zeros(*shape, spec.v_head_dim, **to) for _ in range(spec.layers)]
        self._z = [torch.zeros(*shape, **to) for _ in range(spec.layers if rule == "sum" else 0)]
        self._pending: tuple | None = None  # of the last append: layer, state before it, features, values

    def append(self, layer, k, v, *, lengths=None):
        self._check_kv(k, v)
        before, new = self._plan(layer, k.shape[2], lengths)
        s = self._s[layer]
        k, v = self._features(k), v.to(s.dtype)
        if any(n < k.shape[2] for n in new):  # padding may hold anything
            count = torch.tensor(new, device=self.device)[:, None]
            unused = (torch.arange(k.shape[2], device=self.device) >= count)[:, None, :, None]
            k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
        if self.rule == "delta":
            inner = (k @ k.transpose(-2, -1)).tril(-1)  # the diagonal is taken as 1
            v = torch.linalg.solve_triangular(inner, v - k @ s, upper=False, unitriangular=True)
        self._pending = (layer, s.clone(), self._z[layer].clone() if self._z else None, k, v)
        s += k.transpose(-2, -1) @ v
        if self._z:
            self._z[layer] += k.sum(dim=2)
        self._commit(layer, before, new)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, "S", self.spec.head_dim))
        asked = dict(
            softmax_scale=softmax_scale, softcap=softcap or None, sinks=sinks, lse=return_lse or None
        )
        for name, value in asked.items():
            require(value is None, name, "left out: linear attention has no softmax", value)
        B, Hq, S, D = q.shape
        heads = self.spec.kv_heads
        rows = self._features(q).reshape(B, heads, Hq // heads * S, D)  # query heads of a key head as rows
        fresh = self._pending is not None and self._pending[0] == layer and self._fresh[layer] is not None
        if fresh and self._pending[3].shape[2] == S:
            _, s, z, k, v = self._pending
            inner = (rows @ k.transpose(-2, -1)).view(B, heads, Hq // heads, S, S).tril().flatten(2, 3)
            out, total = rows @ s + inner @ v, inner.sum(dim=-1)
        elif S == 1:  # the last token of every row again
            out, total, z = rows @ self._s[layer], 0.0, self._z[layer] if self._z else None
        else:
            raise ValueError(f"q has {S} tokens; the state answers those of the last append, or the last one")
        if z is not None:
            total = total + (rows @ z[..., None])[..., 0]
            out = out / total.masked_fill(total == 0, 1.0)[..., None]  # no key at all: 0, not 0 / 0
        return out.view(B, Hq, S, self.spec.v_head_dim).to(q.dtype)

    def _features(self, x: Tensor) -> Tensor:
        x = x.to(self._s[0].dtype)
        return F.elu(x) + 1 if self.rule == "sum" else F.normalize(x, dim=-1)

    def fork(self):
        held, self._pending = self._pending, None  # scratch, not worth a copy
        twin = super().fork()
        self._pending = held
        return twin

    def crop(self, n):
        super().crop(n)
        self._pending = None

    def _check_crop(self, keep):
        for row, (have, wanted) in enumerate(zip(self._rows[0], keep)):
            if 0 < wanted < have:
                raise ValueError(
                    f"n={wanted}: row {row} has {have} tokens in one sum, and none can be taken out; "
                    "crop to 0, or fork before what may have to be undone"
                )

    def _drop(self, layer, row, start, stop):
        self._s[layer][row] = 0
        if self._z:
            self._z[layer][row] = 0

    @property
    def nbytes(self):
        return sum(t.nbytes for t in (*self._s, *self._z))

    @property
    def nbytes_used(self):
        """All of a row's state from its first token on."""
        return sum(
            t.nbytes // self.batch * sum(n > 0 for n in rows)
            for store in (self._s, self._z)
            for t, rows in zip(store, self._rows)
        )
