"""A budget of tokens per key head: the newest, and those that have been looked at most.

Zhang et al. 2023, "H2O: heavy-hitter oracle", section 4. Every token that is held has a sum: the weights
that all queries so far gave it, over the query heads that share its key head. When a head holds more than
`budget` tokens it keeps the `recent` newest and, of the others, those with the largest sums; of equal sums
the earlier token stays. Each head chooses for itself, so heads hold different tokens, and each key carries
its position in its rotation.

When: at the beginning of a step, down to the budget; then the new tokens come in. The queries of a step of S
tokens therefore see the budget and the step, and nothing is evicted between them: steps of other sizes evict
at other times, and give other results. Token by token is the paper's rule.

What it costs: the weights themselves, which fused attention never writes down, so every step computes scores
(B, Hq, S, held) in float32; 8 bytes per token and key head for sum and position, which `nbytes` counts; and
one copy of the kept keys and values per step.
"""

import math

import torch
from torch import Tensor

from ..attend import Step, backend
from ..attention import checked_options
from ..checks import whole
from .base import Cache, refuse_latent


class EvictingCache(Cache):
    """budget + step slots per row, key head and layer, whatever the length of the text.

    budget: tokens that a head keeps between steps.
    recent: how many of them are the newest, half if None; equal to the budget it is a plain window.
    step: the most tokens that one `append` brings; as many as the budget if None.
    max_tokens is a limit on the text, not memory: slots = min(max_tokens, budget + step). Positions are
    those of the text, so distances grow as they would in a full cache.

    A `crop` may go back to where the last eviction took place, or to 0. The tokens are then those that were
    there; the sums keep what the dropped queries gave, and can't be parted from it.
    """

    def __init__(
        self,
        spec,
        *,
        batch=1,
        max_tokens,
        dtype=torch.float32,
        device="cpu",
        budget=None,
        recent=None,
        step=None,
    ):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        refuse_latent(spec)
        if spec.sliding_layers:
            raise ValueError(
                f"{spec.name} has sliding layers, which forget by themselves; use kind='sliding'"
            )
        self.budget = whole("budget", budget)
        self.recent = whole("recent", -(-budget // 2) if recent is None else recent, 1, budget)
        self.step = whole("step", min(budget, max_tokens) if step is None else step)
        self.slots = min(max_tokens, budget + self.step)
        shape, layers = (batch, spec.kv_heads, self.slots), range(spec.layers)
        to = dict(dtype=dtype, device=device)
        self._k = [torch.zeros(*shape, spec.head_dim, **to) for _ in layers]
        self._v = [torch.zeros(*shape, spec.v_head_dim, **to) for _ in layers]
        self._sum = [torch.zeros(*shape, dtype=torch.float32, device=device) for _ in layers]
        # Position of the token in each slot, ascending; behind the tokens that a row holds it means nothing.
        self._at = [torch.zeros(*shape, dtype=torch.int32, device=device) for _ in layers]
        self._held = [[0] * batch for _ in layers]  # all heads of a row hold equally many
        self._floor = [[0] * batch for _ in layers]  # length of the row when it last evicted
        self._counted = [True] * spec.layers  # whether the last append's queries are in the sums

    def append(self, layer, k, v, *, lengths=None):
        self._layer(layer)
        self._check_kv(k, v)
        before, new = self._plan(layer, k.shape[2], lengths)
        for row, n in enumerate(new):
            if n and self._held[layer][row] > self.budget:
                self._evict(layer, row)
        held = self._held[layer]
        at = torch.tensor(before, device=self.device)[:, None] + torch.arange(k.shape[2], device=self.device)
        at = at.int()[:, None].expand(-1, self.spec.kv_heads, -1)
        self._held[layer] = [h + n for h, n in zip(held, new)]
        step, by = Step(held, self._held[layer], self.device), backend(k)
        by.append(k, v, self._k[layer], self._v[layer], step)
        by.append(at, None, self._at[layer], None, step)
        self._commit(layer, before, new)
        self._counted[layer] = False

    def _evict(self, layer: int, row: int) -> None:
        """Down to the budget: of each head the newest tokens, and the heaviest of the others."""
        held, old = self._held[layer][row], self._held[layer][row] - self.recent
        sums = self._sum[layer][row]  # (Hkv, slots)
        order = sums[:, :old].sort(dim=-1, descending=True, stable=True).indices  # stable: the earlier first
        heavy = order[:, : self.budget - self.recent].sort(dim=-1).values
        newest = torch.arange(old, held, device=self.device).expand(sums.shape[0], -1)
        keep = torch.cat([heavy, newest], dim=-1)  # (Hkv, budget), ascending
        for store in (self._k, self._v):
            x = store[layer][row]
            x[:, : self.budget] = x.gather(1, keep[..., None].expand(-1, -1, x.shape[2]))
            x[:, self.budget :] = 0
        for store, rest in ((self._sum, 0), (self._at, 0)):
            x = store[layer][row]
            x[:, : self.budget] = x.gather(1, keep)
            x[:, self.budget :] = rest
        self._held[layer][row] = self.budget
        self._floor[layer][row] = self._rows[layer][row]

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, "S", self.spec.head_dim))
        S, fresh = q.shape[2], self._fresh[layer]
        starts = self._starts(layer, S)
        self._check_floor(layer, starts, S)
        n = max(self._held[layer])
        at = torch.tensor(starts, device=self.device)[:, None] + torch.arange(S, device=self.device)  # (B, S)
        stop = torch.tensor(self._held[layer], device=self.device)[:, None, None, None]
        seen = self._at[layer][:, :, None, :n] <= at[:, None, :, None]  # (B, Hkv, S, n)
        seen &= torch.arange(n, device=self.device) < stop
        weights, lse = _weights(q, self._k[layer][:, :, :n], seen, softmax_scale, softcap, sinks)
        if not self._counted[layer] and fresh is not None and max(fresh) <= S:
            real = torch.arange(S, device=self.device) < torch.tensor(fresh, device=self.device)[:, None]
            given = weights.masked_fill(~real[:, None, None, :, None], 0.0)  # padding is no query
            self._sum[layer][:, :, :n] += given.sum(dim=(2, 3))
            self._counted[layer] = True
        v = self._v[layer][:, :, :n].to(weights.dtype)
        out = (weights.flatten(2, 3) @ v).view(self.batch, self.spec.heads, S, v.shape[3]).to(q.dtype)
        return (out, lse.view(self.batch, self.spec.heads, S)) if return_lse else out

    def positions(self, layer: int = 0, row: int = 0) -> list[list[int]]:
        """For each key head, the positions of the tokens it holds, ascending."""
        return self._at[self._layer(layer)][row, :, : self._held[layer][row]].tolist()

    def weight_sums(self, layer: int = 0, row: int = 0) -> Tensor:
        """The sums of these tokens, float32 (Hkv, held)."""
        return self._sum[self._layer(layer)][row, :, : self._held[layer][row]].clone()

    def _check_floor(self, layer: int, starts: list[int], S: int) -> None:
        for row, (start, stop) in enumerate(zip(starts, self._rows[layer])):
            if max(start, 0) < min(self._floor[layer][row], stop):
                raise ValueError(
                    f"q has {S} tokens, but row {row} evicted at token {self._floor[layer][row]}, "
                    f"and token {max(start, 0)} stands before it"
                )

    def _check_crop(self, keep: list[int]) -> None:
        for rows, floors in zip(self._rows, self._floor):
            for row, (have, wanted, floor) in enumerate(zip(rows, keep, floors)):
                if 0 < wanted < min(have, floor):
                    raise ValueError(
                        f"n={wanted}: row {row} last evicted at token {floor}, and what it held before is "
                        f"lost; crop to {floor} or more, or to 0"
                    )

    def _drop(self, layer, row, start, stop):
        held = self._held[layer][row]
        keep = held - (stop - start) if start else 0  # the tokens to drop are the newest, all still held
        for store in (self._k, self._v, self._sum, self._at):
            store[layer][row, :, keep:] = 0
        self._held[layer][row] = keep
        if not start:
            self._floor[layer][row] = 0

    @property
    def nbytes(self):
        return sum(t.nbytes for store in (self._k, self._v, self._sum, self._at) for t in store)

    @property
    def nbytes_used(self):
        return self.nbytes // (self.spec.layers * self.batch * self.slots) * sum(map(sum, self._held))


def _weights(q, k, seen, softmax_scale, softcap, sinks) -> tuple[Tensor, Tensor]:
    """Softmax weights (B, Hkv, group, S, n) and LSE (B, Hkv, group, S), in float32 or float64.

    The meaning is that of `companion.attention.sdpa`, which keeps its weights to itself. seen (B, Hkv, S, n).
    """
    B, Hq, S, D = q.shape
    Hkv, n = k.shape[1:3]
    scale, softcap = checked_options(D, softmax_scale, softcap)
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = (q.to(wide) * scale).reshape(B, Hkv, Hq // Hkv * S, D)
    scores = (rows @ k.to(wide).transpose(-2, -1)).view(B, Hkv, Hq // Hkv, S, n)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, :, None], -math.inf)
    total = lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(wide).view(1, Hkv, -1, 1))
    return torch.exp(scores - total.masked_fill(total == -math.inf, 0.0)[..., None]), lse
