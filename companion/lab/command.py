"""`companion lab`: measure this machine or an endpoint, against predictions made first."""

import argparse
import json
import os
import platform
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from ..cost import HardwareSpec, hardware
from ..cost.command import find_model
from ..cost.registry import near_names, resolve_hardware
from .client import KEY, PATHS, Endpoint
from .points import Point, Run
from .predict import Shape
from .remote import EndpointTarget
from .report import write_report
from .settings import CPU, GPU, LOCAL, REMOTE, SERVER, Sizes, chosen, plan
from .store import Study, read
from .sweep import Target, sweep

TRIES = 3  # of the probes, on a machine that is disturbed
EXAMPLES = """examples:
  companion lab                                     the book's model on this CPU, about two minutes
  companion lab --device cuda --dtype bf16 --sweeps all
  companion lab --endpoint http://127.0.0.1:8000 --model my-model --spec llama-3.1-8b --hardware h100-sxm
  companion lab --rounds 6                          adds three rounds to what the file holds already
  companion lab --report lab.json                   makes the page again

Interrupt it whenever you like: the same command goes on where it stopped.
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
    a("--device", default="cpu", help="a torch device (default cpu)")
    a("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="of the weights (default fp32)")
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
    a("--json", action="store_true", help="print fits and verdicts as one JSON object")


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
        page = Path(args.report).with_suffix(".html")
        write_report(read(args.report), page)
        print(page)
        return 0
    for name, value in (("rounds", args.rounds), ("new-tokens", args.new_tokens), ("limit", args.limit)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    sweeps = chosen(args.sweeps, REMOTE if args.endpoint else LOCAL)
    study = Study(f"{args.out}.json", _settings(args))
    page = study.path.with_suffix(".html")
    if study.resumed:
        print(f"going on with {study.path}", file=sys.stderr)
    targets, sizes, device = _remote(args, study) if args.endpoint else _local(args, study)
    sizes = _asked(args, sizes)
    try:
        for name in sweeps:
            target = targets(name)
            study.note(target=target.describe(), machine=machine())
            points = plan(name, sizes, rounds=args.rounds, new_tokens=args.new_tokens, seed=args.seed)
            sweep(target, points, study, hardware=device, on_progress=_progress(name))
    except KeyboardInterrupt:
        print(f"\ninterrupted; {study.path} keeps all runs, the same command goes on", file=sys.stderr)
        raise
    finally:
        write_report(study.data, page)
    return _tell(args, study, page, sweeps)


def machine() -> dict:
    """What the numbers were taken on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            name = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {"processor": name, "cores": os.cpu_count(), "python": platform.python_version(), "load": load}


def peak_bandwidth(device_name: str) -> float | None:
    """The most that the memory of a GPU of this name does, of all in the table that may be meant."""
    words = [w for w in device_name.lower().replace("-", " ").split() if any(c.isdigit() for c in w)]
    rates = [hardware[n].bandwidth for w in words for n in near_names(w, [*hardware]) if w in n]
    return max(rates, default=None)


def _settings(args: argparse.Namespace) -> dict:
    """What may not change within one file; more rounds, contexts and sweeps may be added."""
    names = ["new_tokens", "seed", "model", "hardware"]
    names += ["endpoint", "spec", "weights", "kv", "api", "extra"] if args.endpoint else ["device", "dtype"]
    return {name: getattr(args, name) for name in names}


def _asked(args: argparse.Namespace, sizes: Sizes) -> Sizes:
    given = {k: _numbers(k, getattr(args, k)) for k in ("contexts", "batches") if getattr(args, k)}
    return Sizes(**(vars(sizes) | given))


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(sorted({int(n) for n in text.split(",")}))
    except ValueError:
        values = ()
    if not values or values[0] < 1:
        raise ValueError(f"{name} must be whole numbers of at least 1 between commas, got {text!r}")
    return values


# Targets ----------------------------------------------------------------------------------------------

Targets = tuple[Callable[[str], Target], Sizes, HardwareSpec | None]


def _remote(args: argparse.Namespace, study: Study) -> Targets:
    try:
        extra = json.loads(args.extra)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f"extra must be a JSON object, got {args.extra!r}")
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
    import torch

    from ..model import load
    from .variants import targets_here

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    if args.spec is not None:
        raise ValueError("spec is for an endpoint; a model here brings its own")
    decoder, _ = load(args.model or "smollm2-135m", dtype=dtype, device=args.device)
    on_cpu = torch.device(args.device).type == "cpu"
    if args.hardware and args.hardware != "here":
        device = resolve_hardware(args.hardware)
        study.note(hardware=_as_dict(device))
    else:
        formats = tuple(dict.fromkeys(["fp32", args.dtype])) if on_cpu else ("fp32", "bf16", "fp16")
        device = _probed(study, args.device, formats)
    sizes = (CPU if on_cpu else GPU).within(decoder.spec.max_context, args.new_tokens)
    return targets_here(decoder), sizes, device


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


def _tell(args: argparse.Namespace, study: Study, page: Path, sweeps: list[str]) -> int:
    results = {name: study.data["sweeps"][name]["result"] for name in sweeps}
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if args.json:
        files = {"study": str(study.path), "report": str(page)}
        print(json.dumps({"sweeps": results, **files}, allow_nan=False))
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
