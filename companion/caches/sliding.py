"""Rooms of fixed size for texts of any length: a ring per window, and first tokens besides.

A layer that sees a window only has a ring of W + step - 1 slots.

A token at position p lies in slot p modulo the ring, so a new token overwrites the one that left the window.
A step of S tokens needs W + S - 1 slots, since its first query still sees W - 1 tokens from before the step.
Layers of type "full" are stored whole. The first `sink_tokens` tokens can be kept for good (Xiao et al. 2024,
"attention sinks"); keys are stored as they come, rotated to their own positions.

`StreamingCache` does it for full attention: the first few tokens and the last W. Xiao et al. 2024, "Efficient
streaming language models with attention sinks", section 3. A query at position p sees the tokens 0 .. s - 1
(`sink_tokens`) and p - W + 1 .. p (`window`), in every layer. What lies between is gone: the text may be
endless, what the model knows of it is not longer than before.

Where a token stands. A score depends on the difference of two rotations only: q at p and k at j give
R(j - p). Let d = max(0, p - W + 1 - s) be the tokens that p no longer sees.
- positions="text": keys keep the rotation of their place in the text, and a sink is p - j tokens away. That
  distance grows with the text, beyond any that the model was trained on.
- positions="cache": distances are counted among the tokens that are kept. In the window both ends move by d
  and nothing changes. A sink should be p - d - j away: R(j + d - p). So its key is turned forward by d, or
  the query back by d, which is the same. No distance exceeds s + W - 1.
Stored keys are never changed: a turn is one rotation of the key as it came, so rounding does not add up.
"""

import dataclasses

import torch

from ..attend import backend
from ..attend.by_torch import attend_seen
from ..attend.step import Ring, slot_of
from ..attention import merge_partials, sdpa
from ..checks import choice, whole
from ..rope import Rope
from .base import Cache, refuse_latent


class SlidingCache(Cache):
    """step: the most tokens that one `append` brings; it is also how far a `crop` may go back.

    sink_tokens: tokens at the beginning that every query of a sliding layer sees beside its window.
    Slots without a token are zero.
    """

    def __init__(
        self, spec, *, batch=1, max_tokens, dtype=torch.float32, device="cpu", step=None, sink_tokens=0
    ):
        super().__init__(spec, batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        if spec.window is None or not spec.sliding_layers:
            raise ValueError(f"{spec.name} has no sliding layers; use kind='contiguous'")
        refuse_latent(spec)
        step = min(spec.window, max_tokens) if step is None else step
        self.step, self.sink_tokens = whole("step", step), whole("sink_tokens", sink_tokens, 0)
        self.ring = spec.window + step - 1
        slots = min(max_tokens, sink_tokens + self.ring)
        self._slots = [slots if t == "sliding" else max_tokens for t in spec.layer_types]
        shape = batch, spec.kv_heads
        self._k = [torch.zeros(*shape, n, spec.head_dim, dtype=dtype, device=device) for n in self._slots]
        self._v = [torch.zeros(*shape, n, spec.v_head_dim, dtype=dtype, device=device) for n in self._slots]
        self._reached = [[0] * batch for _ in range(spec.layers)]  # the longest each row has been
        self._last_ring: Ring | None = None

    def append(self, layer, k, v, *, lengths=None):
        self._layer(layer)
        self._check_kv(k, v)
        before, new = self._plan(layer, k.shape[2], lengths)
        if self._window(layer) is None:
            step = self._step_of(before, [b + n for b, n in zip(before, new)])
            backend(k).append(k, v, self._k[layer], self._v[layer], step)
        else:
            self._write_ring(layer, k, v, before, new)
        self._commit(layer, before, new)
        self._reached[layer] = [max(a, b) for a, b in zip(self._reached[layer], self._rows[layer])]

    def _write_ring(self, layer, k, v, before, new):
        if all(b == before[0] and n == new[0] for b, n in zip(before, new)):
            at = self._slot(torch.arange(before[0], before[0] + new[0], device=self.device))
            self._k[layer][:, :, at] = k[:, :, : new[0]]
            self._v[layer][:, :, at] = v[:, :, : new[0]]
            return
        for row, (b, n) in enumerate(zip(before, new)):
            at = self._slot(torch.arange(b, b + n, device=self.device))
            self._k[layer][row, :, at] = k[row, :, :n]
            self._v[layer][row, :, at] = v[row, :, :n]

    def _slot(self, position: torch.Tensor) -> torch.Tensor:
        return slot_of(position, self.sink_tokens, self.ring)

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        self._check("q", q, (self.batch, self.spec.heads, "S", self.spec.head_dim))
        S, stops = q.shape[2], self._rows[layer]
        starts = self._starts(layer, S)
        n = min(max(stops), self._slots[layer])
        k, v = self._k[layer][:, :, :n], self._v[layer][:, :, :n]
        options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=return_lse)
        if self._window(layer) is None:
            step = self._step_of(starts, stops)
        else:
            self._check_held(layer, starts, S)
            step = self._ring_of(layer, starts, stops)
        return backend(q).attend(q, k, v, step, window=None, **options)

    def _ring_of(self, layer: int, starts: list[int], stops: list[int]) -> Ring:
        """The step of the layers with a window, which are alike."""
        found, reached = self._last_ring, self._reached[layer]
        if found is None or (found.starts, found.stops, found.reached) != (starts, stops, reached):
            shape = dict(heads=self.spec.kv_heads, slots=self._slots[layer], size=self.ring)
            shape |= dict(sinks=self.sink_tokens, window=self.spec.window)
            found = self._last_ring = Ring(starts, stops, self.device, reached=reached, **shape)
        return found

    def positions(self, row: int = 0, layer: int | None = None) -> list[int]:
        """Positions of the tokens that a sliding layer holds for this row, in ascending order."""
        layer = self.spec.layer_types.index("sliding") if layer is None else self._layer(layer)
        rows = self._rows[layer]
        held = self._ring_of(layer, rows, rows).held(self._slots[layer])[row]
        return sorted(p for p in held.tolist() if p >= 0)

    def _check_held(self, layer: int, starts: list[int], S: int) -> None:
        """Every query's window must still be there: a look back is as deep as the ring allows."""
        for row, (start, stop) in enumerate(zip(starts, self._rows[layer])):
            first = max(start, 0)
            gone = self._reached[layer][row] - self.ring
            if first < stop and gone > max(self.sink_tokens, first - self.spec.window + 1):
                raise ValueError(
                    f"q has {S} tokens, but the ring no longer holds the window of row {row}'s token {first}"
                )

    def _check_crop(self, keep: list[int]) -> None:
        """A window can be restored only while the ring still holds its oldest token."""
        for layer, rows in enumerate(self._rows):
            if self._window(layer) is None:
                continue
            for row, (have, wanted) in enumerate(zip(rows, keep)):
                gone = self._reached[layer][row] - self.ring  # positions below are overwritten, sinks aside
                if (
                    wanted < have
                    and wanted > self.sink_tokens < gone
                    and wanted - self.spec.window + 1 < gone
                ):
                    raise ValueError(
                        f"n={wanted}: row {row} has {have} tokens, and the ring no longer holds the window "
                        f"before token {wanted}; it can go back step={self.step} tokens"
                    )

    @property
    def nbytes(self):
        return sum(t.nbytes for t in (*self._k, *self._v))

    @property
    def nbytes_used(self):
        used = 0
        for k, v, slots, rows in zip(self._k, self._v, self._slots, self._rows):
            used += (k.nbytes + v.nbytes) // (self.batch * slots) * sum(min(n, slots) for n in rows)
        return used

    def _drop(self, layer, row, start, stop):
        if start <= self.sink_tokens:  # nothing that could be missing is in front of it
            self._reached[layer][row] = start
        at = torch.arange(start, stop, device=self.device)
        at = self._slot(at) if self._window(layer) else at
        self._k[layer][row, :, at] = 0
        self._v[layer][row, :, at] = 0


class StreamingCache(SlidingCache):
    """sink_tokens + window + step - 1 slots per row and layer, whatever the length of the text.

    window: tokens a query sees, itself included, beside the `sink_tokens` first ones.
    positions: how far away a sink is; they differ only from token window + sink_tokens on.
        "cache"  counted among the tokens that are kept: never beyond sink_tokens + window - 1
        "text"   counted in the text: it grows with the text, beyond what the model was trained on
    step: the most tokens that one `append` brings, `window` if None; and how far a `crop` may go back.
    rope: the rotation that keys arrive in, for positions="cache"; None is that of the model's spec in
        half-split order, as `companion.model.Decoder` makes it.
    max_tokens is a limit on the text, not memory: slots = min(max_tokens, sink_tokens + window + step - 1).
    In float32 an angle is within 0.03 radians up to 2**20 tokens, and within 1 at 2**24, which is no angle.

    Attributes: `reach`, the largest number of positions a query spans, None for positions="text"; `spec` is
    the model's with this window in every layer, so that `companion.cost` counts what is stored here, the
    sinks apart.

    Raises ValueError for a model that has sliding layers already (kind="sliding" takes `sink_tokens` too),
    and for positions="cache" without rotary positions.
    """

    def __init__(
        self,
        spec,
        *,
        batch=1,
        max_tokens,
        dtype=torch.float32,
        device="cpu",
        window=None,
        sink_tokens=4,
        positions="cache",
        step=None,
        rope: Rope | None = None,
    ):
        if spec.sliding_layers:
            raise ValueError(
                f"{spec.name} has sliding layers of its own; use kind='sliding' with sink_tokens"
            )
        whole("window", window)
        if choice("positions", positions, ("cache", "text")) == "cache":
            rope = _rope_of(spec) if rope is None else rope
            whole("head_dim", rope.head_dim, spec.head_dim, spec.head_dim, owner="rope")
        windowed = dataclasses.replace(spec, window=window, layer_types=("sliding",) * spec.layers)
        to = dict(batch=batch, max_tokens=max_tokens, dtype=dtype, device=device)
        super().__init__(windowed, step=step, sink_tokens=sink_tokens, **to)
        self.rope = rope if positions == "cache" else None
        self.reach = sink_tokens + window if positions == "cache" else None

    def attend(self, layer, q, *, softmax_scale=None, softcap=0.0, sinks=None, return_lse=False):
        self._layer(layer)
        s, window, stops = self.sink_tokens, self.spec.window, self._rows[layer]
        options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, return_lse=return_lse)
        if self.rope is None or not s or max(stops) <= s + window:  # nothing dropped: both counts agree
            return super().attend(layer, q, **options)
        self._check("q", q, (self.batch, self.spec.heads, "S", self.spec.head_dim))
        S = q.shape[2]
        starts = self._starts(layer, S)
        self._check_held(layer, starts, S)
        n = min(max(stops), self._slots[layer])
        k, v = self._k[layer][:, :, :n], self._v[layer][:, :, :n]
        ring = self._ring_of(layer, starts, stops)
        seen, at = ring.seen(S, n), ring.at(S)
        dropped = (at - window + 1 - s).clamp(min=0)  # (B, S)
        if S == 1 and self.dtype in (torch.float32, torch.float64):  # one query: turn the few keys
            k = torch.cat([self.rope.turn(k[:, :, :s], dropped.expand(-1, s)), k[:, :, s:]], dim=2)
            return attend_seen(q, k, v, seen, **options)
        # Each query has dropped another number of tokens: turn the queries, and merge the two parts.
        wide = torch.promote_types(self.dtype, torch.float32)
        near, far = q.to(wide), self.rope.turn(q.to(wide), -dropped)
        k, v = k.to(wide), v.to(wide)
        part = dict(softmax_scale=softmax_scale, softcap=softcap, return_lse=True)
        parts = [
            sdpa(far, k[:, :, :s], v[:, :, :s], key_mask=seen[..., :s], **part),
            sdpa(near, k[:, :, s:], v[:, :, s:], key_mask=seen[..., s:], **part),
        ]
        out, lse = merge_partials(*zip(*parts), sinks=sinks)
        return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


def _rope_of(spec) -> Rope:
    if spec.rope_theta is None:
        raise ValueError(f"{spec.name} has no rope_theta, so its keys cannot be turned; use positions='text'")
    options = dict(scaling=spec.rope_scaling, partial=spec.partial_rotary)
    return Rope(spec.head_dim, theta=spec.rope_theta, **options)
