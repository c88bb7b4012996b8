"""Targets on this machine: the companion's own decoder, and a transformers model, on any torch device."""

import inspect
import random
import statistics
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..caches import Cache, make_cache
from ..cost import ModelSpec, matmul_parameters, models
from ..formats import dtype_name
from ..model import Decoder
from ..parallel.weights import RandomWeights
from .points import SUFFIX, Point, Run, Shape
from .probes import Stopwatch


@dataclass
class Variant:
    """A decoder with a kind of cache. cache_options: for `make_cache`. kv: what it stores, or bits."""

    decoder: Decoder
    cache: str = "contiguous"
    cache_options: dict = field(default_factory=dict)
    kv: str | float | None = None

    def shape(self) -> Shape:
        """What is read in a step: the model, and in which formats."""
        own, quantized = dtype_name(self.decoder.dtype), self.decoder.weight_format is not None
        weights = _bits_read(self.decoder) if quantized else own
        return Shape(self.decoder.spec, weights, self.kv or own, own)

    def empty(self, batch: int, max_tokens: int) -> Cache:
        """A fresh cache of this variant's kind."""
        d = self.decoder
        return make_cache(
            self.cache, d.spec, batch=batch, max_tokens=max_tokens, dtype=d.dtype, device=d.device,
            **self.cache_options,
        )  # fmt: skip


def _bits_read(decoder: Decoder) -> float:
    """Bits per weight that a step reads, as allocated: scales, and what is not quantized, included."""
    looked_up = 0 if decoder.output is decoder.embedding else decoder.embedding.nbytes
    read = decoder.weights_bytes - looked_up
    return round(8 * read / matmul_parameters(decoder.spec, active=False), 3)


class DecoderTarget:
    """The companion's decoder, or several variants of it that are compared.

    variants: by name; a plain Decoder is {"base": ...}. watch: a stopwatch of a test's own.
    """

    def __init__(self, variants: Decoder | dict[str, Variant], *, watch: Stopwatch | None = None):
        if isinstance(variants, Decoder):
            variants = {"base": Variant(variants)}
        self.variants = variants
        self.shapes = {name: v.shape() for name, v in variants.items()}
        self.watch = watch or Stopwatch.on(str(next(iter(variants.values())).decoder.device))

    def describe(self) -> dict:
        """Facts about what is measured, for the study's file: its kind, device and variants."""
        first = next(iter(self.variants.values())).decoder
        return {
            "kind": "companion decoder",
            "device": str(first.device),
            "threads": torch.get_num_threads(),
            "variants": {name: shape.to_dict() for name, shape in self.shapes.items()},
        }

    def warm_up(self) -> None:
        """One short run of each variant, to have what happens only once behind it."""
        for name in self.variants:
            self.measure(Point("warm-up", 8, variant=name, new_tokens=2))

    @torch.inference_mode()
    def measure(self, point: Point) -> Run:
        """One run of `point`; where there is none, the run's `fault` says why."""
        v = self.variants.get(point.variant) or next(iter(self.variants.values()))
        if fault := _too_long(point, v.decoder.spec):
            return Run(fault=fault)
        try:
            return self._measure(v, point)
        except (ValueError, RuntimeError) as e:  # no room for the cache; a cache that does not fit the model
            return Run(fault=_first_line(e))

    def _measure(self, v: Variant, point: Point) -> Run:
        d, ids = v.decoder, _ids(point, v.decoder.spec.vocab)
        cache = v.empty(point.batch, point.context + point.new_tokens)
        ids = torch.tensor(ids, device=d.device)
        ttft, known = None, 0
        if not point.prompt:
            _fill(cache, point.context)
        else:
            if point.variant == "warm" and point.context > SUFFIX:
                known = point.context - SUFFIX
                _read(d, ids[:, :known], cache)
            ttft = self.watch.seconds(lambda: _read(d, ids[:, known:], cache))
        last = ids[:, -1:]
        steps = [self.watch.seconds(lambda: d(last, cache, logits="last")) for _ in range(point.new_tokens)]
        return _run(point, ttft, steps, point.context, known)


class TransformersTarget:
    """A causal language model of transformers: its own forward, with the cache that it makes for itself."""

    def __init__(self, hf_model: torch.nn.Module, shape: Shape, *, watch: Stopwatch | None = None):
        self.model, self.shapes = hf_model.eval(), {"base": shape}
        named = inspect.signature(type(hf_model).forward).parameters
        self._cache = "cache" if "cache" in named else "past_key_values"  # its name until transformers 5
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in named else {}
        self.watch = watch or Stopwatch.on(str(hf_model.device))

    def describe(self) -> dict:
        """Facts about what is measured, for the study's file: its kind, device and variants."""
        shape = self.shapes["base"].to_dict()
        facts = {"kind": "transformers", "model": shape["model"], "class": type(self.model).__name__}
        facts |= {"device": str(self.model.device), "threads": torch.get_num_threads()}
        return facts | {"variants": {"base": shape}}

    def warm_up(self) -> None:
        """One short run of each variant, to have what happens only once behind it."""
        run = self.measure(Point("warm-up", 8, new_tokens=2))
        if run.fault:
            raise ValueError(f"{type(self.model).__name__}: {run.fault}")

    @torch.inference_mode()
    def measure(self, point: Point) -> Run:
        """One run of `point`; where there is none, the run's `fault` says why."""
        if not point.prompt:
            return Run(
                fault="a transformers model reads its prompts: points with prompt=False are not for it"
            )
        if fault := _too_long(point, self.shapes["base"].spec):
            return Run(fault=fault)
        try:
            return self._measure(point)
        except (IndexError, RuntimeError, TypeError, ValueError) as e:  # no room; no such cache
            return Run(fault=_first_line(e))

    def _measure(self, point: Point) -> Run:
        cache = self._empty()
        ids = torch.tensor(_ids(point, self.shapes["base"].spec.vocab), device=self.model.device)

        def forward(ids: Tensor) -> None:
            self.model(ids, use_cache=True, **self._last, **{self._cache: cache})

        known = 0
        if point.variant == "warm" and point.context > SUFFIX:
            known = point.context - SUFFIX
            forward(ids[:, :known])
        ttft = self.watch.seconds(lambda: forward(ids[:, known:]))
        last = ids[:, -1:]
        steps = [self.watch.seconds(lambda: forward(last)) for _ in range(point.new_tokens)]
        seen = cache.get_seq_length()
        if seen != point.context + point.new_tokens:  # else every step would have been one of no context
            return Run(fault=f"its cache holds {seen} tokens after {point.context + point.new_tokens}")
        return _run(point, ttft, steps, point.context, known)

    def _empty(self):
        """What the model makes where it is given none: layers with a window get one there."""
        from transformers import DynamicCache

        if "config" in inspect.signature(DynamicCache.__init__).parameters:  # since transformers 4.56
            return DynamicCache(config=self.model.config)
        return DynamicCache()


def _too_long(point: Point, spec: ModelSpec) -> str | None:
    limit = spec.max_context
    if limit is None or point.context + point.new_tokens <= limit:
        return None
    return f"{point.context} tokens and {point.new_tokens} more; the model takes {limit}"


def _first_line(e: Exception) -> str:
    return (str(e) or type(e).__name__).splitlines()[0][:200]


def _run(point: Point, ttft: float | None, steps: list[float], context: int, known: int) -> Run:
    itl = statistics.median(steps)
    return Run(
        ttft_s=ttft, itl_s=itl, steps_s=steps, context=context, tokens=point.batch * len(steps),
        tokens_per_second=point.batch / itl if itl else None, cached_tokens=known,
    )  # fmt: skip


def _ids(point: Point, vocab: int) -> list[list[int]]:
    """Random ids; the same for the same point, so that a resumed study measures the same."""
    order = random.Random(point.id)
    return [[order.randrange(vocab) for _ in range(point.context)] for _ in range(point.batch)]


def _read(decoder: Decoder, ids: Tensor, cache: Cache) -> None:
    """A prompt in pieces no longer than the cache takes at once."""
    piece = cache.step or ids.shape[1]
    for start in range(0, ids.shape[1], piece):
        decoder(ids[:, start : start + piece], cache, logits="last")


def _fill(cache: Cache, tokens: int) -> None:
    """Random keys and values for `tokens` tokens, in every layer."""
    spec, piece = cache.spec, cache.step or tokens
    heads, width = (1, spec.mla.width) if spec.mla else (spec.kv_heads, spec.head_dim)
    numbers = torch.Generator(cache.device).manual_seed(0)
    make = {"generator": numbers, "dtype": cache.dtype, "device": cache.device}
    for start in range(0, tokens, piece):
        n = min(piece, tokens - start)
        for layer in range(spec.layers):
            keys = torch.randn(cache.batch, heads, n, width, **make)
            values = None if spec.mla else torch.randn(cache.batch, heads, n, spec.v_head_dim, **make)
            cache.append(layer, keys, values)


FAMILIES = ("llama", "mixtral")


def random_decoder(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Decoder:
    """A decoder of this shape, of the Llama or the Mixtral family. Raises ValueError for another."""
    if spec.architecture not in FAMILIES:
        raise ValueError(f"random weights for {spec.architecture}: accepted are {', '.join(FAMILIES)}")
    return Decoder(spec, RandomWeights(spec, seed, dtype=dtype, device=device)).eval()


def with_heads(spec: ModelSpec, kv_heads: int) -> ModelSpec:
    """The same model with another number of key-value heads."""
    return replace(spec, name=f"{spec.name}, {kv_heads} key heads", kv_heads=kv_heads)


def as_mixture(spec: ModelSpec, experts: int, top_k: int) -> ModelSpec:
    """A mixture with as many parameters active per token: an expert has 1 / top_k of the width.

    Raises ValueError if top_k does not divide the feed-forward width.
    """
    if spec.ffn % top_k:
        raise ValueError(f"top_k={top_k} does not divide the feed-forward width {spec.ffn}")
    moe = replace(models["mixtral-8x7b"].moe, experts=experts, top_k=top_k, ffn=spec.ffn // top_k)
    return replace(spec, name=f"{spec.name}, {experts} experts", architecture="mixtral", moe=moe)
