"""The result of `companion bench --gpu`: its form, the goals, its lines, and where it may be stored.

A result is plain data:

    schema, made, command, dry_run, seconds     1, UTC time, as typed, whether no GPU was measured, duration
    machine     name, capability, cores, memory_bytes, l2_bytes, driver, cuda, torch, triton, python, system
    copy        bytes_per_s (the best), and rows: name, bytes, timing, bytes_per_s
    checks      name, error, tolerance, ok, and message if something was raised
    cases       name, kernel, ..., bytes, predicted_s, seconds, timing, bytes_per_s, of_copy, error,
                tolerance, ok, baselines: name -> {"seconds": ..} or {"message": ..}
    goals       name, goal, reached (None: not measured), worst, of
    skipped     names of what time did not suffice for
"""

import json
import re
from pathlib import Path

from ...formats import INT4 as FOUR_BITS

SCHEMA = 1
GPU_SECONDS = 270.0  # nothing begins after so many, unless --seconds says otherwise
BEYOND = 1e300  # stands for an error that is no number: JSON has no infinity
FORM = {
    "": {"schema": int, "made": str, "command": str, "dry_run": bool, "seconds": float, "machine": dict,
         "copy": dict, "checks": list, "cases": list, "goals": list, "skipped": list},
    "machine": {"name": str, "capability": list, "cores": int, "memory_bytes": int, "l2_bytes": int,
                "driver": str, "cuda": str, "torch": str, "triton": str, "python": str, "system": str},
    "copy": {"bytes_per_s": float, "rows": list},
    "checks": {"name": str, "error": float, "tolerance": float, "ok": bool},
    "cases": {"name": str, "kernel": str, "dtype": str, "ok": bool, "baselines": dict},
    "goals": {"name": str, "goal": float, "reached": (bool, type(None)), "worst": str, "of": int},
}  # fmt: skip
MEASURED = {"seconds": float, "predicted_s": float, "bytes": dict, "bytes_per_s": float, "of_copy": float,
            "error": float, "tolerance": float, "timing": dict}  # fmt: skip


def check(result: dict) -> None:
    """Raise a ValueError that names what is missing, or of another type, in a result."""
    _fields("", result, FORM[""])
    if result["schema"] != SCHEMA:
        raise ValueError(f"schema is {result['schema']!r}; need {SCHEMA}")
    for part in ("machine", "copy"):
        _fields(part, result[part], FORM[part])
    for part in ("checks", "cases", "goals"):
        for row in result[part]:
            _fields(f"{part} {row.get('name', '?')!r}", row, FORM[part])
    for row in result["cases"]:
        if "message" not in row:  # nothing was raised: then it has its numbers
            _fields(f"cases {row['name']!r}", row, MEASURED)


def _fields(where: str, row: dict, form: dict) -> None:
    for name, kind in form.items():
        if name not in row:
            raise ValueError(f"{where or 'the result'} has no {name!r}")
        if not isinstance(row[name], kind) or (isinstance(row[name], bool) and kind in (int, float)):
            raise ValueError(f"{where or 'the result'}: {name!r} is {row[name]!r}; need {kind}")


def failed(result: dict) -> list[str]:
    """Names of checks and cases that are wrong, or that raised something."""
    return [row["name"] for row in (*result["checks"], *result["cases"]) if not row["ok"]]


def store(result: dict, folder: Path | str) -> Path:
    """Write a result that was measured on a GPU, all of it right, to folder/gpu_<device>.json.

    Raises ValueError for a dry run and for a result with a failed check: such numbers stand for nothing.
    """
    check(result)
    if result["dry_run"]:
        raise ValueError("dry_run: nothing was measured, so there is nothing to store")
    if bad := failed(result):
        raise ValueError(f"a wrong kernel has no speed; failed: {', '.join(bad)}")
    path = (
        Path(folder) / f"gpu_{re.sub('[^a-z0-9]+', '_', result['machine']['name'].lower()).strip('_')}.json"
    )
    return write(result, path)


def write(result: dict, path: Path | str) -> Path:
    """The result as JSON, whatever it is."""
    path = Path(path)
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


# --- the goals ---------------------------------------------------------------------------------------------

OF_COPY, INT8, INT4, FLASHINFER = 0.85, 1.7, 2.5, 1.1


def goals(cases: list[dict], dtype: str) -> list[dict]:
    """The promises, each held against its worst case. dtype: the device's 16-bit type."""
    done = [c for c in cases if c["kernel"] == "decode_attention" and "seconds" in c]
    plain = [c for c in done if c["kv_format"] == "none"]
    where = {_place(c): c for c in plain}

    def gain(kv_format):
        pairs = [(c, where.get(_place(c))) for c in done if c["kv_format"] == kv_format]
        return [(p["seconds"] / c["seconds"], c["name"]) for c, p in pairs if p]

    def beside(name):
        rows = [(c, c["baselines"].get(name, {}).get("seconds")) for c in plain]
        return [(s / c["seconds"], c["name"]) for c, s in rows if s]

    copied = [(c["of_copy"], c["name"]) for c in plain if c["dtype"] == dtype and c["kv_bytes"] >= 64 * 2**20]
    return [
        _goal(f"share of copy bandwidth, {dtype}, 64 MiB of keys and values or more", OF_COPY, copied),
        _goal("speed over scaled_dot_product_attention", 1.0, beside("sdpa")),
        _goal("speed over FlashInfer", 1 / FLASHINFER, beside("flashinfer")),
        _goal(f"int8 over {dtype} at equal length", INT8, gain("int8")),
        _goal(f"int4 over {dtype} at equal length", INT4, gain(FOUR_BITS.kernel)),
    ]


def _place(case: dict) -> tuple:
    return tuple(case[k] for k in ("model", "batch", "length", "dtype", "layout"))


def _goal(name: str, goal: float, found: list[tuple[float, str]]) -> dict:
    if not found:
        return {"name": name, "goal": goal, "reached": None, "worst": "", "of": 0}
    value, worst = min(found)
    met = sum(v >= goal for v, _ in found)
    row = {"name": name, "goal": goal, "reached": met == len(found), "worst": worst, "of": len(found)}
    return row | {"value": value, "met": met}


# --- lines -------------------------------------------------------------------------------------------------


def head(machine: dict, dry_run: bool) -> list[str]:
    m = machine
    capability = ".".join(map(str, m["capability"])) or "none"
    lines = [
        f"{m['name']}, capability {capability}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.1f} GiB, "
        f"L2 {m['l2_bytes'] / 2**20:.0f} MiB",
        f"driver {m['driver']}, CUDA {m['cuda']}, torch {m['torch']}, triton {m['triton']}, {m['system']}",
    ]
    if dry_run:
        lines.insert(0, "dry run: every step at tiny sizes, no GPU; the times mean nothing")
    return lines


def copy_line(row: dict) -> str:
    return f"{row['name']:<40} {row['bytes'] / 2**20:7.0f} MiB moved  {_time(row['seconds'])}  {_rate(row)}"


def check_line(row: dict) -> str:
    if "message" in row:
        return f"WRONG {row['name']}: {row['message']}"
    word = "ok   " if row["ok"] else "WRONG"
    return f"{word} {row['name']:<60} error {row['error']:.1e}, allowed {row['tolerance']:.0e}"


def case_line(row: dict) -> str:
    if "message" in row:
        return f"WRONG {row['name']}: {row['message']}"
    word = "" if row["ok"] else f"  WRONG: error {row['error']:.1e}, allowed {row['tolerance']:.0e}"
    beside = [
        f"{name} {_time(b['seconds'])}" if "seconds" in b else f"{name}: {b['message']}"
        for name, b in row["baselines"].items()
    ]
    line = (
        f"{row['name']:<58} {_time(row['seconds'])}  predicted {_time(row['predicted_s'])}  {_rate(row)}  "
        f"{row['of_copy']:4.0%} of copy"
    )
    return line + (f"  | {', '.join(beside)}" if beside else "") + word


def goal_line(row: dict) -> str:
    if row["reached"] is None:
        return f"not measured  {row['name']}: at least {row['goal']:.3g}"
    word = "reached" if row["reached"] else "missed"
    tail = f"worst {row['value']:.3g} ({row['worst']})"
    return (
        f"{word:<12}  {row['name']}: at least {row['goal']:.3g} in {row['met']} of {row['of']} cases; {tail}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:8.1f} us" if seconds < 0.01 else f"{seconds * 1e3:8.1f} ms"


def _rate(row: dict) -> str:
    return f"{row['bytes_per_s'] / 1e9:7.1f} GB/s"
