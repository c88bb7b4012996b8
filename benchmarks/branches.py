"""Several questions to one long text, in one pass: rows of their own behind keys and values that all share.

Attention over the shared part needs no mask and no copy: the rows' queries stand side by side in one row. It
is merged by LSE with causal attention over what each row has added.
"""

import torch

from companion.attention import merge_partials, sdpa
from companion.caches import ContiguousCache


class Branches(ContiguousCache):
    """`rows` continuations of the one row that `shared` holds; new tokens are counted behind it.

    shared: a filled `ContiguousCache` of one row, which stays as it is. One step only: the questions.
    """

    def __init__(self, shared: ContiguousCache, rows: int, room: int):
        super().__init__(shared.spec, batch=rows, max_tokens=len(shared) + room)
        self.shared, self.own = shared, {}
        self._rows = [[len(shared)] * rows for _ in range(self.spec.layers)]

    def _room(self, heads, width):
        return torch.zeros(self.batch, heads, 0, width)  # what the rows add is kept as it comes

    def append(self, layer, k, v, *, lengths=None):
        self._check_kv(k, v)
        before, new = self._plan(layer, k.shape[2], None)  # padding stands at the end and is seen by nobody
        self.own[layer] = k, v
        self._commit(layer, before, new)

    def attend(self, layer, q, *, softmax_scale=None, **options):
        if options.get("sinks") is not None or options.get("softcap"):
            raise ValueError("sinks and softcap are not supported here")
        flat = q.transpose(0, 1).flatten(1, 2)[None]  # (1, Hq, rows * S, D)
        out, lse = sdpa(flat, *self.shared.read(layer), softmax_scale=softmax_scale, return_lse=True)
        out, lse = (x[0].unflatten(1, (self.batch, -1)).transpose(0, 1) for x in (out, lse))
        own, own_lse = sdpa(q, *self.own[layer], causal=True, softmax_scale=softmax_scale, return_lse=True)
        return merge_partials([out, own], [lse, own_lse])[0]
