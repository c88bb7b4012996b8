"""Random weights of any supported shape, made when they are asked for: something to split where no files are.

Every rank makes the same ones from a seed, so nothing has to be sent, and no rank holds more than it keeps.
"""

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..cost import ModelSpec
from ..model.experts import interleaved
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
        yield f"{place}experts.gate_up_proj", (m.experts, d, 2 * m.ffn)
        yield f"{place}experts.gate_up_proj_bias", (m.experts, 2 * m.ffn)
        yield f"{place}experts.down_proj", (m.experts, m.ffn, d)
        yield f"{place}experts.down_proj_bias", (m.experts, d)
    else:
        for e in range(m.experts):
            yield from _feed_forward(f"{place}experts.{e}.", d, m.ffn, False)
    if m.shared:
        yield from _feed_forward(f"{place}shared_experts.", d, m.shared_ffn, False)
