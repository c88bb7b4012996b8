"""What each sweep compares on this machine: one decoder, or two that differ in one thing."""

from collections.abc import Callable

from ..cost import cached_values
from ..model import Decoder, quantize_weights
from .local import DecoderTarget, Variant
from .random_weights import as_mixture, random_decoder, with_heads
from .settings import PAIRS

EXPERTS, TOP_K = 8, 2
CODEC = {"codec": "int8"}


def targets_here(decoder: Decoder) -> Callable[[str], DecoderTarget]:
    """The target of a sweep by its name. Random decoders have the shape of this one; made when asked for."""
    kept: dict[str, DecoderTarget] = {}
    make = {"kv": _precisions, "weights": _weights, "heads": _heads, "moe": _mixtures}

    def target(sweep: str) -> DecoderTarget:
        key = sweep if sweep in make else "base"
        if key not in kept:
            kept.clear()  # one set of weights at a time
            kept[key] = DecoderTarget(make[sweep](decoder) if sweep in make else decoder)
        return kept[key]

    return target


def _precisions(decoder: Decoder) -> dict[str, Variant]:
    full, few = PAIRS["kv"]
    quantized = Variant(decoder, "quantized", CODEC)
    tokens = 1024
    cache = quantized.empty(1, tokens)
    bits = 8 * cache.nbytes / cached_values(decoder.spec, tokens)  # as allocated, scales and tail included
    return {full: Variant(decoder), few: Variant(decoder, "quantized", CODEC, kv_dtype=round(bits, 3))}


def _weights(decoder: Decoder) -> dict[str, Variant]:
    """The weights in few bits, and the cache of both as it was."""
    full, few = PAIRS["weights"]
    return {full: Variant(decoder), few: Variant(quantize_weights(decoder))}


def _heads(decoder: Decoder) -> dict[str, Variant]:
    grouped, full = PAIRS["heads"]
    spec, like = decoder.spec, {"dtype": decoder.dtype, "device": decoder.device}
    if spec.kv_heads == spec.heads:
        raise ValueError(
            f"sweeps: {spec.name} has full heads already; 'heads' compares grouped ones with them"
        )
    return {
        grouped: Variant(random_decoder(spec, **like)),
        full: Variant(random_decoder(with_heads(spec, spec.heads), **like)),
    }


def _mixtures(decoder: Decoder) -> dict[str, Variant]:
    dense, mixture = PAIRS["moe"]
    spec, like = decoder.spec, {"dtype": decoder.dtype, "device": decoder.device}
    return {
        dense: Variant(random_decoder(spec, **like)),
        mixture: Variant(random_decoder(as_mixture(spec, EXPERTS, TOP_K), **like)),
    }
