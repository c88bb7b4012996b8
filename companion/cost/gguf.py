"""A GGUF file's model: the shape from its header, the bytes of its weights from its tensor table.

Only the header is read, with the standard library alone; `companion.model.gguf` reads the numbers too. The
count of parameters that follows from the shape has to equal the elements in the table, or the file is
refused: a header that means something else than is understood here never becomes a figure.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; sizes of blocks: ggml's `GGML_QUANT_SIZES`.
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
from .spec import ModelSpec

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# type id: name, numbers per block, bytes per block
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip

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
    header = _Reader(path).header()
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
        header.tensors.update(_Reader(other).header().tensors)
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


class _Reader:
    """Reads one file's header; every read is checked against the file's length."""

    def __init__(self, path: Path):
        self.path, self.at = path, 0

    def header(self) -> Header:
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < 24:
                    raise self.bad("too short for a GGUF header")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self.map:
                    return self._header()
        except struct.error:
            raise self.bad("truncated inside the header") from None
        except OSError as error:
            raise ValueError(f"{self.path}: {error.strerror or error}") from None

    def bad(self, why: str) -> ValueError:
        return ValueError(f"{self.path.name}: {why}")

    def _header(self) -> Header:
        if self.map[:4] != b"GGUF":
            raise self.bad("not a GGUF file (its first four bytes differ)")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise self.bad(f"GGUF version {version}; accepted: 2, 3")
        tensors, pairs = self.scalar("Q"), self.scalar("Q")
        self.fits(tensors * 24 + pairs * 13, f"{tensors} tensors and {pairs} keys")
        header = Header(self.path)
        for _ in range(pairs):
            key = self.string()
            header.meta[key] = self.value(self.scalar("I"))
        for _ in range(tensors):
            name, dims = self.string(), self.scalar("I")
            if dims > 4:
                raise self.bad(f"tensor {name!r} has {dims} dimensions; at most 4")
            shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
            kind, _ = self.scalar("I"), self.scalar("Q")
            if kind not in TYPES:
                raise self.bad(f"tensor {name!r} has type {kind}, whose size is not known here")
            if (shape[-1] if shape else 1) % TYPES[kind][1]:
                raise self.bad(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {TYPES[kind][1]}")
            if name in header.tensors:
                raise self.bad(f"tensor {name!r} stands in the table twice")
            header.tensors[name] = shape, kind
        return header

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY or depth > 3:
            raise self.bad(f"corrupted: value of type {kind}")
        inner, n = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[inner])
            self.fits(n * size, f"an array of {n}")
            values = list(struct.unpack_from(f"<{n}{_SCALARS[inner]}", self.map, self.at))
            self.at += n * size
            return values
        self.fits(n * 8, f"an array of {n}")
        if inner == _STRING:  # a vocabulary: passed over
            for _ in range(n):
                length = self.scalar("Q")
                self.fits(length, f"a string of {length} bytes")
                self.at += length
            return n
        return [self.value(inner, depth + 1) for _ in range(n)]

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.map, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.fits(length, f"a string of {length} bytes")
        raw = self.map[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("corrupted: a string is not UTF-8") from None

    def fits(self, n: int, what: str) -> None:
        if self.at + n > len(self.map):
            raise self.bad(f"truncated or corrupted: {what} cannot fit in {len(self.map)} bytes")
