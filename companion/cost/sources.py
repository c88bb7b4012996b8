"""Where a model comes from on the command line: a name, a configuration, a folder with one, a GGUF file.

Stricter than `ModelSpec.from_config`, which counts a family that it does not know as one like Llama: here a
file of such a family is refused unless the reader says which known one it is like.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .config import parse_config
from .counts import parameters
from .families import CHECKED, LATENT, SAME_AS, SPARSE
from .gguf import read_gguf
from .notes import units
from .reader import language_model, read_config
from .registry import _plain, models
from .spec import ModelSpec

INDEX = "model.safetensors.index.json"
# How a configuration's quantization_config is served: formats of the weights and of the routed experts.
_STORED: dict[str, dict[str, Any]] = {"fp8": {"weights": "fp8"}, "mxfp4": {"experts": "mxfp4"}}


@dataclass(frozen=True)
class Source:
    """A model, the arguments of `size` that say how its weights are stored, and what to tell of both."""

    spec: ModelSpec
    stored: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find_source(text: str, *, like: str | None = None) -> Source:
    """The model that `text` names.

    text  a name of `companion.cost.models`; a path to config.json, to a folder that holds one, or to a .gguf
          file
    like  a family whose layers those of the configuration are like, where its own is not known

    Raises ValueError (UnknownName with the near names) for what cannot be read, or cannot be counted.
    """
    if _plain(text) in models:
        if like is not None:
            raise ValueError(f"--like goes with a configuration; {text!r} is known by name")
        return Source(models[text])
    path = Path(text).expanduser()
    if text.lower().endswith(".gguf"):
        return _gguf(path, like)
    if not (text.endswith(".json") or text.startswith((".", "~", os.sep)) or (text and path.exists())):
        models[text]  # raises, with the near names
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        first = [f for f in files if "-00001-of-" in f.name] or files
        if len(first) == 1:
            return _gguf(first[0], like)
        what = "no config.json" if not files else f"no config.json and {len(files)} GGUF files; name one"
        raise ValueError(f"{path}: {what}")
    return _config(path, like)


def _gguf(path: Path, like: str | None) -> Source:
    if like is not None:
        raise ValueError("--like goes with a configuration; a GGUF file names its architecture")
    spec, held = read_gguf(path)
    bits = 8 * held / parameters(spec)
    return Source(spec, {"weights_bytes": held}, (f"weights as stored in {path.name}: {bits:.2f} bits each",))


def _config(path: Path, like: str | None) -> Source:
    data, stem = read_config(path)
    language = language_model(data)
    if like is not None:
        family = SAME_AS.get(like, like)
        if family not in CHECKED:
            near = difflib.get_close_matches(like, sorted(CHECKED), n=4, cutoff=0.4)
            raise ValueError(
                f"--like {like!r} is not a known family; near: {', '.join(near or sorted(CHECKED))}"
            )
        language = {**language, "model_type": family}
    spec = parse_config(language, name=stem)
    _check_family(spec)
    notes = (
        []
        if like is None
        else [f"counted as a {like}, as told: {data.get('model_type')!r} is not known here"]
    )
    if language is not data and any(isinstance(v, dict) and "vision" in k for k, v in data.items()):
        notes.append("the language model alone: a vision tower is not counted")
    folder = path if path.is_dir() else path.parent
    stored, told = _stored(spec, {**data, **language}, folder)
    return Source(spec, stored, (*notes, *told))


def _check_family(spec: ModelSpec) -> None:
    family = SAME_AS.get(spec.architecture, spec.architecture)
    if family not in CHECKED:
        near = difflib.get_close_matches(family, sorted(CHECKED), n=3, cutoff=0.5)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(
            f"config of {spec.name!r}: model_type {family!r} is not a family whose layers are known "
            f"here{hint}. If they are like those of one that is, say so: --like llama"
        )
    if spec.mla and family not in LATENT:
        raise ValueError(f"config of {spec.name!r}: kv_lora_rank is set, but {family!r} caches no latent")
    if spec.moe and family not in SPARSE:
        raise ValueError(f"config of {spec.name!r}: experts are set, but {family!r} has none")


def _stored(spec: ModelSpec, config: dict, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """How the checkpoint stores its weights: its index's total, else what the configuration says."""
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    total = _index_total(folder)
    if total is not None:
        notes = [f"weights as {INDEX} says: {units(total)}"]
        counted = 2 * parameters(spec)
        if method is None and abs(total / counted - 1) > 0.02:
            notes.append(
                f"which is {total / counted:.2f} times the {units(counted)} of the language model in bf16"
            )
        return {"weights_bytes": total}, notes
    if method is None:
        return {}, []
    if method in _STORED:
        return dict(_STORED[method]), [f"weights as the configuration says: {method}"]
    raise ValueError(
        f"config of {spec.name!r}: quantization_config says {method!r}, whose bits are not known here; "
        "give --weights"
    )


def _index_total(folder: Path) -> int | None:
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        total = json.loads(path.read_text(encoding="utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: no metadata.total_size; give --weights") from None
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise ValueError(f"{path}: metadata.total_size must be a positive integer, got {total!r}")
    return total


def with_weights(source: Source) -> Source:
    """The same model without what is known of its storage: the reader gives the format."""
    return replace(source, stored={}, notes=tuple(n for n in source.notes if "weights as" not in n))
