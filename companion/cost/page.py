"""The same functions for a page in a browser: JSON in, JSON out, errors included."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict

from . import counts, flops, memory, sizing, stacked, step
from .config import parse_config
from .devices import HardwareSpec
from .registry import hardware, models


def _row(table, name: str) -> dict:
    return {"name": name, **table.row(name)}


def _list(table) -> Callable:
    return lambda name=None: _row(table, name) if name else list(table)


def _budget(model, **arguments):
    bars = stacked.budget(model, **arguments)
    arguments.pop("contexts")
    return {"bars": [b.to_dict() for b in bars], "crossings": asdict(stacked.crossings(model, **arguments))}


OPS: dict[str, Callable] = {
    "active_parameters": counts.active_parameters,
    "budget": _budget,
    "decode_flops": flops.decode_flops,
    "decode_step": lambda **a: step.decode_step(**a).to_dict(),
    "experts_touched": counts.experts_touched,
    "hardware": _list(hardware),
    "intensity": flops.intensity,
    "kv_bytes": memory.kv_bytes,
    "kv_bytes_per_token": memory.kv_bytes_per_token,
    "models": _list(models),
    "parameters": lambda **a: counts.parameter_count(**a).to_dict(),
    "prefill": lambda **a: step.prefill(**a).to_dict(),
    "prefill_flops": flops.prefill_flops,
    "size": lambda **a: sizing.size(**a).to_dict(),
    "weight_bytes": memory.weight_bytes,
}


def _reply(request: str):
    data = json.loads(request)
    if not isinstance(data, dict):
        raise ValueError(f"request must be a JSON object, got {type(data).__name__}")
    op = data.pop("op", None)
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if isinstance(data.get("model"), Mapping):
        data["model"] = parse_config(data["model"], name=data["model"].get("name"))
    if isinstance(data.get("hardware"), Mapping):
        device = data["hardware"]
        data["hardware"] = HardwareSpec(**{"name": "this machine", "device_bytes": None, **device})
    return OPS[op](**data)


def live(request: str) -> str:
    """Answer one request of a page.

    request  {"op": "size", "model": "llama-3.1-8b", "hardware": "h100-sxm", "batch": 8, ...}: the other
             keys are the function's arguments by name. `model` may be a configuration, `hardware` an
             object of HardwareSpec's fields. {"op": "models"} lists the names, with "name" gives one row

    Returns {"ok": true, "result": ...} or {"ok": false, "error": "..."}; infinity and NaN become null.
    """
    try:
        reply = {"ok": True, "result": _finite(_reply(request))}
    except (ValueError, TypeError) as error:
        reply = {"ok": False, "error": str(error)}
    return json.dumps(reply)


def _finite(value):
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
