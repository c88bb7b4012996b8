"""A GGUF file's model: the shape from its header, the bytes of its weights from its tensor table.

Only the header is read, with the standard library alone; `companion.model.gguf` reads the numbers too. The
count of parameters that follows from the shape has to equal the elements in the table, or the file is
refused: a header that means something else than is understood here never becomes a figure.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import parse_config
from .counts import parameters
from .gguf_header import SHORTEST, TYPES, HeaderBytes
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
_NOT_PARAMETERS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass
class Header:
    """meta: keys and values, an array of strings as its length. tensors: name -> (row-major shape, type)."""

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Parameters in the table: all elements but the tables of frequencies."""
        return sum(
            math.prod(shape) for name, (shape, _) in self.tensors.items() if not _NOT_PARAMETERS.match(name)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(
            math.prod(shape) // TYPES[kind][1] * TYPES[kind][2] for shape, kind in self.tensors.values()
        )


def read_gguf(path: str | os.PathLike) -> tuple[ModelSpec, int]:
    """The model of a GGUF file (the first part of a divided one), and the bytes of its weights as stored.

    Raises ValueError, naming the file, for what is no whole header, for an architecture that is not known
    here, and where shape and tensors disagree.
    """
    header = read_header(path)
    spec = _spec(header)
    if parameters(spec) != header.elements:
        raise ValueError(
            f"{header.path.name}: its keys describe {parameters(spec):,} parameters, its tensors hold "
            f"{header.elements:,}; not a model that is understood here"
        )
    return spec, header.nbytes


def read_header(path: str | os.PathLike) -> Header:
    """The header of a file, with the tensors of all its parts."""
    path = Path(path)
    header = _read(path)
    parts = header.meta.get("split.count", 0)
    if not isinstance(parts, int) or parts <= 1:
        return header
    match = _PART.search(path.name)
    if match is None or int(match[2]) != parts or int(match[1]) != 1:
        raise ValueError(
            f"{path.name}: one of {parts} parts; give the first, named ...-00001-of-{parts:05}.gguf"
        )
    for i in range(2, parts + 1):
        other = path.with_name(path.name[: match.start()] + f"-{i:05}-of-{parts:05}.gguf")
        header.tensors.update(_read(other).tensors)
    return header


def _spec(header: Header) -> ModelSpec:
    name, arch = header.path.name, header.meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise ValueError(
            f"{name}: architecture={arch!r} is not counted in GGUF; accepted: {', '.join(FAMILIES)}"
        )

    def key(k: str) -> Any:
        value = header.meta.get(f"{arch}.{k}")
        if isinstance(value, list):  # a value per layer
            if len(set(value)) != 1:
                raise ValueError(f"{name}: {arch}.{k} differs from layer to layer, which is not counted")
            value = value[0]
        return value

    config = {f: value for f, k in _KEYS.items() if (value := key(k)) is not None}
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table[0]) != 2:
        raise ValueError(f"{name}: no matrix 'token_embd.weight'")
    kind = FAMILIES[arch]
    if kind == "llama" and config.get("num_experts"):
        kind = "mixtral"
    if kind == "gpt_oss":
        config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
        config["moe_intermediate_size"] = config.get("moe_intermediate_size") or config["intermediate_size"]
    if kind == "deepseek_v2":
        _latent(header, config, key)
        if f"blk.{config.get('first_k_dense_replace', 0)}.exp_probs_b.bias" in header.tensors:
            kind = "deepseek_v3"
            groups, used = key("expert_group_count") or 1, key("expert_group_used_count") or 1
            config |= {"n_group": groups, "topk_group": used}
    if "head_dim" not in config and kind == "llama":
        config["head_dim"] = key("rope.dimension_count")
    config |= {
        "model_type": kind,
        "vocab_size": table[0][0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    try:
        return parse_config(config, name=header.path.stem)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _latent(header: Header, config: dict, key: Any) -> None:
    """Widths of latent attention: newer files name them, older ones keep the widths of expanded heads."""
    name, rope = header.path.name, key("rope.dimension_count")
    width, value = key("attention.key_length_mla"), key("attention.value_length_mla")
    if width is None:
        width, value = key("attention.key_length"), key("attention.value_length")
    if not all(isinstance(x, int) for x in (rope, width, value)):
        raise ValueError(f"{name}: the widths of latent attention are missing")
    config.pop("head_dim", None)
    config["num_key_value_heads"] = config.get("num_attention_heads")
    config |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": width - rope, "v_head_dim": value}
    config.setdefault("q_lora_rank", None)


def _read(path: Path) -> Header:
    """The header of one file, without its other parts."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < SHORTEST:
                raise ValueError(f"{path.name}: too short for a GGUF header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(path, HeaderBytes(data, path.name, skip_strings=True))
    except struct.error:
        raise ValueError(f"{path.name}: truncated inside the header") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def _header(path: Path, read: HeaderBytes) -> Header:
    tensors, pairs = read.counts()
    header = Header(path, read.keys(pairs))
    for name, shape, kind, _ in read.table(tensors):
        if kind not in TYPES:
            raise read.bad(f"tensor {name!r} has type {kind}, whose size is not known here")
        read.whole_blocks(name, shape, kind)
        if name in header.tensors:
            raise read.bad(f"tensor {name!r} stands in the table twice")
        header.tensors[name] = shape, kind
    return header
