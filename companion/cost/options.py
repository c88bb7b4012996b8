"""The arguments of `companion size`, with their units and examples."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from .amounts import bytes_of, flops_of, rate_of
from .pages import PAGES
from .registry import hardware, models
from .schema import schema

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


def _format(text: str) -> str | float:
    """A format's name, or a number of bits per value."""
    try:
        return float(text)
    except ValueError:
        return text


class _Schema(argparse.Action):
    """Prints the schema and ends, like --version."""

    def __call__(self, parser, namespace, values, option_string=None):
        print(json.dumps(schema(), indent=2))
        parser.exit(0)


_BYTES = {"type": _typed(bytes_of), "metavar": "BYTES"}
_RATE = {"type": _typed(rate_of), "metavar": "BYTES/s"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `companion size`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    kinds = "a config.json or a folder with one, a .gguf file, or one of"
    parser.add_argument("model", nargs="?", help=f"{kinds}: {', '.join(models)}")
    parser.add_argument("--hardware", help=f"one of: {', '.join(hardware)}")
    group = parser.add_argument_group

    add = group("load").add_argument
    add("--batch", type=int, default=1, help="sequences at once (default 1)")
    add("--context", type=int, default=8192, help="tokens cached for each (default 8192)")

    add = group("formats").add_argument
    add("--weights", type=_format, help="format, or bits per value (default: as the file says, else bf16)")
    add("--weights-bytes", **_BYTES, help="this figure instead of the counted one, e.g. 140GB")
    add("--experts", type=_format, help="another format for the routed experts, e.g. mxfp4")
    add("--kv", type=_format, default="bf16", help="format of the cache, or bits per value (default bf16)")
    add("--like", metavar="FAMILY", help="the layers of a configuration are like this family's, e.g. llama")

    add = group("several devices").add_argument
    add("--devices", type=int, help="devices that hold it together, each an equal part (default 1)")
    add("--tensor", type=int, help="instead: tensor-parallel ranks, counted one by one")
    add("--expert", type=int, help="groups of them that divide experts and batch")
    add(
        "--kv-sharding", choices=("heads", "batch"), default="heads",
        help="with --devices: how they divide the cache (default heads)",
    )  # fmt: skip
    add("--link-bandwidth", **_RATE, help="that leave a device for others; without it exchanges take no time")
    add("--link-latency", type=float, default=0.0, metavar="SECONDS", help="of each message (default 0)")

    add = group("the engine, as assumptions").add_argument
    add("--block-size", type=int, help="tokens per block of a paged cache")
    add(
        "--pages", choices=PAGES, default="exact",
        help="sliding layers take what they need, grouped pages (vLLM), or one table for all (default exact)",
    )  # fmt: skip
    add("--step-tokens", type=int, default=1, help="tokens of a sequence that a step may write (default 1)")
    add("--activation-bytes", **_BYTES, default=0, help="per device (default 0)")
    add("--overhead-bytes", **_BYTES, default=0, help="per device, for the runtime and the rest (default 0)")
    add("--overhead-seconds", type=float, default=0.0, help="per step, for launches (default 0)")
    add("--efficiency", type=float, default=1.0, help="share of the peak reached (default 1: bounds)")
    add("--memory", **_BYTES, help="of one device, instead of its row's")
    add("--bandwidth", **_RATE, help="likewise, e.g. 3.35TB/s")
    add("--flops", type=_typed(flops_of), metavar="FLOP/s", help="likewise, e.g. 989TFLOPS, in --compute")
    add("--compute", metavar="FORMAT", help="format of the products (default: the device's)")

    add = group("answer").add_argument
    add("--compare", nargs=2, metavar=("A", "B"), help="two models, or two devices, side by side")
    add("--plot", metavar="FILE.svg", help="write the stacked budget as a picture")
    add("--json", action="store_true", help="print one JSON object")
    add("--schema", nargs=0, action=_Schema, help="print the JSON Schema of --json, and end")
    add("--check", action="store_true", help="exit code 1 if it does not fit")
