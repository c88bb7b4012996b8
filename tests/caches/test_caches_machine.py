"""Caches under any sequence of appends, crops and forks, against plain lists of tensors.

The model of a cache is a list: per layer and row, the keys and values put in, in order. What `attend` must
give for a row is what the reference gives for that row alone, in float64. Padding is NaN throughout.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from companion.attention import sdpa
from companion.caches import make_cache
from companion.cost import MLASpec, ModelSpec

MLA = MLASpec(kv_rank=5, nope_dim=4, rope_dim=2, v_dim=3)
STEP = 5  # the most tokens of one step
TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-12},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}


def spec_of(kind, group, kv_heads, window, layer_types, head_dim):
    shape = {"kv_heads": kv_heads, "heads": group * kv_heads, "head_dim": head_dim}
    if kind == "latent":
        shape = {"kv_heads": group, "heads": group, "head_dim": MLA.qk_dim, "mla": MLA}
    types = tuple(layer_types)
    return ModelSpec(
        name="tiny",
        architecture="llama",
        layers=len(types),
        d_model=8,
        ffn=8,
        vocab=8,
        window=window if "sliding" in types else None,
        layer_types=types,
        **shape,
    )


class Model:
    """Everything that was appended, row by row; the answers come from the reference."""

    def __init__(self, spec, batch, max_tokens):
        self.spec, self.batch, self.max_tokens = spec, batch, max_tokens
        heads, width = (1, spec.mla.width) if spec.mla else (spec.kv_heads, spec.head_dim)
        empty = torch.zeros(heads, 0, width, dtype=torch.float64)
        self.k = [[empty] * batch for _ in range(spec.layers)]
        self.v = [[empty] * batch for _ in range(spec.layers)]

    def copy(self):
        new = Model(self.spec, self.batch, self.max_tokens)
        new.k, new.v = [list(r) for r in self.k], [list(r) for r in self.v]
        return new

    def count(self, layer, row):
        return self.k[layer][row].shape[1]

    def counts(self, layer=0):
        return [self.count(layer, b) for b in range(self.batch)]

    def append(self, layer, k, v, lengths):
        for b, n in enumerate(lengths):
            self.k[layer][b] = torch.cat([self.k[layer][b], k[b, :, :n].double()], dim=1)
            if v is not None:
                self.v[layer][b] = torch.cat([self.v[layer][b], v[b, :, :n].double()], dim=1)

    def crop(self, keep):
        for store in (self.k, self.v):
            for rows in store:
                rows[:] = [r[:, :n] for r, n in zip(rows, keep)]

    def attend(self, layer, row, q, **options):
        """q (Hq, S, D), the queries of the row's last S tokens."""
        k, v = self.k[layer][row], self.v[layer][row]
        scale = None
        if self.spec.mla:
            v, scale = k[..., : MLA.kv_rank], MLA.qk_dim**-0.5
        window = (-1, -1)
        if self.spec.layer_types[layer] == "sliding":
            window = (self.spec.window - 1, 0)
        return sdpa(
            q.double()[None],
            k[None],
            v[None],
            causal=True,
            window_size=window,
            softmax_scale=scale,
            **options,
        )


class Machine(RuleBasedStateMachine):
    kind: str
    whole = True  # every token stays, so any crop works and the bytes used are those of the tokens

    def options(self):
        """What this kind of cache takes beside the common arguments."""
        return {}

    @initialize(
        group=st.sampled_from([1, 3, 7]),
        kv_heads=st.sampled_from([1, 2]),
        head_dim=st.sampled_from([2, 6, 8]),
        window=st.integers(1, 6),
        layer_types=st.lists(st.sampled_from(["full", "sliding"]), min_size=1, max_size=3),
        batch=st.integers(1, 3),
        max_tokens=st.integers(1, 14),
        dtype=st.sampled_from(list(TOLERANCE)),
        seed=st.integers(0, 2**31),
    )
    def begin(self, group, kv_heads, head_dim, window, layer_types, batch, max_tokens, dtype, seed):
        if self.kind == "sliding":
            layer_types = [*layer_types, "sliding"]
        spec = spec_of(self.kind, group, kv_heads, window, layer_types, head_dim)
        self.spec, self.batch, self.dtype, self.max_tokens = spec, batch, dtype, max_tokens
        self.random = torch.Generator().manual_seed(seed)
        shape = {"batch": batch, "max_tokens": max_tokens, "dtype": dtype}
        cache = make_cache(self.kind, spec, **shape, **self.options())
        self.pairs = [(cache, Model(spec, batch, max_tokens))]
        self.allocated = cache.nbytes

    def tensor(self, heads, S, width):
        x = torch.randn(self.batch, heads, S, width, generator=self.random, dtype=torch.float64)
        return x.to(self.dtype)

    def widths(self):
        if self.spec.mla:
            return 1, MLA.width
        return self.spec.kv_heads, self.spec.head_dim

    def kv(self, S, lengths):
        """Keys and values whose padding is NaN."""
        heads, width = self.widths()
        k, v = self.tensor(heads, S, width), self.tensor(heads, S, width)
        for b, n in enumerate(lengths):
            k[b, :, n:], v[b, :, n:] = math.nan, math.nan
        return k, None if self.spec.mla else v

    def check(self, cache, model, layer, S, lengths, **options):
        """The first lengths[b] of S queries are real; they belong to the row's last tokens."""
        q = self.tensor(self.spec.heads, S, self.widths()[1])
        for b, n in enumerate(lengths):
            q[b, :, n:] = math.nan
        got = cache.attend(layer, q, **options)
        got = got if isinstance(got, tuple) else (got,)
        for b, n in enumerate(lengths):
            want = model.attend(layer, b, q[b, :, :n], **options)
            for have, wanted in zip(got, want if isinstance(want, tuple) else (want,)):
                torch.testing.assert_close(
                    have[b : b + 1, :, :n].double(),
                    wanted,
                    **TOLERANCE[self.dtype],
                )

    @rule(data=st.data())
    def step(self, data):
        """A whole step: every layer is written, then read, as a decoder does."""
        cache, model = data.draw(st.sampled_from(self.pairs))
        S = data.draw(st.integers(0, STEP))
        room = [self.max_tokens - n for n in model.counts()]
        lengths = [data.draw(st.integers(0, min(S, r))) for r in room]
        even = data.draw(st.booleans()) and min(room) >= S
        lengths = [S] * self.batch if even else lengths
        extra = data.draw(st.sampled_from(["plain", "softcap", "sinks", "lse"]))
        options = {
            "plain": {},
            "softcap": {"softcap": 1.5},
            "sinks": {"sinks": torch.linspace(-1, 1, self.spec.heads, dtype=torch.float64)},
            "lse": {"return_lse": True},
        }[extra]
        for layer in range(self.spec.layers):
            before = [model.count(layer, b) for b in range(self.batch)]
            assert cache.row_lengths(layer) == before  # KV-15: a layer counts its own tokens
            k, v = self.kv(S, lengths)
            cache.append(layer, k, v, lengths=None if even else lengths)
            model.append(layer, k, v, lengths)
            self.check(cache, model, layer, S, lengths, **options)

    @rule(data=st.data())
    def too_much(self, data):
        """One token beyond the room of one row: an error, and nothing is different afterwards."""
        cache, model = data.draw(st.sampled_from(self.pairs))
        row = data.draw(st.integers(0, self.batch - 1))
        if not self.whole and self.max_tokens - model.count(0, row) + 1 > STEP:
            return  # a ring takes a few tokens at a time
        layer = data.draw(st.integers(0, self.spec.layers - 1))
        lengths = [0] * self.batch
        lengths[row] = self.max_tokens - model.count(layer, row) + 1
        k, v = self.kv(max(lengths), lengths)
        with pytest.raises(ValueError, match="max_tokens"):
            cache.append(layer, k, v, lengths=lengths)

    @rule(data=st.data())
    def crop(self, data):
        cache, model = data.draw(st.sampled_from(self.pairs))
        if data.draw(st.booleans()):
            n = data.draw(st.integers(0, self.max_tokens))
            keep = [n] * self.batch
        else:
            n = keep = [data.draw(st.integers(0, self.max_tokens)) for _ in range(self.batch)]
        try:
            cache.crop(n)
        except ValueError:
            assert not self.whole  # a ring cannot bring back what it has overwritten
        else:
            model.crop(keep)

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(data=st.data())
    def fork(self, data):
        cache, model = data.draw(st.sampled_from(self.pairs))
        self.pairs.append((cache.fork(), model.copy()))

    @precondition(lambda self: self.whole)
    @rule(data=st.data())
    def look_back(self, data):
        """After a crop: queries of the last S tokens of every row, even where a row is shorter."""
        cache, model = data.draw(st.sampled_from(self.pairs))
        cache.crop(self.max_tokens)  # drops nothing, but ends the step
        S = data.draw(st.integers(1, 4))
        for layer in range(self.spec.layers):
            self.check(cache, model, layer, S, [S] * self.batch, return_lse=data.draw(st.booleans()))

    @invariant()
    def counts_agree(self):
        for cache, model in getattr(self, "pairs", []):
            for layer in range(self.spec.layers):
                assert cache.row_lengths(layer) == model.counts(layer)
                assert cache.lengths(layer).tolist() == model.counts(layer)
                assert cache.lengths(layer).dtype == torch.int32
            assert len(cache) == max(model.counts())
            assert cache.nbytes == self.allocated
            if self.kind not in ("contiguous", "latent"):
                continue
            per_token = cache.nbytes // (self.batch * self.max_tokens * self.spec.layers)
            assert cache.nbytes_used == per_token * sum(sum(model.counts(i)) for i in range(self.spec.layers))


class ContiguousMachine(Machine):
    kind = "contiguous"


class LatentMachine(Machine):
    kind = "latent"


class PagedMachine(Machine):
    kind = "paged"

    def options(self):
        room = 6 * self.batch * self.max_tokens  # the forks live on the same pool
        return {"block_size": 1 + self.max_tokens % 4, "num_blocks": room}


class SlidingMachine(Machine):
    kind = "sliding"
    whole = False

    def options(self):
        return {"step": STEP}


QUICK = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.generate],  # shrinking a machine takes minutes; the failing steps are printed as they are
)
TestContiguous = ContiguousMachine.TestCase
TestContiguous.settings = QUICK
TestLatent = LatentMachine.TestCase
TestLatent.settings = QUICK
TestPaged = PagedMachine.TestCase
TestPaged.settings = QUICK
TestSliding = SlidingMachine.TestCase
TestSliding.settings = QUICK
