"""A text without end in a room of fixed size: the first few tokens and the last W, for full attention.

Xiao et al. 2024, "Efficient streaming language models with attention sinks", section 3. A query at position p
sees the tokens 0 .. s - 1 (`sink_tokens`) and p - W + 1 .. p (`window`), in every layer. What lies between is
gone: the text may be endless, what the model knows of it is not longer than before.

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

from ..attention import merge_partials, sdpa
from ..rope import Rope
from .attend import attend_seen
from .sliding import SlidingCache


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
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window={window!r}; need an integer of at least 1")
        if positions not in ("cache", "text"):
            raise ValueError(f"positions={positions!r}; accepted: 'cache', 'text'")
        if positions == "cache" and rope is None:
            rope = _rope_of(spec)
        if positions == "cache" and rope.head_dim != spec.head_dim:
            raise ValueError(f"rope has head_dim={rope.head_dim}; {spec.name} has {spec.head_dim}")
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
        self._check("q", q, (self.batch, self.spec.heads, -1, self.spec.head_dim))
        S = q.shape[2]
        starts = self._starts(layer, S)
        self._check_held(layer, starts, S)
        n = min(max(stops), self._slots[layer])
        k, v = self._k[layer][:, :, :n], self._v[layer][:, :, :n]
        seen = self._seen(layer, starts, S, n)
        at = torch.tensor(starts, device=self.device)[:, None] + torch.arange(S, device=self.device)
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
