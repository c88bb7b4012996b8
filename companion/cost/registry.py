"""The tables of models and of hardware, read from JSON files that carry their sources."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from .config import parse_config
from .devices import HardwareSpec
from .spec import ModelSpec

Spec = TypeVar("Spec")
_DATA = Path(__file__).parent / "data"


class UnknownName(KeyError, ValueError):
    """A name that no table holds. Its message lists the near ones."""

    def __str__(self) -> str:  # KeyError would print the message in quotes
        return self.args[0]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def near_names(name: str, known: list[str], limit: int = 4) -> list[str]:
    """Names that the writer of `name` may have meant, best first."""
    plain = _plain(name).rsplit("/", 1)[-1]  # "meta-llama/Llama-3.1-8B-Instruct"
    hits = [k for k in known if plain and (plain in k or k in plain)]
    hits += difflib.get_close_matches(plain, known, n=limit, cutoff=0.5)
    return list(dict.fromkeys(hits))[:limit]


class Table(Mapping, Generic[Spec]):
    """A read-only mapping from names to specs; case and underscores don't matter in a look-up."""

    def __init__(self, file: str, what: str, build: Callable[[str, dict], Any]):
        self._file, self._what, self._build = file, what, build
        self._built: dict[str, Spec] = {}

    def row(self, name: str) -> dict:
        """The row of one name as stored; an unknown one raises like a look-up."""
        self[name]
        return self.rows[_plain(name)]

    @property
    def rows(self) -> dict[str, dict]:
        """The rows as stored: fields with their sources, marks and notes."""
        return _rows(self._file)

    def __getitem__(self, name: str) -> Spec:
        key = _plain(name) if isinstance(name, str) else None
        if key not in self.rows:
            raise UnknownName(self._unknown(name))
        if key not in self._built:
            self._built[key] = self._build(key, self.rows[key])
        return self._built[key]

    def _unknown(self, name) -> str:
        known = list(self.rows)
        near = near_names(name, known) if isinstance(name, str) else []
        hint = f"near: {', '.join(near)}" if near else f"known: {', '.join(known)}"
        return f"unknown {self._what} {name!r}; {hint}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{len(self)} {self._what} entries: {', '.join(self)}>"


@cache
def _rows(file: str) -> dict[str, dict]:
    return json.loads((_DATA / file).read_text(encoding="utf-8"))["rows"]


def _model(name: str, row: dict) -> ModelSpec:
    return parse_config(row["config"], name=name)


def _hardware(name: str, row: dict) -> HardwareSpec:
    return HardwareSpec(name=name, **{k: v for k, v in row.items() if k != "reported_bytes"})


models: Table[ModelSpec] = Table("models.json", "model", _model)
hardware: Table[HardwareSpec] = Table("hardware.json", "hardware", _hardware)


def resolve_model(model: ModelSpec | str) -> ModelSpec:
    """A ModelSpec from one or from a name of `companion.cost.models`."""
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str):
        return models[model]
    raise ValueError(f"model must be a ModelSpec or a name, got {type(model).__name__}")


def resolve_hardware(device: HardwareSpec | str) -> HardwareSpec:
    """A HardwareSpec from one or from a name of `companion.cost.hardware`."""
    if isinstance(device, HardwareSpec):
        return device
    if isinstance(device, str):
        return hardware[device]
    raise ValueError(f"hardware must be a HardwareSpec or a name, got {type(device).__name__}")
