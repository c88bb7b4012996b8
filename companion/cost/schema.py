"""What `companion size --json` prints, as a JSON Schema (draft 2020-12): every field with its unit.

The number in "schema" changes when a field goes or means something else; new fields may come without that.
"""

from __future__ import annotations

from typing import Any

VERSION = 1

_INT, _NUMBER, _TEXT, _BOOL, _NULL = "integer", "number", "string", "boolean", "null"

# field of a sizing: types, what it is and in which unit
SIZING: dict[str, tuple[tuple[str, ...], str]] = {
    "model": ((_TEXT,), "name of the model"),
    "hardware": ((_TEXT,), "name of the device"),
    "devices": ((_INT,), "devices that hold the model together"),
    "batch": ((_INT,), "sequences at once, over all devices"),
    "context": ((_INT,), "tokens cached per sequence, prompt and answer"),
    "weights_dtype": ((_TEXT,), "format of the weights, or bits per value"),
    "experts_dtype": ((_TEXT, _NULL), "format of the routed experts if it is another"),
    "kv_dtype": ((_TEXT,), "format of the cache, or bits per value"),
    "weights_bytes": ((_INT,), "bytes; all weights, once"),
    "kv_bytes": ((_INT,), "bytes; the batch's cache in whole blocks, each number once"),
    "kv_bytes_per_token": ((_INT,), "bytes; one token in all layers, while no window is full"),
    "kv_growth_bytes_per_token": ((_INT,), "bytes; one more token once the windows are full"),
    "kv_fixed_bytes": ((_INT,), "bytes; full windows of one sequence, 0 without windows"),
    "overhead_bytes": ((_INT,), "bytes; as stated, over all devices"),
    "bytes_per_device": ((_INT,), "bytes; all of it on the fullest device, copies included"),
    "total_bytes": ((_INT,), "bytes; bytes_per_device times devices"),
    "device_bytes": ((_INT,), "bytes; memory of one device, the vendor's decimal figure"),
    "fits": ((_BOOL,), "bytes_per_device is no more than device_bytes"),
    "max_batch": ((_INT,), "sequences of this context that fit; 0 if the weights do not"),
    "max_context": ((_INT, _NULL), "tokens per sequence that fit at this batch; null: any number"),
    "model_max_context": ((_INT, _NULL), "tokens the model was made for"),
    "decode_seconds": ((_NUMBER, _NULL), "seconds per decode step; null if it does not fit"),
    "decode_tokens_per_second": ((_NUMBER, _NULL), "tokens per second of the whole batch"),
    "ttft_seconds": ((_NUMBER, _NULL), "seconds until the first token of one prompt of `context` tokens"),
    "bound_by": ((_TEXT,), "what a step waits for: memory: weights, memory: cache, compute, overhead, "
                 "communication; memory: capacity if it does not fit"),
    "tensor": ((_INT, _NULL), "tensor-parallel ranks; null: equal parts over devices"),
    "expert": ((_INT, _NULL), "groups of ranks that divide experts and batch"),
    "kv_sharding": ((_TEXT,), "how devices divide the cache: heads or batch"),
    "compute_dtype": ((_TEXT,), "format of the products"),
    "pages": ((_TEXT,), "exact, grouped or unified: how an engine stores sliding layers"),
    "block_size": ((_INT, _NULL), "tokens per block"),
    "step_tokens": ((_INT,), "tokens of a sequence that a step may write"),
    "kv_needed_bytes": ((_INT,), "bytes; the batch's cache without rounding"),
    "kv_allocated_bytes": ((_INT,), "bytes; what pages take for it, once"),
    "weights_bytes_per_device": ((_INT,), "bytes"),
    "kv_bytes_per_device": ((_INT,), "bytes; on the fullest device, copies included"),
    "activation_bytes": ((_INT,), "bytes; as stated, over all devices"),
    "cache_room_bytes": ((_INT,), "bytes left for one device's cache; negative if the weights do not fit"),
    "communication_seconds": ((_NUMBER, _NULL), "seconds of a step between devices; null: not counted"),
    "assumptions": (("array",), "what the figures rest on, a line each"),
    "warnings": (("array",), "what is wrong or odd, a line each"),
}  # fmt: skip
# field of a lever, as above
LEVER: dict[str, tuple[tuple[str, ...], str]] = {
    "name": ((_TEXT,), "the change, for people"),
    "change": (("object",), "the arguments of companion.cost.size that differ"),
    "gain": ((_NUMBER, _NULL), "throughput relative to before; null if nothing fitted before"),
    "throughput": ((_NUMBER,), "tokens per second at max_batch sequences; 0 if none fits"),
    **{k: SIZING[k] for k in ("fits", "max_batch", "max_context", "decode_seconds", "bytes_per_device",
                              "decode_tokens_per_second", "devices")},
}  # fmt: skip
_CROSSINGS = {
    "cache_equals_weights": (
        (_INT, _NULL),
        "tokens per sequence at which the cache is no smaller than the weights",
    ),
    "full": ((_INT, _NULL), "tokens per sequence that no longer fit; null: any number fits"),
}
_VLLM = {
    "command": ((_TEXT,), "the command line"),
    "notes": (("array",), "what no flag does, a line each"),
    "version": ((_TEXT,), "version of vLLM whose flags these are"),
}


def _object(fields: dict[str, tuple[tuple[str, ...], str]], **more: Any) -> dict:
    properties: dict[str, Any] = {}
    for name, (types, meaning) in fields.items():
        properties[name] = {"type": types[0] if len(types) == 1 else list(types), "description": meaning}
        if types == ("array",):
            properties[name]["items"] = {"type": "string"}
    return {"type": "object", "properties": {**properties, **more}, "required": [*fields, *more]}


def schema() -> dict:
    """The schema of one sizing, or of two with --compare."""
    sizing = _object(SIZING)
    one = _object(
        SIZING,
        schema={"const": VERSION},
        notes={
            "type": "array",
            "items": {"type": "string"},
            "description": "where the model's figures come from",
        },
        crossings=_object(_CROSSINGS),
        levers={"type": "array", "items": _object(LEVER), "description": "best first"},
        vllm={"oneOf": [_object(_VLLM), {"type": "null"}], "description": "null if it does not fit"},
    )
    ratios = {
        "type": "object",
        "additionalProperties": {"type": ["number", "null"]},
        "description": "b over a",
    }
    two = {
        "type": "object",
        "properties": {"schema": {"const": VERSION}, "a": sizing, "b": sizing, "ratios": ratios},
        "required": ["schema", "a", "b", "ratios"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "companion size",
        "oneOf": [one, two],
    }
