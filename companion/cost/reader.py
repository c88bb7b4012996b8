"""Reads a Hugging Face configuration: the file, the part that is the language model, checked fields."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .families import DEFAULTS
from .spec import whole

_NESTED = ("text_config", "language_config", "llm_config")
_ALIASES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions",),
    "hidden_activation": ("hidden_act", "activation_function"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "shared_expert_intermediate_size": ("shared_intermediate_size",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
}


class Reader:
    """Reads checked fields of one configuration, with the family's defaults behind it."""

    def __init__(self, config: Mapping, kind: str, owner: str):
        self.config, self.owner = config, owner
        self.defaults = DEFAULTS.get(kind, {})

    def raw(self, field: str, default: Any = None) -> Any:
        names = [n for n in (field, *_ALIASES.get(field, ())) if n in self.config]
        for name in names:
            if self.config[name] is not None:
                return self.config[name]
        # An explicit null switches a family's default off (Mistral v0.2: "sliding_window": null).
        return None if names else self.defaults.get(field, default)

    def integer(self, field: str, default: Any = ..., *, zero: bool = False) -> Any:
        value = self.raw(field)
        if value is None:
            if default is ...:
                raise ValueError(f"{self.owner}: {field} is missing")
            return default
        for name in (field, *_ALIASES.get(field, ())):
            if self.config.get(name) not in (None, value):
                raise ValueError(f"{self.owner}: {field} is {value!r}, but {name} is {self.config[name]!r}")
        return whole(self.owner, field, value, zero=zero)

    def text(self, field: str, default: str) -> str:
        value = self.raw(field)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{self.owner}: {field} must be a string, got {value!r}")
        return value or default

    def number(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{self.owner}: {field} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.owner}: {field} must be true or false, got {value!r}")
        return value


def read_config(config: Mapping | str | os.PathLike) -> tuple[dict, str | None]:
    """The configuration as a dict, and a name taken from the path (None for a dict)."""
    if isinstance(config, Mapping):
        return dict(config), None
    if not isinstance(config, str | os.PathLike):
        raise ValueError(f"config must be a dict or a path to config.json, got {type(config).__name__}")
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"config: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"config: {path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"config: {path} must hold a JSON object, got {type(data).__name__}")
    stem = path.parent.resolve().name if path.stem == "config" else path.stem
    return data, stem or None


def language_model(config: dict) -> dict:
    """The part that describes the language model; a vision tower is not counted."""
    for key in _NESTED:
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise ValueError(f"config: {key} must be an object, got {inner!r}")
        merged = dict(inner)
        for field in ("model_type", "tie_word_embeddings"):
            if field in config and merged.get(field) is None:
                merged[field] = config[field]
        return merged
    return config
