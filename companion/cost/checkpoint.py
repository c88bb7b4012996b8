"""From a checkpoint to a model: a name, a configuration, a folder with one, a GGUF file.

Of a GGUF file only the header is read. The count of parameters that follows from its shape has to equal the
elements in its table, or it is refused: a header that means something else than is understood here never
becomes a figure. And `find_source` is stricter than `ModelSpec.from_config`, which counts a family that it
does not know as one like Llama: here such a file is refused unless the reader says which one it is like.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checks import plain
from ..formats import FP8, MXFP4
from .answer import units
from .config import language_model, read_config
from .families import CHECKED, LATENT, SAME_AS, SPARSE
from .gguf import read_header
from .memory import parameters
from .registry import models
from .spec import ModelSpec

# GGUF's architecture: the model type whose configuration means the same
FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
}
_WHOLE_HEADS = ("llama", "mistral", "qwen2", "qwen3")  # rotated over their whole width
# configuration's field: GGUF's key below the architecture
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
}


def read_gguf(path: str | os.PathLike) -> tuple[ModelSpec, int]:
    """The model of a GGUF file (the first part of a divided one), and the bytes of its weights as stored.

    Raises ValueError, naming the file, for what is no whole header, for an architecture that is not known
    here, and where shape and tensors disagree.
    """
    header = read_header(path)
    shapes = {name: shape for name, (shape, _) in header.tensors.items()}
    spec = gguf_spec(header.meta, shapes, file=header.path.name, name=header.path.stem)
    if parameters(spec) != header.elements:
        raise ValueError(
            f"{header.path.name}: its keys describe {parameters(spec):,} parameters, its tensors hold "
            f"{header.elements:,}; not a model that is understood here"
        )
    return spec, header.nbytes


def gguf_spec(
    meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, file: str, name: str
) -> ModelSpec:
    """The shape of a GGUF model, through the parser of configurations.

    meta    the header's keys and values; shapes: of the tensors, row-major
    file    what errors call it; name: what the model is called

    Raises ValueError, naming the file, for an architecture that is not known here and for what is missing.
    """
    arch = meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise ValueError(
            f"{file}: architecture={arch!r} is not counted in GGUF; accepted: {', '.join(FAMILIES)}"
        )

    def key(k: str) -> Any:
        value = meta.get(f"{arch}.{k}")
        if isinstance(value, list):  # a value per layer
            if len(set(value)) != 1:
                raise ValueError(f"{file}: {arch}.{k} differs from layer to layer, which is not counted")
            value = value[0]
        return value

    config = {f: value for f, k in _KEYS.items() if (value := key(k)) is not None}
    table = shapes.get("token_embd.weight")
    if table is None or len(table) != 2:
        raise ValueError(f"{file}: no matrix 'token_embd.weight'")
    kind = FAMILIES[arch]
    if kind == "llama" and config.get("num_experts"):
        kind = "mixtral"
    if kind == "gpt_oss":
        config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
        config["moe_intermediate_size"] = config.get("moe_intermediate_size") or config["intermediate_size"]
    if kind == "deepseek_v2":
        _latent(file, config, key)
        if f"blk.{config.get('first_k_dense_replace', 0)}.exp_probs_b.bias" in shapes:
            kind = "deepseek_v3"
            groups, used = key("expert_group_count") or 1, key("expert_group_used_count") or 1
            config |= {"n_group": groups, "topk_group": used}
    if "head_dim" not in config and kind in _WHOLE_HEADS:
        config["head_dim"] = key("rope.dimension_count")
    config |= {
        "model_type": kind,
        "vocab_size": table[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    try:
        return ModelSpec.from_config(config, name=name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _latent(file: str, config: dict, key: Any) -> None:
    """Widths of latent attention: newer files name them, older ones keep the widths of expanded heads."""
    rope = key("rope.dimension_count")
    width, value = key("attention.key_length_mla"), key("attention.value_length_mla")
    if width is None:
        width, value = key("attention.key_length"), key("attention.value_length")
    if not all(isinstance(x, int) for x in (rope, width, value)):
        raise ValueError(f"{file}: the widths of latent attention are missing")
    config.pop("head_dim", None)
    config["num_key_value_heads"] = config.get("num_attention_heads")
    config |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": width - rope, "v_head_dim": value}
    config.setdefault("q_lora_rank", None)


INDEX = "model.safetensors.index.json"
# How a configuration's quantization_config is served: formats of the weights and of the routed experts.
_STORED: dict[str, dict[str, Any]] = {
    "fp8": {"weights": FP8.name},
    "mxfp4": {"experts": MXFP4.name},
}


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
    if plain(text) in models:
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
    spec = ModelSpec.from_config(language, name=stem)
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
