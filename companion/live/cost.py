"""The same functions for a page in a browser: JSON in, JSON out, errors included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from .. import cost as room
from ..checks import choice, require
from ..cost import Deployment, HardwareSpec, ModelSpec, RoutingSpec, decode_step, hardware, models, size
from ..cost.deployment import note, options
from ..cost.registry import resolve_hardware, resolve_model
from . import answer

POINTS = 64


def _list(table) -> Callable:
    return lambda name=None: {"name": name, **table.row(name)} if name else list(table)


def _points(name: str, values) -> list:
    """Values of one argument for which a page asks at once."""
    fits = isinstance(values, list) and len(values) <= POINTS
    require(fits, name, f"a list of at most {POINTS} numbers", values)
    return values


def _budget(model, contexts, **arguments):
    bars = room.budget(model, contexts=_points("contexts", contexts), **arguments)
    return {
        "bars": [b.to_dict() for b in bars],
        "crossings": asdict(room.crossings(model, **arguments)),
    }


def _bill(contexts, **arguments):
    """One deployment, and what the same takes at other contexts."""
    shown = ("context", "weights_bytes_per_device", "kv_bytes_per_device", "bytes_per_device", "fits")
    bars = [size(**{**arguments, "context": n}).to_dict() for n in _points("contexts", contexts)]
    return {
        "sizing": size(**arguments).to_dict(),
        "bars": [{name: bar[name] for name in shown} for bar in bars],
    }


def _roofline(model, hardware, batch, context, batches, weights="bf16", kv="bf16"):
    """A decode step and the prefill of the same context, under the device's roof.

    trace: the same decode step at other batches
    """
    device, formats = resolve_hardware(hardware), {"weights": weights, "kv": kv}
    dtype, shown = device.default_compute, ("batch", "intensity", "flops_per_second")
    asked = _points("batches", batches)
    trace = [decode_step(model, device, n, context, **formats).to_dict() for n in asked]
    plan = size(model, device, batch=batch, context=context, weights=weights, kv=kv)
    return {
        "device": {"compute_dtype": dtype, "bandwidth": device.bandwidth, "peak": device.peak(dtype)},
        "ridge": device.ridge(dtype),
        "decode": decode_step(model, device, batch, context, **formats).to_dict(),
        "prefill": room.prefill(model, device, context, **formats).to_dict(),
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
        out = {"batch": n, "touched": room.experts_touched(model, n)}
        for name, m in models_of_row.items():
            cost = decode_step(m, device, n, context, weights=weights, experts=experts)
            out[name] = {key: getattr(cost, key) for key in ("weights_bytes", "seconds", "bound_by")}
        return out

    plan = size(model, device, batch=batch, context=context, weights=weights, experts=experts)
    return {
        "experts": model.moe.experts,
        "top_k": model.moe.top_k,
        "held_bytes": plan.weights_bytes,
        "max_batch": plan.max_batch,
        "now": row(batch),
        "curve": [row(n) for n in _points("batches", batches)],
    }


# --- forms: what a page asks, from the fields of `Deployment` ---------------------------------------------

_FIRST: dict[str, Any] = {"model": {"value": "llama-3.1-8b"}, "hardware": {"value": "h100-sxm"}}
# The fields with which an operation's form begins: where they stand at first, and other words for them.
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "bill": {
        **_FIRST, "model": {"value": "llama-3.1-70b"}, "devices": {"value": "8"}, "batch": {"value": 8},
        "context": {"value": 32768}, "weights": {}, "kv": {},
    },
    "roofline": {**_FIRST, "batch": {"value": 32}, "context": {}, "weights": {}, "kv": {}},
    "experts": {
        "model": {"value": "qwen3-30b-a3b", "options": [name for name, m in models.items() if m.moe]},
        "hardware": {"value": "h200-sxm"}, "batch": {"value": 64, "label": "Users at once"},
        "context": {"value": 1024}, "experts": {"value": "bf16"}, "weights": {"label": "Other weights in"},
    },
}  # fmt: skip


def _field(asked: Any, said: dict[str, Any] | None = None) -> dict[str, Any]:
    """One field as a page draws it: a slider with `levels`, a list with `options`, else a text.

    said   what the form itself says of it; without that it is "" at first, which means: not asked
    """
    meta, default, first = asked.metadata, asked.default, said is not None
    empty = ", ".join(filter(None, (meta.get("unit", "").lower(), note(asked)))) or "not asked"
    names = [str(name) for name in meta.get("offered", meta.get("choices", ())) if first or name != default]
    row = {"name": asked.name, "help": meta["means"], "unit": meta.get("unit", ""), "empty": empty}
    row |= {"label": meta.get("label", asked.name.replace("_", " ").capitalize())}
    row |= {"value": default if first else ""}
    if first and "levels" in meta:
        row["levels"] = meta["levels"]
    elif names:
        row["options"] = ([] if first and default else [{"value": "", "label": empty}]) + names
    return row | (said or {})


def form(of: str) -> dict[str, Any]:
    """What a page asks for an operation: the fields that it begins with, and by their groups all others.

    The bill takes a whole `companion.cost.Deployment`, so a field that comes there comes here.
    """
    first, more = FORMS[choice("of", of, FORMS)], {}
    known = {asked.name: asked for asked in fields(Deployment)}
    for asked in options(Deployment) if of == "bill" else ():
        if asked.name not in first:
            more.setdefault(asked.metadata["group"], []).append(_field(asked))
    return {"first": [_field(known[name], said) for name, said in first.items()], "more": more}


def _filled(given: dict[str, Any]) -> dict[str, Any]:
    """What was written into a form, read as the command reads it; what is empty was not asked."""
    read = {asked.name: asked.metadata["read"] for asked in options(Deployment)}
    out = {name: value for name, value in given.items() if name not in read or value != ""}
    for name, value in out.items():
        if isinstance(value, str) and name in read:
            try:
                out[name] = read[name](value)
            except ValueError as error:
                kind = {int: "a whole number", float: "a number"}.get(read[name])
                said = f" must be {kind}, got {value!r}" if kind else f": {error}"
                raise ValueError(name + said) from None
    return out


_FUNCTIONS = """active_parameters decode_flops decode_step experts_touched intensity kv_bytes
    kv_bytes_per_token prefill prefill_flops size weight_bytes""".split()
OPS: dict[str, Callable] = {name: getattr(room, name) for name in _FUNCTIONS} | {
    "bill": _bill,
    "budget": _budget,
    "experts": _experts,
    "form": form,
    "hardware": _list(hardware),
    "models": _list(models),
    "parameters": room.parameter_count,
    "roofline": _roofline,
}


def _reply(data: dict) -> Any:
    op = choice("op", data.pop("op", None), OPS)
    if isinstance(data.get("model"), Mapping):
        data["model"] = ModelSpec.from_config(data["model"], name=data["model"].get("name"))
    if isinstance(data.get("hardware"), Mapping):
        data["hardware"] = HardwareSpec(**{"name": "this machine", "device_bytes": None, **data["hardware"]})
    result = OPS[op](**(_filled(data) if op in FORMS else data))
    return _finite(result.to_dict() if hasattr(result, "to_dict") else result)


def live(request: str) -> str:
    """Answer one request of a page.

    The request and the reply are JSON. Two requests:

        {"op": "size", "model": "llama-3.1-8b", "hardware": "h100-sxm", "batch": 8, ...}
        {"op": "models"}

    Keys besides "op" are the function's arguments by name. `model` may be a configuration, `hardware` an
    object of HardwareSpec's fields. "models" lists the names, with "name" it gives one row. "form" tells what
    an operation asks, its name in "of"; that may be sent as it was written, "450GB/s", or "". The reply:

        {"ok": true, "result": ...}
        {"ok": false, "error": "..."}

    Infinity and NaN become null.
    """
    return answer(request, _reply)


def _finite(value):
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
