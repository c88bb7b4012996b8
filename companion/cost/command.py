"""`companion size`: a deployment sized on the command line, as a table, as JSON, as a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks import plain
from ..formats import BF16
from .answer import VERSION, Sizing, schema
from .checkpoint import Source, find_source, with_weights
from .deployment import Deployment, Own, note, options
from .engines import vllm_flags
from .levers import deployment_crossings, deployment_levers
from .plot import contexts_for, stack, svg
from .registry import HardwareSpec, hardware, models
from .report import Comparison, details, report, table
from .sizing import sized
from .spec import ModelSpec

__all__ = ["add_arguments", "find_model", "report", "run"]

_ABOUT = "Does this model fit on that hardware, for how many users, how fast, and what would help?"
_EXAMPLES = """examples:
  companion size llama-3.1-8b --hardware h100-sxm --batch 8 --context 32768
  companion size ./my-model --hardware l4 --kv fp8            a folder with config.json
  companion size model.Q4_K_M.gguf --hardware t4              weights as they are stored
  companion size llama-3.1-70b --hardware h100-sxm --tensor 8 --link-bandwidth 450GB/s
  companion size deepseek-v3 --hardware h200-sxm --expert 8 --weights fp8
  companion size gpt-oss-20b --hardware l4 --experts mxfp4 --pages unified
  companion size llama-3.1-8b --compare h100-sxm h200-sxm     two devices
  companion size --compare llama-3.1-8b qwen3-8b --hardware l4   two models
  companion size llama-3.1-70b --hardware h100-sxm --devices 8 --plot budget.svg

exit code: 0 whether it fits or not, 2 for a mistake in the input; with --check 1 if it does not fit.
Bytes are printed as bytes, GiB (2^30) and GB (10^9). Amounts take units: 80GB, 1.5GiB, 450GB/s."""


def _typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str):
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


class _Schema(argparse.Action):
    """Prints the schema and ends, like --version."""

    def __call__(self, parser, namespace, values, option_string=None):
        print(json.dumps(schema(), indent=2))
        parser.exit(0)


def _option(add: Callable[..., Any], asked: Any) -> None:
    """One field of `Deployment` or `Own` as an option: type, choices, default and help from its metadata."""
    meta, said = asked.metadata, note(asked)
    add(
        meta.get("flag", "--" + asked.name.replace("_", "-")),
        dest=asked.name,
        type=_typed(meta["read"]) if meta["unit"].endswith(("BYTES", "/s")) else meta["read"],
        default=None if meta.get("unset") else asked.default,
        choices=meta.get("choices"),
        metavar=meta["unit"] or None,
        help=meta["means"] + (f" ({said})" if said else ""),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `companion size`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    kinds = "a config.json or a folder with one, a .gguf file, or one of"
    parser.add_argument("model", nargs="?", help=f"{kinds}: {', '.join(models)}")
    parser.add_argument("--hardware", help=f"one of: {', '.join(hardware)}")
    every = options(Deployment) + options(Own)
    for name in dict.fromkeys(asked.metadata["group"] for asked in every):
        group = parser.add_argument_group(name)
        for asked in every:
            if asked.metadata["group"] == name:
                _option(group.add_argument, asked)

    add = parser.add_argument_group("answer").add_argument
    add("--compare", nargs=2, metavar=("A", "B"), help="two models, or two devices, side by side")
    add("--plot", metavar="FILE.svg", help="write the stacked budget as a picture")
    add("--json", action="store_true", help="print one JSON object")
    add("--schema", nargs=0, action=_Schema, help="print the JSON Schema of --json, and end")
    add("--check", action="store_true", help="exit code 1 if it does not fit")


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
    ask, source = _question(args, args.model, args.hardware)
    sizing = sized(ask)
    crossings, better = deployment_crossings(ask, sizing), deployment_levers(ask)
    if args.plot:
        _plot(Path(args.plot).expanduser(), ask, sizing, crossings)
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
    devices = [plain(name) in hardware for name in (a, b)]
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
    both = Comparison(*(sized(_question(args, model, device)[0]) for model, device in pairs))
    print(json.dumps({"schema": VERSION, **both.to_dict()}, indent=2) if args.json else table(both))
    return 1 if args.check and not all(s.fits for s in (both.a, both.b)) else 0


def _question(args: argparse.Namespace, model: str, device: str | None) -> tuple[Deployment, Source]:
    """What is asked, and where its model comes from."""
    spec = _device(args, device)
    source = find_source(model, like=args.like)
    if args.weights is not None or args.weights_bytes is not None:
        if args.weights is not None and args.weights_bytes is not None:
            raise ValueError("--weights is a format and --weights-bytes a figure for all; give one of them")
        source = with_weights(source)
    told = {asked.name: getattr(args, asked.name) for asked in options(Deployment)}
    stored = dict(source.stored)
    if args.experts is not None:
        stored.pop("experts", None)
    if args.weights is None:
        told["weights"] = BF16.name
    return Deployment(source.spec, spec, **{**told, **stored}), source


def _device(args: argparse.Namespace, name: str | None) -> HardwareSpec:
    own = [x for x in (args.memory, args.bandwidth, args.flops) if x is not None]
    compute = args.compute_dtype
    if name is None:
        if len(own) < 3:
            raise ValueError(
                f"--hardware is required, one of: {', '.join(hardware)}; or all of --memory, --bandwidth, "
                "--flops"
            )
        return HardwareSpec("this device", args.memory, args.bandwidth, {compute or BF16.name: args.flops})
    return hardware[name].with_measured(
        device_bytes=args.memory, bandwidth=args.bandwidth, flops=args.flops, dtype=compute
    )


def _plot(path: Path, ask: Deployment, sizing: Sizing, crossings: dict[str, int | None]) -> None:
    contexts = contexts_for(sizing.context, crossings["full"])
    stacks = [stack(sized(replace(ask, context=n))) for n in contexts]
    one = f"{sizing.devices} x {sizing.hardware}" if sizing.devices > 1 else sizing.hardware
    title = f"{sizing.model} on {one}, {sizing.batch:,} sequence{'s' if sizing.batch > 1 else ''}"
    subtitle = f"weights {sizing.weights}, cache {sizing.kv}"
    marks = [
        f"{label} {tokens:,} tokens"
        for label, tokens in (
            ("cache as large as the weights at", crossings["cache_equals_weights"]),
            ("memory full at", crossings["full"]),
        )
        if tokens is not None
    ]
    path.write_text(svg(stacks, title=title, subtitle=subtitle, marks=["; ".join(marks)]), encoding="utf-8")
