"""What `companion lab` measures: an endpoint, a transformers model, or the companion's own decoder here."""

import argparse
import json
import secrets
import sys
from collections.abc import Callable

from ..cost import HardwareSpec, hardware
from ..cost.command import find_model
from ..cost.dtypes import bits_per_value
from ..cost.registry import near_names, resolve_hardware
from .client import Endpoint
from .points import CPU, GPU, READ, SERVER, Shape, Sizes
from .remote import EndpointTarget
from .studies import Study, Target

TRIES = 3  # of the probes, on a machine that is disturbed
Targets = tuple[Callable[[str], Target], Sizes, HardwareSpec | None]


def targets_of(args: argparse.Namespace, study: Study) -> Targets:
    """(the target of a sweep by its name, sizes that it takes, the device to predict with or None).

    Raises ValueError, in one line, for what cannot be measured.
    """
    if args.endpoint:
        return _remote(args, study)
    return _transformers(args, study) if args.transformers else _local(args, study)


def _remote(args: argparse.Namespace, study: Study) -> Targets:
    try:
        extra = json.loads(args.extra)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f"extra must be a JSON object, got {args.extra!r}")
    for name, value in (("weights", args.weights), ("kv", args.kv)):
        bits_per_value(value, argument=name)
    endpoint = Endpoint(
        args.endpoint, args.model, key_env=args.key_env, api=args.api, extra=extra, limit=args.limit,
        first_timeout=args.timeout, gap_timeout=args.timeout,
    )  # fmt: skip
    shape = None if args.spec is None else Shape(find_model(args.spec), args.weights, args.kv)
    target = EndpointTarget(endpoint, shape=shape, session=secrets.token_hex(8))
    endpoint.choose_model()
    device = None
    if args.hardware == "here":
        device = _probed(study, "cpu", ("fp32",))
    elif args.hardware:
        device = resolve_hardware(args.hardware)
        study.note(hardware=_as_dict(device))
    sizes = SERVER.within(shape.spec.max_context if shape else None, args.new_tokens + 1)
    return (lambda name: target), sizes, device


def _local(args: argparse.Namespace, study: Study) -> Targets:
    from ..model import load
    from .variants import targets_here

    decoder, _ = load(args.model or "smollm2-135m", dtype=_dtype(args), device=args.device)
    sizes = CPU if _on_cpu(args) else GPU
    return targets_here(decoder), sizes.within(decoder.spec.max_context, args.new_tokens), _here(args, study)


def _transformers(args: argparse.Namespace, study: Study) -> Targets:
    from .local import TransformersTarget
    from .variants import pretrained

    model, shape = pretrained(args.transformers, dtype=_dtype(args), device=args.device)
    target = TransformersTarget(model, shape)
    sizes = READ if _on_cpu(args) else GPU
    return (lambda name: target), sizes.within(shape.spec.max_context, args.new_tokens), _here(args, study)


def _dtype(args: argparse.Namespace):
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]


def _on_cpu(args: argparse.Namespace) -> bool:
    import torch

    return torch.device(args.device).type == "cpu"


def _here(args: argparse.Namespace, study: Study) -> HardwareSpec:
    """The device to predict with, where the model runs on this machine."""
    if args.hardware and args.hardware != "here":
        device = resolve_hardware(args.hardware)
        if args.dtype not in device.flops:
            known = ", ".join(device.flops)
            raise ValueError(f"dtype={args.dtype!r}; {device.name} is known to compute in {known}")
        study.note(hardware=_as_dict(device))
        return device
    formats = tuple(dict.fromkeys(["fp32", args.dtype])) if _on_cpu(args) else ("fp32", "bf16", "fp16")
    return _probed(study, args.device, formats)


def _probed(study: Study, device: str, formats: tuple[str, ...]) -> HardwareSpec:
    """This machine from its own rates, or those that the study was begun with."""
    if "hardware" not in study.data:
        try:
            import torch
        except ModuleNotFoundError:
            raise ValueError("hardware 'here' needs torch to probe this machine with") from None
        from .probes import hardware_from, probe

        print("probing this machine", file=sys.stderr)
        peak = None
        if torch.device(device).type == "cuda":
            peak = peak_bandwidth(torch.cuda.get_device_name(device))
        for again in reversed(range(TRIES)):  # a neighbour may have disturbed the largest array
            found = probe(device, dtypes=formats, peak=peak)
            try:
                measured = hardware_from(found)
                break
            except ValueError as e:
                if not again:
                    raise ValueError(f"{e}; or name the device with --hardware") from None
        study.note(probes=[p.to_dict() for p in found], hardware=_as_dict(measured))
    kept = study.data["hardware"]
    return HardwareSpec.measured(kept["name"], bandwidth=kept["bandwidth"], flops=kept["flops"])


def _as_dict(device: HardwareSpec) -> dict:
    return {"name": device.name, "bandwidth": device.bandwidth, "flops": dict(device.flops)}


def peak_bandwidth(device_name: str) -> float | None:
    """The most that the memory of a GPU of this name does, of all in the table that may be meant."""
    words = [w for w in device_name.lower().replace("-", " ").split() if any(c.isdigit() for c in w)]
    rates = [hardware[n].bandwidth for w in words for n in near_names(w, [*hardware]) if w in n]
    return max(rates, default=None)
