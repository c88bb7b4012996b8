"""The weights of one rank: cut out of a whole model's, or random ones of any supported shape.

Random weights are made when they are asked for, to have something to split where no files are. Every rank
makes the same ones from a seed, so nothing has to be sent, and no rank holds more than it keeps.

A slice is cut out of the whole model while it is asked for. Which way a tensor is cut follows from its name:
matrices that lead into heads or into a feed-forward's width lose rows, those that lead out lose columns,
experts are renumbered, everything else is whole.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..cost import ModelSpec, RoutingSpec, rank_spec
from ..model.blocks import interleaved
from ..model.families import family_of


class RandomWeights(Mapping):
    """Hugging Face's tensor names -> tensors, for `Decoder` and `shard`.

    Matrices are normal with a variance of 1 / inputs, norms are 1 (0 where 1 is added), all else is 0.
    On a GPU the numbers are other ones.
    Attributes: `shapes`, name -> shape; all together they have `companion.cost.parameters(spec)` numbers.
    Raises ValueError for an architecture that is not there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.spec, self.seed, self.like = spec, seed, dict(dtype=dtype, device=device)
        self.shapes: dict[str, tuple[int, ...]] = dict(_shapes(spec))

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if "norm" in name:
            return torch.full(shape, 0.0 if self.spec.norm_plus1 else 1.0, **self.like)
        if len(shape) == 1 or name.endswith("_bias"):
            return torch.zeros(shape, **self.like)
        # The seed of a tensor is its name's: the same on every rank, in whatever order they ask.
        device = self.like["device"]
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        inputs = shape[1] if self.spec.architecture == "gpt_oss" and len(shape) == 3 else shape[-1]
        return (torch.randn(shape, generator=generator, device=device) * inputs**-0.5).to(self.like["dtype"])

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    family, d = family_of(spec), spec.d_model
    yield "model.embed_tokens.weight", (spec.vocab, d)
    yield "model.norm.weight", (d,)
    if not spec.tied:
        yield "lm_head.weight", (spec.vocab, d)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family.sandwich:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(spec.layers):
        here = f"model.layers.{layer}."
        for name in norms:
            yield f"{here}{name}.weight", (d,)
        for name, shape in (_latent if spec.mla else _heads)(spec):
            yield f"{here}self_attn.{name}", shape
        if spec.moe is None or spec.moe.is_dense(layer):
            parts = _feed_forward("mlp.", d, spec.ffn, spec.mlp_bias)
        else:
            parts = _mixture(spec, family.places[0], family.router, family.experts is interleaved)
        for name, shape in parts:
            yield here + name, shape


def _heads(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, d = spec.head_dim, spec.d_model
    for name, heads in (("q_proj", spec.heads), ("k_proj", spec.kv_heads), ("v_proj", spec.kv_heads)):
        yield f"{name}.weight", (heads * D, d)
        if spec.qkv_bias:
            yield f"{name}.bias", (heads * D,)
    yield "o_proj.weight", (d, spec.heads * D)
    if spec.o_bias:
        yield "o_proj.bias", (d,)
    if spec.sinks:
        yield "sinks", (spec.heads,)
    if spec.qk_norm:
        full = spec.qk_norm == "full"
        yield "q_norm.weight", (spec.heads * D if full else D,)
        yield "k_norm.weight", (spec.kv_heads * D if full else D,)


def _latent(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    m, d, H = spec.mla, spec.d_model, spec.heads
    if m.q_rank:
        yield "q_a_proj.weight", (m.q_rank, d)
        yield "q_a_layernorm.weight", (m.q_rank,)
        yield "q_b_proj.weight", (H * m.qk_dim, m.q_rank)
    else:
        yield "q_proj.weight", (H * m.qk_dim, d)
    yield "kv_a_proj_with_mqa.weight", (m.width, d)
    yield "kv_a_layernorm.weight", (m.kv_rank,)
    yield "kv_b_proj.weight", (H * (m.nope_dim + m.v_dim), m.kv_rank)
    yield "o_proj.weight", (d, H * m.v_dim)
    if spec.qkv_bias:
        yield "kv_a_proj_with_mqa.bias", (m.width,)
        if m.q_rank:
            yield "q_a_proj.bias", (m.q_rank,)
    if spec.o_bias:
        yield "o_proj.bias", (d,)


def _feed_forward(place: str, d: int, width: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in (("gate_proj", (width, d)), ("up_proj", (width, d)), ("down_proj", (d, width))):
        yield f"{place}{name}.weight", shape
        if bias:
            yield f"{place}{name}.bias", shape[:1]


def _mixture(spec: ModelSpec, place: str, router: str, fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    m, d = spec.moe, spec.d_model
    yield f"{place}{router}weight", (m.experts, d)
    if m.router_bias:
        yield f"{place}{router}bias", (m.experts,)
    if m.correction_bias:
        yield f"{place}{router}e_score_correction_bias", (m.experts,)
    if fused:  # gpt-oss
        for name, inputs, outputs in (("gate_up_proj", d, 2 * m.ffn), ("down_proj", m.ffn, d)):
            yield f"{place}experts.{name}", (m.experts, inputs, outputs)
            yield f"{place}experts.{name}_bias", (m.experts, outputs)
    else:
        for e in range(m.experts):
            yield from _feed_forward(f"{place}experts.{e}.", d, m.ffn, False)
    if m.shared:
        yield from _feed_forward(f"{place}shared_experts.", d, m.shared_ffn, False)


ROWS = {"q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3"}
KEY_VALUE_ROWS = {"k_proj", "v_proj"}
COLUMNS = {"o_proj", "down_proj", "w2"}
FUSED = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}  # directly below "experts"


class Slices:
    """A function from Hugging Face's tensor names to this rank's part of the tensor, in memory of its own.

    spec, weights: of the whole model. tensor, expert: (rank, ranks). Experts count from 0 on every rank.

    Attributes: `part`, the ModelSpec whose shapes the tensors have: that of `rank_spec`, with as many experts
    as the rank owns. Raises ValueError for ranks that do not divide, and for a tensor that is not there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor] | Callable[[str], Tensor],
        *,
        tensor: tuple[int, int] = (0, 1),
        expert: tuple[int, int] = (0, 1),
    ):
        self.spec, self.weights, self.tensor, self.expert = spec, weights, tensor, expert
        self.family = family_of(spec)
        self.interleaved = self.family.experts is interleaved
        self.part = part = rank_spec(spec, tensor=tensor[1], expert=expert[1])
        if expert[1] > 1:
            m, owned = part.moe, part.moe.experts // expert[1]
            # Routed among the rank's own, this would be nonsense; `shard` puts the model's router there.
            own = {"experts": owned, "top_k": min(m.top_k, owned), "routing": m.routing and RoutingSpec()}
            self.part = replace(part, moe=replace(m, **own))

    def __call__(self, name: str) -> Tensor:
        name = self._renumbered(name)
        x = self.whole(name)
        cut = self._cut(name.split("."), x)  # a view, which would keep the whole tensor in memory
        return cut if cut is x else cut.clone(memory_format=torch.contiguous_format)

    def whole(self, name: str) -> Tensor:
        """The tensor of the whole model. Raises ValueError if there is none."""
        if isinstance(self.weights, Mapping):
            if name not in self.weights:
                raise ValueError(f"{self.spec.name}: weights have no tensor {name!r}")
            return self.weights[name].detach()
        return self.weights(name)

    def router(self, layer: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(matrix, bias or None, correction or None) of a layer's router, whole."""
        for place in self.family.places:
            prefix, m = f"model.layers.{layer}.{place}{self.family.router}", self.spec.moe
            try:
                matrix = self.whole(f"{prefix}weight")
            except ValueError:
                continue
            bias = self.whole(f"{prefix}bias") if m.router_bias else None
            correction = self.whole(f"{prefix}e_score_correction_bias") if m.correction_bias else None
            return matrix, bias, correction
        raise ValueError(f"{self.spec.name}: weights have no router in layer {layer}")

    def _renumbered(self, name: str) -> str:
        """Expert 0 of this rank is another one of the model."""
        head, found, tail = name.partition(".experts.")
        number, dot, rest = tail.partition(".")
        if not (found and dot and number.isdecimal()):
            return name
        first = self.expert[0] * self.part.moe.experts
        return f"{head}.experts.{first + int(number)}.{rest}"

    def _cut(self, path: list[str], x: Tensor) -> Tensor:
        part, kind = path[-2:] if len(path) > 1 else ("", path[-1])
        rank, ranks = self.tensor
        if part == "experts" and kind in FUSED:
            return self._fused(kind, equal(x, 0, *self.expert))
        routers = [self.family.router + end for end in ("weight", "bias", "e_score_correction_bias")]
        if self.family.experts is not None and f"{part}.{kind}" in routers:
            return equal(x, 0, *self.expert)
        if part in COLUMNS:
            return equal(x, 1, rank, ranks) if kind == "weight" else once(x, rank)
        full = self.spec.qk_norm == "full"
        if part in ROWS or kind == "sinks" or (full and part == "q_norm"):
            return equal(x, 0, rank, ranks)
        if part in KEY_VALUE_ROWS or (full and part == "k_norm"):
            copies = max(1, ranks // self.spec.kv_heads)
            return equal(x, 0, rank // copies, ranks // copies)
        return x

    def _fused(self, kind: str, x: Tensor) -> Tensor:
        """All experts in one: (E, 2N, K) and (E, K, N), or transposed with gate and up taking turns."""
        rank, ranks = self.tensor
        if kind == "down_proj_bias":
            return once(x, rank)
        if kind == "down_proj":
            return equal(x, 1 if self.interleaved else 2, rank, ranks)
        if self.interleaved:  # neighbours are a pair, so the columns of a slice of the width lie together
            return equal(x, x.ndim - 1, rank, ranks, pieces_of=2)
        if ranks == 1:
            return x
        return torch.cat([equal(half, 1, rank, ranks) for half in x.chunk(2, dim=1)], dim=1)


def equal(x: Tensor, dim: int, rank: int, ranks: int, *, pieces_of: int = 1) -> Tensor:
    """Part `rank` of `ranks` equal ones along `dim`, a view; x itself if there is one part.

    pieces_of: how many neighbours along `dim` stay together. Raises ValueError for a size that can't be cut.
    """
    if ranks == 1:
        return x
    if x.shape[dim] % (ranks * pieces_of):
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no {ranks} equal parts along dim {dim}")
    size = x.shape[dim] // ranks
    return x.narrow(dim, rank * size, size)


def once(x: Tensor, rank: int) -> Tensor:
    """A bias that all ranks would add: x on the first, zeros elsewhere."""
    return x if rank == 0 else torch.zeros_like(x)
