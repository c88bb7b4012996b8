"""The same functions for a page in a browser: JSON in, JSON out, errors included."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from ..cost import (
    HardwareSpec,
    ModelSpec,
    RoutingSpec,
    budget,
    crossings,
    flops,
    hardware,
    memory,
    models,
    sizing,
    step,
)
from ..cost.registry import resolve_hardware, resolve_model

POINTS = 64


def _row(table, name: str) -> dict:
    return {"name": name, **table.row(name)}


def _list(table) -> Callable:
    return lambda name=None: _row(table, name) if name else list(table)


def _points(name: str, values) -> list:
    """Values of one argument for which a page asks at once."""
    if not isinstance(values, list) or len(values) > POINTS:
        raise ValueError(f"{name} must be a list of at most {POINTS} numbers, got {str(values)[:60]}")
    return values


def _budget(model, contexts, **arguments):
    bars = budget(model, contexts=_points("contexts", contexts), **arguments)
    return {
        "bars": [b.to_dict() for b in bars],
        "crossings": asdict(crossings(model, **arguments)),
    }


def _bill(contexts, **arguments):
    """One deployment, and what the same takes at other contexts."""
    shown = ("context", "weights_bytes_per_device", "kv_bytes_per_device", "bytes_per_device", "fits")
    bars = [sizing.size(**{**arguments, "context": n}).to_dict() for n in _points("contexts", contexts)]
    return {
        "sizing": sizing.size(**arguments).to_dict(),
        "bars": [{name: bar[name] for name in shown} for bar in bars],
    }


def _roofline(model, hardware, batch, context, batches, weights="bf16", kv="bf16"):
    """A decode step and the prefill of the same context, under the device's roof.

    trace: the same decode step at other batches
    """
    device, formats = resolve_hardware(hardware), {"weights": weights, "kv": kv}
    dtype, shown = device.default_compute, ("batch", "intensity", "flops_per_second")
    asked = _points("batches", batches)
    trace = [step.decode_step(model, device, n, context, **formats).to_dict() for n in asked]
    plan = sizing.size(model, device, batch=batch, context=context, weights=weights, kv=kv)
    return {
        "device": {"compute_dtype": dtype, "bandwidth": device.bandwidth, "peak": device.peak(dtype)},
        "ridge": device.ridge(dtype),
        "decode": step.decode_step(model, device, batch, context, **formats).to_dict(),
        "prefill": step.prefill(model, device, context, **formats).to_dict(),
        "trace": [{name: point[name] for name in shown} for point in trace],
        "max_batch": plan.max_batch,
    }


def _twins(model):
    """Dense models with the active and with all parameters of a mixture: experts that every token uses."""
    if model.moe is None:
        raise ValueError(f"model {model.name!r} has no experts")
    moe = replace(model.moe, routing=RoutingSpec())
    active, total = replace(moe, experts=moe.top_k), replace(moe, top_k=moe.experts)
    return replace(model, name="active twin", moe=active), replace(model, name="total twin", moe=total)


def _experts(model, hardware, batch, batches, context=1024, weights="bf16", experts=None):
    """A mixture's decode step beside those of its two dense twins, at one batch and at others."""
    model, device = resolve_model(model), resolve_hardware(hardware)
    models_of_row = dict(zip(("mixture", "active", "total"), (model, *_twins(model)), strict=True))

    def row(n):
        out = {"batch": n, "touched": memory.experts_touched(model, n)}
        for name, m in models_of_row.items():
            cost = step.decode_step(m, device, n, context, weights=weights, experts=experts)
            out[name] = {
                "weights_bytes": cost.weights_bytes,
                "seconds": cost.seconds,
                "bound_by": cost.bound_by,
            }
        return out

    plan = sizing.size(model, device, batch=batch, context=context, weights=weights, experts=experts)
    return {
        "experts": model.moe.experts,
        "top_k": model.moe.top_k,
        "held_bytes": plan.weights_bytes,
        "max_batch": plan.max_batch,
        "now": row(batch),
        "curve": [row(n) for n in _points("batches", batches)],
    }


OPS: dict[str, Callable] = {
    "active_parameters": memory.active_parameters,
    "bill": _bill,
    "budget": _budget,
    "decode_flops": flops.decode_flops,
    "decode_step": lambda **a: step.decode_step(**a).to_dict(),
    "experts": _experts,
    "experts_touched": memory.experts_touched,
    "hardware": _list(hardware),
    "intensity": flops.intensity,
    "kv_bytes": memory.kv_bytes,
    "kv_bytes_per_token": memory.kv_bytes_per_token,
    "mixtures": lambda: [name for name, m in models.items() if m.moe],
    "models": _list(models),
    "parameters": lambda **a: memory.parameter_count(**a).to_dict(),
    "prefill": lambda **a: step.prefill(**a).to_dict(),
    "prefill_flops": flops.prefill_flops,
    "roofline": _roofline,
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
        data["model"] = ModelSpec.from_config(data["model"], name=data["model"].get("name"))
    if isinstance(data.get("hardware"), Mapping):
        device = data["hardware"]
        data["hardware"] = HardwareSpec(**{"name": "this machine", "device_bytes": None, **device})
    return OPS[op](**data)


def live(request: str) -> str:
    """Answer one request of a page.

    The request and the reply are JSON. Two requests:

        {"op": "size", "model": "llama-3.1-8b", "hardware": "h100-sxm", "batch": 8, ...}
        {"op": "models"}

    Keys besides "op" are the function's arguments by name. `model` may be a configuration, `hardware` an
    object of HardwareSpec's fields. "models" lists the names, with "name" it gives one row. The reply:

        {"ok": true, "result": ...}
        {"ok": false, "error": "..."}

    Infinity and NaN become null.
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
