"""What is measured here, on any torch device: decoders that differ in one thing, or a transformers model.

A transformers model comes from a folder, or from what Hugging Face's tools have downloaded. It is run by
transformers itself, with its own cache: what is measured is what its user has. The companion reads its
configuration only, to predict with. Nothing is downloaded: a sweep that begins by fetching 16 GB is no
measurement, and a machine without a network can take one.
"""

import inspect
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..caches import Cache, make_cache
from ..checks import near_names
from ..cost import ModelSpec, cached_values, matmul_parameters, parameters
from ..formats import dtype_name
from ..model import Decoder, quantize_weights
from ..model.load import check_device
from ..parallel.weights import RandomWeights
from .points import PAIRS, SUFFIX, Point, Run, Shape, as_mixture, with_heads
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
        d, own = self.decoder, dtype_name(self.decoder.dtype)
        weights: str | float = own
        if d.weight_format is not None:  # bits as allocated: scales, and what is not quantized, included
            looked_up = 0 if d.output is d.embedding else d.embedding.nbytes
            read = d.weights_bytes - looked_up
            weights = round(8 * read / matmul_parameters(d.spec, active=False), 3)
        return Shape(d.spec, weights, self.kv or own, own)

    def empty(self, batch: int, max_tokens: int) -> Cache:
        """A fresh cache of this variant's kind."""
        d = self.decoder
        return make_cache(
            self.cache, d.spec, batch=batch, max_tokens=max_tokens, dtype=d.dtype, device=d.device,
            **self.cache_options,
        )  # fmt: skip


class LocalTarget:
    """What both kinds of target share: facts, limits, and the order of what is timed."""

    faults: tuple[type[Exception], ...] = (RuntimeError, ValueError)  # no room; no such cache for this model

    def __init__(self, facts: dict, shapes: dict[str, Shape], device: torch.device, watch: Stopwatch | None):
        self.facts, self.shapes, self.device = facts, shapes, device
        self.watch = watch or Stopwatch.on(str(device))

    def describe(self) -> dict:
        """Facts about what is measured, for the study's file: its kind, device and variants."""
        return self.facts | {
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "variants": {name: shape.to_dict() for name, shape in self.shapes.items()},
        }

    def warm_up(self) -> None:
        """One short run of each variant, to have what happens only once behind it."""
        for name in self.shapes:
            self.measure(Point("warm-up", 8, variant=name, new_tokens=2))

    @torch.inference_mode()
    def measure(self, point: Point) -> Run:
        """One run of `point`; where there is none, the run's `fault` says why."""
        spec = (self.shapes.get(point.variant) or next(iter(self.shapes.values()))).spec
        if spec.max_context is not None and point.context + point.new_tokens > spec.max_context:
            asked = f"{point.context} tokens and {point.new_tokens} more"
            return Run(fault=f"{asked}; the model takes {spec.max_context}")
        try:
            return self._measure(point, spec)
        except self.faults as e:
            return Run(fault=_short(e))

    def _measure(self, point: Point, spec: ModelSpec) -> Run:
        forward, cache = self._begin(point)
        order = random.Random(point.id)  # the same ids for the same point: a resumed study measures the same
        rows = [[order.randrange(spec.vocab) for _ in range(point.context)] for _ in range(point.batch)]
        ids, ttft, known = torch.tensor(rows, device=self.device), None, 0
        if not point.prompt:
            _fill(cache, point.context)
        else:
            if point.variant == "warm" and point.context > SUFFIX:
                known = point.context - SUFFIX
                forward(ids[:, :known])
            ttft = self.watch.seconds(lambda: forward(ids[:, known:]))
        last = ids[:, -1:]
        steps = [self.watch.seconds(lambda: forward(last)) for _ in range(point.new_tokens)]
        held = len(cache) if isinstance(cache, Cache) else cache.get_seq_length()
        if held != point.context + point.new_tokens:  # else every step would have been one of no context
            return Run(fault=f"its cache holds {held} tokens after {point.context + point.new_tokens}")
        itl = statistics.median(steps)
        return Run(
            ttft_s=ttft, itl_s=itl, steps_s=steps, context=point.context, tokens=point.batch * len(steps),
            tokens_per_second=point.batch / itl if itl else None, cached_tokens=known,
        )  # fmt: skip

    def _begin(self, point: Point) -> tuple[Callable[[Tensor], object], object]:
        """(what passes ids through the model, the fresh cache that it fills)."""
        raise NotImplementedError


class DecoderTarget(LocalTarget):
    """The companion's decoder, or several variants of it that are compared: `describe`, `warm_up`, `measure`.

    variants: by name; a plain Decoder is {"base": ...}. watch: a stopwatch of a test's own.
    """

    def __init__(self, variants: Decoder | dict[str, Variant], *, watch: Stopwatch | None = None):
        self.variants = {"base": Variant(variants)} if isinstance(variants, Decoder) else variants
        shapes = {name: v.shape() for name, v in self.variants.items()}
        device = next(iter(self.variants.values())).decoder.device
        super().__init__({"kind": "companion decoder"}, shapes, device, watch)

    def _begin(self, point: Point):
        v = self.variants.get(point.variant) or next(iter(self.variants.values()))
        cache = v.empty(point.batch, point.context + point.new_tokens)

        def forward(ids: Tensor) -> None:
            piece = cache.step or ids.shape[1]  # a prompt in pieces no longer than the cache takes at once
            for start in range(0, ids.shape[1], piece):
                v.decoder(ids[:, start : start + piece], cache, logits="last")

        return forward, cache


class TransformersTarget(LocalTarget):
    """A causal model of transformers, with the cache that it makes for itself: `describe`, `measure`."""

    faults = (IndexError, RuntimeError, TypeError, ValueError)

    def __init__(self, hf_model: nn.Module, shape: Shape, *, watch: Stopwatch | None = None):
        self.model, self.name = hf_model.eval(), type(hf_model).__name__
        facts = {"kind": "transformers", "model": shape.spec.name, "class": self.name}
        super().__init__(facts, {"base": shape}, hf_model.device, watch)
        named = inspect.signature(type(hf_model).forward).parameters
        self._cache = "cache" if "cache" in named else "past_key_values"  # its name until transformers 5
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in named else {}

    def warm_up(self) -> None:
        """One short run, to have what happens only once behind it. Raises ValueError if it has a fault."""
        if fault := self.measure(Point("warm-up", 8, new_tokens=2)).fault:
            raise ValueError(f"{self.name}: {fault}")

    def _begin(self, point: Point):
        from transformers import DynamicCache

        if not point.prompt:
            raise ValueError("a transformers model reads its prompts: prompt=False is not for it")
        # What the model makes where it is given none: layers with a window get one there, since 4.56.
        takes = inspect.signature(DynamicCache.__init__).parameters
        cache = DynamicCache(**({"config": self.model.config} if "config" in takes else {}))
        return (lambda ids: self.model(ids, use_cache=True, **self._last, **{self._cache: cache})), cache


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


def targets_here(decoder: Decoder) -> Callable[[str], DecoderTarget]:
    """The target of a sweep by its name. Random decoders have the shape of this one; made when asked for."""
    kept: dict[str, DecoderTarget] = {}

    def target(sweep: str) -> DecoderTarget:
        key = sweep if sweep in PAIRS else "base"
        if key not in kept:
            kept.clear()  # one set of weights at a time
            kept[key] = DecoderTarget(decoder if key == "base" else _pair(key, decoder))
        return kept[key]

    return target


def _pair(sweep: str, decoder: Decoder) -> dict[str, Variant]:
    """The two variants that a sweep compares."""
    first, second = PAIRS[sweep]
    spec, plain = decoder.spec, Variant(decoder)
    if sweep == "kv":
        few, tokens = Variant(decoder, "quantized", {"codec": "int8"}), 1024
        bits = 8 * few.empty(1, tokens).nbytes / cached_values(spec, tokens)  # scales and tail included
        return {first: plain, second: replace(few, kv=round(bits, 3))}
    if sweep == "weights":
        return {first: plain, second: Variant(quantize_weights(decoder))}
    if sweep == "heads" and spec.kv_heads == spec.heads:
        has = f"{spec.name} has full heads already"
        raise ValueError(f"sweeps: {has}; 'heads' compares grouped ones with them")
    other = with_heads(spec, spec.heads) if sweep == "heads" else as_mixture(spec, experts=8, top_k=2)
    like = {"dtype": decoder.dtype, "device": decoder.device}
    return {first: Variant(random_decoder(spec, **like)), second: Variant(random_decoder(other, **like))}


def pretrained(
    name: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[nn.Module, Shape]:
    """(the model, its shape), for `TransformersTarget`.

    name: a folder with config.json and weights, or a name as on the hub ("org/model") that is in the local
    cache. Weights that the checkpoint holds quantized stay so, and are predicted by the bytes that they take.

    Raises ValueError, in one line, where transformers is missing, the name is not known, the architecture is
    none that transformers or companion.cost knows, or the files are not whole.
    """
    check_device(device)
    try:
        import transformers
    except ImportError:
        raise ValueError("transformers is not installed: python -m pip install transformers") from None
    path = Path(name).expanduser()
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"transformers: {name} has no config.json; need a folder that save_pretrained wrote")
    if not path.exists() and name not in (known := cached_names()):
        near = near_names(name, [*known, *_folders_beside(path)])
        like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        fetch = "" if like_a_path else f"; fetch it first, e.g. with: hf download {name}"
        hint = f"; near: {', '.join(near)}" if near else fetch
        raise ValueError(f"transformers: {name!r} is no folder, and not downloaded{hint}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where, local = str(path) if path.exists() else name, {"local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(where, **local)
        spec = ModelSpec.from_config(config.to_dict(), name=path.name)
        quantized = getattr(config, "quantization_config", None)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **local)
        model = model if quantized else model.to(device)
    except Exception as e:  # a library's own errors, some of them pages long
        raise ValueError(f"transformers: {name}: {_short(e)}") from None
    own = dtype_name(dtype)
    return model.eval(), Shape(spec, bits_held(model, spec) if quantized else own, own, own)


def bits_held(model: nn.Module, spec: ModelSpec) -> float:
    """Bits per parameter that the model's tensors take, scales included."""
    return round(8 * sum(x.nbytes for x in [*model.parameters(), *model.buffers()]) / parameters(spec), 3)


def cached_names() -> list[str]:
    """Names of the models in the local cache of huggingface_hub; none where it cannot be read."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return []
    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*/config.json"))
    names = [f.parents[2].name.removeprefix("models--").replace("--", "/") for f in folders]
    return list(dict.fromkeys(names))


def _folders_beside(path: Path) -> list[str]:
    """Folders with a model in the place where `path` would be."""
    try:
        beside = [f.parent for f in path.parent.glob("*/config.json")]
    except OSError:
        return []
    return [os.path.join(path.parent, f.name) if path.parent != Path() else f.name for f in beside]


def _short(e: Exception) -> str:
    """Its first sentence."""
    text = " ".join(str(e).split()) or type(e).__name__
    return text.split(". ")[0][:240]
