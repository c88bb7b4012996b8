"""`companion size`: a deployment sized on the command line, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

from .registry import _plain, hardware, models
from .sizing import Sizing, size
from .spec import ModelSpec

_BAR = 48
# vLLM's --kv-cache-dtype takes these names of ours; others have no flag.
_VLLM_KV = {"fp8": "fp8", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


def _format(text: str) -> str | float:
    """A format's name, or a number of bits per value."""
    try:
        return float(text)
    except ValueError:
        return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `companion size`."""
    parser.add_argument("model", help=f"path to a Hugging Face config.json, or one of: {', '.join(models)}")
    parser.add_argument("--hardware", required=True, help=f"one of: {', '.join(hardware)}")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once (default 1)")
    parser.add_argument("--context", type=int, default=8192, help="tokens cached for each (default 8192)")
    parser.add_argument("--weights", type=_format, default="bf16", help="format, or bits per value")
    parser.add_argument("--experts", type=_format, help="another format for the routed experts, e.g. mxfp4")
    parser.add_argument("--kv", type=_format, default="bf16", help="format of the cache (default bf16)")
    parser.add_argument("--devices", type=int, default=1, help="devices that hold it together (default 1)")
    parser.add_argument("--overhead-bytes", type=int, default=0, help="per device, not counted (default 0)")
    parser.add_argument("--block-size", type=int, help="tokens per block of a paged cache")
    parser.add_argument("--efficiency", type=float, default=1.0, help="share of the peak reached (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def find_model(text: str) -> ModelSpec:
    """A model by name, or from the path of a configuration if `text` looks like one or exists."""
    if _plain(text) in models:
        return models[text]
    if text.endswith(".json") or text.startswith((".", "~", os.sep)) or Path(text).exists():
        return ModelSpec.from_config(Path(text).expanduser())
    return models[text]  # raises, with the near names


def run(args: argparse.Namespace) -> int:
    """Size and print; returns 0 whether it fits or not. Raises ValueError for bad arguments."""
    sizing = size(
        find_model(args.model),
        args.hardware,
        batch=args.batch,
        context=args.context,
        weights=args.weights,
        kv=args.kv,
        devices=args.devices,
        experts=args.experts,
        overhead_bytes=args.overhead_bytes,
        block_size=args.block_size,
        efficiency=args.efficiency,
    )
    print(json.dumps(sizing.to_dict(), indent=2) if args.json else report(sizing))
    return 0


def _row(label: str, note: str, count: int) -> str:
    return f"{label:<10} {note:<9} {count:>21,} B {count / 2**30:>10,.2f} GiB {count / 1e9:>10,.2f} GB"


def _bar(sizing: Sizing) -> str:
    """Weights as #, cache as =, free memory as dots, on the scale of the larger of need and memory."""
    memory = sizing.device_bytes * sizing.devices
    scale = _BAR / max(memory, sizing.total_bytes)
    weights = round(sizing.weights_bytes * scale)
    used = max(weights, round(sizing.total_bytes * scale))
    bar = ("#" * weights + "=" * (used - weights)).ljust(_BAR, ".")
    if not sizing.fits:
        edge = round(memory * scale)
        bar = bar[:edge] + "|" + bar[edge:]
    return f"[{bar}] {sizing.total_bytes / memory:.0%} of the memory   # weights  = cache"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} us"


def vllm_command(sizing: Sizing) -> str:
    """The vLLM command line that realises the choice, with a comment where no flag does."""
    parts = ["vllm serve CHECKPOINT", f"--max-model-len {sizing.context}", f"--max-num-seqs {sizing.batch}"]
    if sizing.devices > 1:
        parts.append(f"--tensor-parallel-size {sizing.devices}")
    if sizing.weights_dtype == "fp8":
        parts.append("--quantization fp8")
    notes = []
    if sizing.kv_dtype in _VLLM_KV:
        parts.append(f"--kv-cache-dtype {_VLLM_KV[sizing.kv_dtype]}")
    elif sizing.kv_dtype not in ("bf16", "fp16"):
        notes.append(f"no flag for a {sizing.kv_dtype} cache")
    if sizing.weights_dtype not in ("bf16", "fp16", "fp32", "fp8"):
        notes.append(f"CHECKPOINT must be stored as {sizing.weights_dtype}")
    share = sizing.bytes_per_device / sizing.device_bytes
    if share > 0.9:  # vLLM's default share of the memory
        parts.append(f"--gpu-memory-utilization {min(1.0, math.ceil(share * 100) / 100):.2f}")
    return " ".join(parts) + (f"   # {'; '.join(notes)}" if notes else "")


def report(sizing: Sizing) -> str:
    """The human-readable answer: bytes, GiB and GB side by side, then what follows from them."""
    memory = sizing.device_bytes * sizing.devices
    lines = [
        f"{sizing.model} on {sizing.devices} x {sizing.hardware}: "
        f"{sizing.batch:,} {'sequence' if sizing.batch == 1 else 'sequences'} of {sizing.context:,} tokens",
        "",
        _row("weights", sizing.weights_dtype, sizing.weights_bytes),
        _row("cache", sizing.kv_dtype, sizing.kv_bytes),
    ]
    rest = sizing.total_bytes - sizing.weights_bytes - sizing.kv_bytes
    if rest > sizing.devices:  # copies of heads and stated overhead; below that it is rounding
        lines.append(_row("other", "", rest))
    lines += [_row("total", "", sizing.total_bytes), _row("memory", "", memory), _bar(sizing), ""]
    growth, every = sizing.kv_growth_bytes_per_token, sizing.kv_bytes_per_token
    grows = f", {growth:,} B once the windows are full" if growth != every else ""
    lines.append(f"cache per token  {every:,} B ({every / 1024:,.1f} KiB){grows}")
    longest = "unbounded" if sizing.max_context is None else f"{sizing.max_context:,} tokens"
    limit = f" (the model's limit: {sizing.model_max_context:,})" if sizing.model_max_context else ""
    lines.append(f"fits             {'yes' if sizing.fits else 'no'}")
    lines.append(f"users            {sizing.max_batch:,} at {sizing.context:,} tokens")
    lines.append(f"longest context  {longest} at batch {sizing.batch:,}{limit}")
    if sizing.fits:
        lines.append(
            f"decode           at most {sizing.decode_tokens_per_second:,.0f} tokens/s, "
            f"{_duration(sizing.decode_seconds)} a step; bound by {sizing.bound_by}"
        )
        lines.append(
            f"first token      at least {_duration(sizing.ttft_seconds)} for {sizing.context:,} prompt tokens"
        )
        lines += ["", vllm_command(sizing)]
    lines += [f"warning: {note}" for note in sizing.warnings]
    return "\n".join(lines)
