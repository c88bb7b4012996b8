"""Small nets that learn to look things up: the same decoder with 8, 4, 2 or 1 key-value heads, or a latent.

The task is multi-query associative recall (Arora et al. 2023, "Zoology"). A sequence lists pairs, key value
key value ..., and then asks for every key once, in random order; at each one the net must say its value.

    k3 v9  k7 v2  k1 v9 | k7 k1 k3   ->   v2 v9 v9

Keys and values are drawn anew for every sequence, so that the answer stands in the context and nowhere in the
weights: what the net knows of it, it has read from its cache. A guess among all values is right 1 time in
32; a guess among the values in the context about 1 in the number of pairs.

Latent attention is DeepSeek-V2's (arXiv 2405.04434, section 2.1): a latent of `kv_rank` numbers, normed, from
which each head's key and value are projected, and one rotated key that all heads share. Both are cached.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..checks import choice, whole
from ..cost import MLASpec, ModelSpec
from ..formats import FP8_E4M3, INT2, INT4, INT8
from ..quantize import codec
from ..rope import Rope

KEYS, VALUES = 32, 32
CODECS = tuple(f.name for f in (INT8, FP8_E4M3, INT4, INT2))
HELD_OUT = 8  # sequences whose values sum to a multiple of this are for evaluation only
WEIGHTS = Path(__file__).parent / "results" / "recall_nets.safetensors"
_SHAPE = {"architecture": "recall", "layers": 2, "d_model": 64, "heads": 8, "ffn": 64, "vocab": KEYS + VALUES}


def _spec(name: str, kv_heads: int, rank: int = 0) -> ModelSpec:
    mla = MLASpec(kv_rank=rank, nope_dim=16, rope_dim=8, v_dim=16) if rank else None
    return ModelSpec(name=name, kv_heads=kv_heads, head_dim=mla.qk_dim if mla else 16, mla=mla, **_SHAPE)


# The two latents cache as many numbers per token as one and as two key-value heads do: 32 and 64.
_LATENTS = _spec("latent64", 8, 56), _spec("latent32", 8, 24)
VARIANTS: dict[str, ModelSpec] = {s.name: s for s in (*(_spec(f"kv{n}", n) for n in (8, 4, 2, 1)), *_LATENTS)}


class RecallNet(nn.Module):
    """A decoder of the shape `spec`, for training and for reading: no cache object, whole sequences at once.

    net(ids) -> logits. What a cache would hold is made by each layer's `cached`, and `codec` rounds it.
    """

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.d_model)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(_Layer(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.head = nn.Linear(spec.d_model, spec.vocab, bias=False)

    def forward(
        self,
        ids: Int[Tensor, "B S"],
        positions: Int[Tensor, " S"] | None = None,
        *,
        codec: str | None = None,
        absorbed: bool = False,
        last: int | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits (B, S, V), or those of the `last` positions only.

        positions: of the tokens; None: 0, 1, 2, ...
        codec: one of CODECS: everything cached passes through it, the newest token included, with one scale
            (and in int4 and int2 one minimum) per token and head, in 16 bits each. None: as computed.
        absorbed: latents only: attend over the latent itself, as a server does.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1])
        x = self.embed(ids)
        exact = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self.layers[0].attention.rope.cos_sin(positions, dtype=exact)
        for layer in self.layers:
            x = layer(x, cos, sin, codec, absorbed)
        return self.head(self.norm(x if last is None else x[:, -last:]))


class _Layer(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.norm1 = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.attention = Latent(spec) if spec.mla else Heads(spec)
        self.norm2 = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.up = nn.Linear(spec.d_model, 2 * spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, spec.d_model, bias=False)

    def forward(self, x, cos, sin, codec, absorbed):
        h = self.norm1(x)
        cached = self.attention.cached(h, cos, sin)
        if codec is not None:
            cached = tuple(rounded(t, codec) for t in cached)
        attend = self.attention.attend_absorbed if absorbed else self.attention.attend
        x = x + attend(h, cached, cos, sin)
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Heads(nn.Module):
    """Attention with spec.kv_heads heads of keys and values. Cached: rotated keys, and values."""

    def __init__(self, spec):
        super().__init__()
        d, self.heads, self.kv_heads, D = spec.d_model, spec.heads, spec.kv_heads, spec.head_dim
        self.rope = Rope(D, theta=spec.rope_theta)
        self.query = nn.Linear(d, spec.heads * D, bias=False)
        self.key = nn.Linear(d, spec.kv_heads * D, bias=False)
        self.value = nn.Linear(d, spec.kv_heads * D, bias=False)
        self.out = nn.Linear(spec.heads * D, d, bias=False)

    def cached(self, x, cos, sin):
        k = self.rope.apply_rope(_split(self.key(x), self.kv_heads), cos, sin)
        return k, _split(self.value(x), self.kv_heads)

    def attend(self, x, cached, cos, sin):
        k, v = cached
        q = self.rope.apply_rope(_split(self.query(x), self.heads), cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads < self.heads)
        return self.out(_merge(o))

    def attend_absorbed(self, x, cached, cos, sin):
        raise ValueError(f"absorbed=True needs a latent; this net has {self.kv_heads} key-value heads")


class Latent(nn.Module):
    """Latent attention. Cached: the normed latent (B, 1, S, kv_rank), the rotated key (B, 1, S, rope_dim)."""

    def __init__(self, spec):
        super().__init__()
        d, m, self.heads, self.mla = spec.d_model, spec.mla, spec.heads, spec.mla
        self.rope = Rope(m.rope_dim, theta=spec.rope_theta)
        self.query = nn.Linear(d, spec.heads * m.qk_dim, bias=False)
        self.compress = nn.Linear(d, m.width, bias=False)
        self.norm = nn.RMSNorm(m.kv_rank, eps=spec.norm_eps)
        self.key = nn.Linear(m.kv_rank, spec.heads * m.nope_dim, bias=False)
        self.value = nn.Linear(m.kv_rank, spec.heads * m.v_dim, bias=False)
        self.out = nn.Linear(spec.heads * m.v_dim, d, bias=False)

    def cached(self, x, cos, sin):
        latent, shared = self.compress(x)[:, None].split([self.mla.kv_rank, self.mla.rope_dim], -1)
        return self.norm(latent), self.rope.apply_rope(shared, cos, sin)

    def attend(self, x, cached, cos, sin):
        """Each head's key and value are projected from the latent, for every token."""
        latent, shared = cached
        nope, rotated = self._queries(x, cos, sin)
        k = torch.cat([_split(self.key(latent[:, 0]), self.heads), shared.expand(-1, self.heads, -1, -1)], -1)
        v = _split(self.value(latent[:, 0]), self.heads)
        o = F.scaled_dot_product_attention(torch.cat([nope, rotated], -1), k, v, is_causal=True)
        return self.out(_merge(o))

    def attend_absorbed(self, x, cached, cos, sin):
        """The query goes into the latent's space, and the mean latent comes out of it: no key, no value."""
        latent, shared = cached
        H, m = self.heads, self.mla
        nope, rotated = self._queries(x, cos, sin)
        q = torch.cat([nope @ self.key.weight.view(H, m.nope_dim, m.kv_rank), rotated], -1)
        k = torch.cat([latent, shared], -1)  # all that is cached: (B, 1, S, kv_rank + rope_dim)
        scale = m.qk_dim**-0.5
        o = F.scaled_dot_product_attention(q, k, latent, is_causal=True, scale=scale, enable_gqa=True)
        return self.out(_merge(o @ self.value.weight.view(H, m.v_dim, m.kv_rank).mT))

    def _queries(self, x, cos, sin):
        nope, rotated = _split(self.query(x), self.heads).split([self.mla.nope_dim, self.mla.rope_dim], -1)
        return nope, self.rope.apply_rope(rotated, cos, sin)


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, S, heads * D) -> (B, heads, S, D)"""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    """(B, heads, S, D) -> (B, S, heads * D)"""
    return x.transpose(1, 2).flatten(2)


def rounded(x: Float[Tensor, "B H S D"], name: str) -> Float[Tensor, "B H S D"]:
    """x as read back from a cache in `name`, one of CODECS: one scale for the D numbers of a token's head."""
    c = _per_token(name, x.shape[-1])
    return c.dequantize(c.quantize(x))


def cache_bits(spec: ModelSpec, name: str | None) -> int:
    """Bits that one token's cache takes in one layer, scales and minima included; None: 16 per number."""
    if name is None:
        return 16 * spec.cached_width
    m = spec.mla
    widths = (m.kv_rank, m.rope_dim) if m else (spec.head_dim, spec.v_head_dim) * spec.kv_heads
    return sum(8 * _per_token(name, w).quantize(torch.zeros(1, w)).nbytes for w in widths)


def _per_token(name: str, width: int):
    return codec(choice("codec", name, CODECS), group=width)


def sequences(
    count: int, pairs: int, generator: torch.Generator, *, held_out: bool
) -> tuple[Int[Tensor, "count S"], Int[Tensor, "count pairs"]]:
    """Ids (count, 3 * pairs) and answers (count, pairs), those that belong at the last `pairs` positions.

    Keys are ids 0 to 31, distinct within a sequence; values are 32 to 63, drawn freely. held_out: sequences
    whose values sum to a multiple of 8; the others are for training, so that no sequence is ever in both.
    Raises ValueError for more pairs than there are keys.
    """
    whole("pairs", pairs, 1, KEYS)
    parts, have = [], 0
    while have < count:
        draw = math.ceil((count - have) * (HELD_OUT if held_out else 1) * 1.3) + 8
        values = torch.randint(VALUES, (draw, pairs), generator=generator)
        values = values[(values.sum(1) % HELD_OUT == 0) == held_out]
        parts.append(values)
        have += len(values)
    values = torch.cat(parts)[:count] + KEYS
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, :pairs]
    order = torch.rand(count, pairs, generator=generator).argsort(1)
    listed = torch.stack([keys, values], -1).flatten(1)
    return torch.cat([listed, keys.gather(1, order)], 1), values.gather(1, order)


def positions(pairs: int, gap: int = 0) -> Int[Tensor, " S"]:
    """Positions of the tokens of a sequence, with `gap` unused ones between the pairs and the questions."""
    at = torch.arange(3 * pairs)
    return torch.where(at < 2 * pairs, at, at + gap)


@torch.no_grad()
def accuracy(
    net: RecallNet,
    ids: Int[Tensor, "B S"],
    answers: Int[Tensor, "B N"],
    *,
    gap: int = 0,
    codec: str | None = None,
    absorbed: bool = False,
    chunk: int = 256,
) -> float:
    """The fraction of questions whose likeliest next token is the right value."""
    n, right = answers.shape[1], 0
    for i in range(0, len(ids), chunk):
        logits = net(ids[i : i + chunk], positions(n, gap), codec=codec, absorbed=absorbed, last=n)
        right += int((logits.argmax(-1) == answers[i : i + chunk]).sum())
    return right / answers.numel()


def save_states(states: dict[str, dict[str, Tensor]], path: Path) -> None:
    """Write state dicts by name, in float16."""
    from safetensors.torch import save_file

    save_file({f"{name}/{k}": t.half() for name, state in states.items() for k, t in state.items()}, path)


def load_state(kind: str, name: str, path: Path) -> dict[str, Tensor]:
    """One of them in float32; ValueError, with the names, for one that is not stored. kind: what it is of."""
    from safetensors.torch import load_file

    weights = load_file(path)
    mine = {k.split("/")[1]: t.float() for k, t in weights.items() if k.startswith(f"{name}/")}
    if not mine:
        there = ", ".join(sorted({k.split("/")[0] for k in weights}))
        raise ValueError(f"{kind} {name!r} is not stored; there are: {there}")
    return mine


def save_nets(nets: dict[str, RecallNet], path: Path = WEIGHTS) -> None:
    """Write the weights of nets, by name of their variant, in float16."""
    save_states({name: net.state_dict() for name, net in nets.items()}, path)


def load_net(name: str, path: Path = WEIGHTS) -> RecallNet:
    """A stored trained net in float32, by the name of its variant; ValueError for one that is not stored."""
    state = load_state("net", name, path)
    net = RecallNet(VARIANTS[name])
    net.load_state_dict(state)
    return net.eval()
