"""`companion lab`: measure this machine or an endpoint, against predictions made first."""

import argparse
import importlib.util
import json
import os
import platform
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .. import machine as this_machine
from ..checks import whole
from ..cost import HardwareSpec
from ..cost.command import find_model
from ..cost.registry import resolve_hardware
from ..formats import bits_per_value
from .client import KEY, Endpoint, EndpointTarget
from .points import CPU, GPU, LOCAL, READ, REMOTE, SERVER, Point, Run, Shape, Sizes, chosen, plan
from .probes import DTYPES, TORCH, probed
from .reports import write_report
from .studies import Study, Target, read, sweep
from .transport import PATHS

EXAMPLES = """examples:
  companion lab                                     the book's model on this CPU, about two minutes
  companion lab --device cuda --dtype bf16 --sweeps all
  companion lab --sweeps kv,weights                 int8 for the cache, and int8 for the weights
  companion lab --transformers ./my-model           your own model, run by transformers (prompts are read)
  companion lab --endpoint http://127.0.0.1:8000 --model my-model --spec llama-3.1-8b --hardware h100-sxm
  companion lab --rounds 6                          adds three rounds to what the file holds already
  companion lab --report lab.json                   makes the page again

Interrupt it whenever you like: the same command goes on where it stopped.

--json prints {"version", "sweeps": {NAME: {"fits", "verdicts", "table", "planned", "measured"}}, "study",
"report"}: seconds throughout, and beside a verdict's value its unit. The study's file holds every run.
Exit codes: 0 measured, 1 nothing could be measured, 2 a mistake in what was asked, 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `companion lab`."""
    parser.epilog, parser.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    a = parser.add_argument
    a("--out", default="lab", metavar="NAME", help="writes NAME.json and NAME.html (default lab)")
    a("--sweeps", metavar="A,B", help=f"{', '.join(LOCAL)} or all (default context,batch)")
    a("--contexts", metavar="N,N", help="tokens in the cache, for the context sweep")
    a("--batches", metavar="N,N", help="sequences at once, for the batch sweep")
    a("--rounds", type=int, default=3, help="how often each point is measured (default 3)")
    a("--new-tokens", type=int, default=8, metavar="N", help="decode steps per measurement (default 8)")
    a("--seed", type=int, default=1, help="of the order of points and of the prompts")
    a("--model", help="here: a name, a .gguf file or a folder (default smollm2-135m); else the server's name")
    a(
        "--transformers",
        metavar="MODEL",
        help="measure this transformers model instead: a folder, or a name that is downloaded already",
    )
    a("--device", default="cpu", help="a torch device (default cpu)")
    a("--dtype", default="fp32", choices=DTYPES, help="of the weights (default fp32)")
    a("--hardware", metavar="NAME", help="predict with this device; 'here' probes this one (see size --help)")
    far = parser.add_argument_group("an endpoint")
    a = far.add_argument
    a("--endpoint", metavar="URL", help="any OpenAI-compatible server, e.g. http://127.0.0.1:8000")
    a("--spec", metavar="MODEL", help="the model's shape, to predict with: a name or a config.json")
    a("--weights", type=_format, default="bf16", help="format of its weights, or bits each (default bf16)")
    a("--kv", type=_format, default="bf16", help="format of its cache, or bits per value (default bf16)")
    a("--key-env", default=KEY, metavar="VAR", help=f"environment variable with the key (default {KEY})")
    a("--api", default="chat", choices=tuple(PATHS))
    a(
        "--extra",
        default="{}",
        metavar="JSON",
        help="""more fields of a request, e.g. '{"ignore_eos": true}'""",
    )
    a("--limit", type=int, default=16, help="most requests in flight at once (default 16)")
    a("--timeout", type=float, default=300.0, metavar="S", help="seconds for a first token (default 300)")
    a = parser.add_argument
    a("--report", metavar="FILE.json", help="only make the page of this study again")
    a("--json", action="store_true", help="print fits and verdicts as one JSON object (see below)")


def _format(text: str) -> str | float:
    """A format's name, or a number of bits per value."""
    try:
        return float(text)
    except ValueError:
        return text


def run(args: argparse.Namespace) -> int:
    """Measure, write the study and the page, print the verdicts. 1 if nothing could be measured.

    Raises ValueError for bad arguments, and for an endpoint that cannot be measured.
    """
    if args.report:
        page, data = Path(args.report).with_suffix(".html"), read(args.report)
        write_report(data, page)
        print(_as_json(data, [*data["sweeps"]], args.report, page) if args.json else page)
        return 0
    for name in ("rounds", "new-tokens", "limit"):
        whole(name, getattr(args, name.replace("-", "_")))
    _one_target(args)
    sweeps = chosen(args.sweeps, REMOTE if args.endpoint or args.transformers else LOCAL)
    asked = _asked(args)
    study = Study(_out(args.out), _settings(args))
    page = study.path.with_suffix(".html")
    if study.resumed:
        print(f"going on with {study.path}", file=sys.stderr)
    targets, sizes, device = _targets(args, study)
    sizes = replace(sizes, **asked)
    try:
        for name in sweeps:
            target = targets(name)
            study.note(target=target.describe(), machine=machine())
            points = plan(name, sizes, rounds=args.rounds, new_tokens=args.new_tokens, seed=args.seed)
            sweep(target, points, study, hardware=device, on_progress=_progress(name))
    except KeyboardInterrupt:
        print(f"\ninterrupted; {study.path} keeps all runs, the same command goes on", file=sys.stderr)
        raise
    except ValueError:
        study.discard()  # else the mended command would be answer that it has other settings
        raise
    finally:
        if study.path.exists():
            write_report(study.data, page)
    return _tell(args, study, page, sweeps)


def machine() -> dict:
    """What the numbers were taken on; without torch, which an endpoint's client may do without."""
    load = this_machine.load()
    return {
        "processor": this_machine.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": None if load is None else round(load, 2),
    }


def _settings(args: argparse.Namespace) -> dict:
    """What may not change within one file; more rounds, contexts and sweeps may be added."""
    names = ["new_tokens", "seed", "model", "hardware"]
    names += ["endpoint", "spec", "weights", "kv", "api", "extra"] if args.endpoint else ["device", "dtype"]
    names += ["transformers"] if args.transformers else []
    return {name: getattr(args, name) for name in names}


def _one_target(args: argparse.Namespace) -> None:
    if args.transformers:
        for other in ("endpoint", "model"):
            if getattr(args, other):
                raise ValueError(f"transformers and {other} each name what is measured; give one of them")
    if args.spec is not None and not args.endpoint:
        raise ValueError("spec is for an endpoint; a model here brings its own")


def _asked(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    return {k: _numbers(k, getattr(args, k)) for k in ("contexts", "batches") if getattr(args, k) is not None}


def _out(name: str) -> str:
    stem = name.removesuffix(".json")
    if not stem or stem.endswith(("/", os.sep)):
        raise ValueError(f"out must be the name of a file, got {name!r}")
    return f"{stem}.json"


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(sorted({int(n) for n in text.split(",")}))
    except ValueError:
        values = ()
    if not values or values[0] < 1:
        raise ValueError(f"{name} must be whole numbers of at least 1 between commas, got {text!r}")
    return values


Targets = tuple[Callable[[str], Target], Sizes, HardwareSpec | None]


def _targets(args: argparse.Namespace, study: Study) -> Targets:
    """(the target of a sweep by its name, sizes that it takes, the device to predict with or None)."""
    if args.endpoint:
        return _remote(args, study)
    import torch

    from .local import TransformersTarget, pretrained, targets_here

    like = {"dtype": getattr(torch, TORCH[args.dtype]), "device": args.device}
    if args.transformers:
        model, shape = pretrained(args.transformers, **like)
        target, spec, small = TransformersTarget(model, shape), shape.spec, READ
        targets = lambda name: target  # noqa: E731
    else:
        from ..model import load

        decoder, _ = load(args.model or "smollm2-135m", **like)
        targets, spec, small = targets_here(decoder), decoder.spec, CPU
    on_cpu = torch.device(args.device).type == "cpu"
    sizes = (small if on_cpu else GPU).within(spec.max_context, args.new_tokens)
    formats = tuple(dict.fromkeys(["fp32", args.dtype])) if on_cpu else DTYPES
    return targets, sizes, _hardware(args, study, formats)


def _remote(args: argparse.Namespace, study: Study) -> Targets:
    try:
        extra = json.loads(args.extra)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f"extra must be a JSON object, got {args.extra!r}")
    for name in ("weights", "kv"):
        bits_per_value(getattr(args, name), argument=name)
    endpoint = Endpoint(
        args.endpoint, args.model, key_env=args.key_env, api=args.api, extra=extra, limit=args.limit,
        first_timeout=args.timeout, gap_timeout=args.timeout,
    )  # fmt: skip
    shape = None if args.spec is None else Shape(find_model(args.spec), args.weights, args.kv)
    target = EndpointTarget(endpoint, shape=shape, session=secrets.token_hex(8))
    endpoint.choose_model()
    device = _hardware(args, study, ("fp32",)) if args.hardware else None
    sizes = SERVER.within(shape.spec.max_context if shape else None, args.new_tokens + 1)
    return (lambda name: target), sizes, device


def _hardware(args: argparse.Namespace, study: Study, formats: Sequence[str]) -> HardwareSpec:
    """The device to predict with: the one named, or this machine from rates that are kept in the study."""
    if args.hardware and args.hardware != "here":
        device = resolve_hardware(args.hardware)
        if not args.endpoint and args.dtype not in device.flops:
            known = ", ".join(device.flops)
            raise ValueError(f"dtype={args.dtype!r}; {device.name} is known to compute in {known}")
        study.note(hardware=_rates(device))
        return device
    if "hardware" not in study.data:
        if importlib.util.find_spec("torch") is None:
            raise ValueError("hardware 'here' needs torch to probe this machine with")
        print("probing this machine", file=sys.stderr)
        probes, device = probed("cpu" if args.endpoint else args.device, formats)
        study.note(probes=[p.to_dict() for p in probes], hardware=_rates(device))
    return HardwareSpec.measured(**study.data["hardware"])


def _rates(device: HardwareSpec) -> dict:
    return {"name": device.name, "bandwidth": device.bandwidth, "flops": dict(device.flops)}


# Telling ----------------------------------------------------------------------------------------------


def _progress(name: str) -> Callable[[int, int, Point, Run | None], None]:
    live = sys.stderr.isatty()

    def tell(done: int, total: int, point: Point, run: Run | None) -> None:
        if run is None and not live:
            return
        text = f"{name} {done}/{total}  {point.variant}, {point.context:,} tokens, batch {point.batch}"
        if run is not None:
            seen = [f"TTFT {run.ttft_s * 1e3:,.0f} ms"] if run.ttft_s is not None else []
            seen += [f"{run.itl_s * 1e3:,.1f} ms per token"] if run.itl_s is not None else []
            text += f": {run.fault or ', '.join(seen)}"
        over = live and not (run and run.fault)
        print(f"\r\x1b[K{text}" if live else text, end="" if over else "\n", file=sys.stderr, flush=True)

    return tell


def _as_json(data: Mapping, sweeps: Sequence[str], study: str, page: Path) -> str:
    results = {name: data["sweeps"][name].get("result") for name in sweeps}
    answer = {"version": data["version"], "sweeps": results, "study": study, "report": str(page)}
    return json.dumps(answer, allow_nan=False)


def _tell(args: argparse.Namespace, study: Study, page: Path, sweeps: list[str]) -> int:
    results = {name: study.data["sweeps"][name]["result"] for name in sweeps}
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if args.json:
        print(_as_json(study.data, sweeps, str(study.path), page))
    else:
        for name, result in results.items():
            print(f"{name}: {result['measured']} of {result['planned']} runs")
            for v in result["verdicts"]:
                print(f"  {v['outcome']:<20} {v['claim']}\n{'':<23}{v['reason']}")
        print(f"{study.path}\n{page}")
    for name in sweeps:
        for fault in sorted(set(study.data["sweeps"][name]["faults"].values())):
            print(f"companion lab: {name}: {fault}", file=sys.stderr)
    return 0 if any(r["measured"] for r in results.values()) else 1
