"""What a sweep compares on this machine: one decoder, two that differ in one thing, or a transformers model.

A transformers model comes from a folder, or from what Hugging Face's tools have downloaded. It is run by
transformers itself, with its own cache: what is measured is what its user has. The companion reads its
configuration only, to predict with. Nothing is downloaded: a sweep that begins by fetching 16 GB is no
measurement, and a machine without a network can take one.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..checks import near_names
from ..cost import ModelSpec, cached_values, parameters
from ..formats import dtype_name
from ..model import Decoder, quantize_weights
from ..model.load import check_device
from .local import DecoderTarget, Variant, as_mixture, random_decoder, with_heads
from .points import PAIRS, Shape

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
    return {full: Variant(decoder), few: Variant(decoder, "quantized", CODEC, kv=round(bits, 3))}


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
    local = {"local_files_only": True}
    where = str(path) if path.exists() else name
    try:
        config = transformers.AutoConfig.from_pretrained(where, **local)
        spec = ModelSpec.from_config(config.to_dict(), name=path.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **local)
    except Exception as e:  # a library's own errors, some of them pages long
        raise ValueError(f"transformers: {name}: {_first_sentence(e)}") from None
    quantized = getattr(config, "quantization_config", None)
    try:
        model = model if quantized else model.to(device)
    except (RuntimeError, ValueError) as e:  # no room for it
        raise ValueError(f"transformers: {name}: {_first_sentence(e)}") from None
    own = dtype_name(dtype)
    return model.eval(), Shape(spec, bits_held(model, spec) if quantized else own, own, own)


def bits_held(model: nn.Module, spec: ModelSpec) -> float:
    """Bits per parameter that the model's tensors take, scales included."""
    held = sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    return round(8 * held / parameters(spec), 3)


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


def _first_sentence(e: Exception) -> str:
    text = " ".join(str(e).split()) or type(e).__name__
    return text.split(". ")[0][:240]
