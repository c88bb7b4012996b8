"""`companion size`: a deployment sized on the command line, as a table, as JSON, as a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .compare import Comparison, table
from .devices import HardwareSpec
from .flags import vllm_flags
from .levers import levers
from .options import add_arguments
from .plot import contexts_for, first_context, stack, svg
from .registry import _plain, hardware
from .report import details, report
from .schema import VERSION
from .sizing import Sizing, size
from .sources import Source, find_source, with_weights
from .spec import ModelSpec

__all__ = ["add_arguments", "find_model", "report", "run"]


def find_model(text: str) -> ModelSpec:
    """A model by name, or from a configuration, a folder or a GGUF file."""
    return find_source(text).spec


def run(args: argparse.Namespace) -> int:
    """Size and print. Raises ValueError for bad arguments."""
    if args.plot and not args.plot.lower().endswith(".svg"):
        raise ValueError(f"--plot writes SVG; name a file that ends in .svg, not {args.plot!r}")
    if args.compare:
        return _compare(args)
    if args.model is None:
        raise ValueError("a model is required: a name, a config.json, a folder or a .gguf file (see --help)")
    source, device, arguments = _question(args, args.model, args.hardware)
    sizing = size(source.spec, device, **arguments)
    crossings = _crossings(source.spec, device, arguments, sizing)
    better = levers(source.spec, device, **arguments)
    if args.plot:
        _plot(Path(args.plot).expanduser(), source.spec, device, arguments, sizing, crossings)
    if args.json:
        answer = {
            **sizing.to_dict(),
            "schema": VERSION,
            "notes": list(source.notes),
            "crossings": crossings,
            "levers": [lever.to_dict() for lever in better],
            "vllm": vllm_flags(sizing).to_dict() if sizing.fits else None,
        }
        print(json.dumps(answer, indent=2))
    else:
        print(report(sizing))
        print(details(sizing, crossings, better, source.notes, args.plot))
    return 1 if args.check and not sizing.fits else 0


def _compare(args: argparse.Namespace) -> int:
    a, b = args.compare
    if args.plot:
        raise ValueError("--plot draws one deployment; leave it out with --compare")
    devices = [_plain(name) in hardware for name in (a, b)]
    if all(devices):
        if args.model is None:
            raise ValueError(f"--compare {a} {b} compares two devices: name the model first")
        if args.hardware is not None:
            raise ValueError(f"--compare {a} {b} compares two devices: leave --hardware out")
        pairs = [(args.model, a), (args.model, b)]
    elif any(devices):
        raise ValueError(f"--compare takes two models or two devices, not {a!r} and {b!r}")
    else:
        if args.model is not None:
            raise ValueError(f"--compare {a} {b} compares two models: leave {args.model!r} out")
        pairs = [(a, args.hardware), (b, args.hardware)]
    sizings = []
    for model, device in pairs:
        source, spec, arguments = _question(args, model, device)
        sizings.append(size(source.spec, spec, **arguments))
    both = Comparison(*sizings)
    print(json.dumps({"schema": VERSION, **both.to_dict()}, indent=2) if args.json else table(both))
    return 1 if args.check and not all(s.fits for s in sizings) else 0


def _question(
    args: argparse.Namespace, model: str, device: str | None
) -> tuple[Source, HardwareSpec, dict[str, Any]]:
    """What is asked: the model, the device, and the arguments of `size`."""
    spec = _device(args, device)
    source = find_source(model, like=args.like)
    if args.weights is not None or args.weights_bytes is not None:
        if args.weights is not None and args.weights_bytes is not None:
            raise ValueError("--weights is a format and --weights-bytes a figure for all; give one of them")
        source = with_weights(source)
    arguments: dict[str, Any] = {
        name: getattr(args, name)
        for name in (
            "batch", "context", "kv", "devices", "tensor", "expert", "kv_sharding", "block_size", "pages",
            "step_tokens", "activation_bytes", "overhead_bytes", "overhead_seconds", "efficiency",
            "weights_bytes", "link_bandwidth", "link_latency",
        )
    }  # fmt: skip
    arguments |= {"weights": args.weights or "bf16", "experts": args.experts, "compute_dtype": args.compute}
    if args.weights == 0:
        arguments["weights"] = 0  # refused by `size`, which names it
    stored = dict(source.stored)
    if args.experts is not None:
        stored.pop("experts", None)
    return source, spec, {**arguments, **stored}


def _device(args: argparse.Namespace, name: str | None) -> HardwareSpec:
    own = [x for x in (args.memory, args.bandwidth, args.flops) if x is not None]
    if name is None:
        if len(own) < 3:
            raise ValueError(
                f"--hardware is required, one of: {', '.join(hardware)}; or all of --memory, --bandwidth, "
                "--flops"
            )
        return HardwareSpec("this device", args.memory, args.bandwidth, {args.compute or "bf16": args.flops})
    return hardware[name].with_measured(
        device_bytes=args.memory, bandwidth=args.bandwidth, flops=args.flops, dtype=args.compute
    )


def _crossings(
    model: ModelSpec, device: HardwareSpec, arguments: dict[str, Any], sizing: Sizing
) -> dict[str, int | None]:
    """Tokens per sequence from which the cache is no smaller than the weights, and from which it is full."""

    def as_large(tokens: int) -> bool:
        s = size(model, device, **{**arguments, "context": tokens})
        return s.kv_bytes_per_device >= s.weights_bytes_per_device

    full = None if sizing.max_context is None else sizing.max_context + 1
    return {"cache_equals_weights": first_context(as_large), "full": full}


def _plot(
    path: Path,
    model: ModelSpec,
    device: HardwareSpec,
    arguments: dict[str, Any],
    sizing: Sizing,
    crossings: dict,
) -> None:
    contexts = contexts_for(sizing.context, crossings["full"])
    stacks = [stack(size(model, device, **{**arguments, "context": n})) for n in contexts]
    one = f"{sizing.devices} x {sizing.hardware}" if sizing.devices > 1 else sizing.hardware
    title = f"{sizing.model} on {one}, {sizing.batch:,} sequence{'s' if sizing.batch > 1 else ''}"
    subtitle = f"weights {sizing.weights_dtype}, cache {sizing.kv_dtype}"
    marks = [
        f"{label} {tokens:,} tokens"
        for label, tokens in (
            ("cache as large as the weights at", crossings["cache_equals_weights"]),
            ("memory full at", crossings["full"]),
        )
        if tokens is not None
    ]
    path.write_text(svg(stacks, title=title, subtitle=subtitle, marks=["; ".join(marks)]), encoding="utf-8")
