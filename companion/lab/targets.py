"""What `companion lab` measures: an endpoint, a transformers model, or the companion's own decoder here.

`EndpointTarget` is at the other end of a wire: one model behind an OpenAI-compatible endpoint.
"""

import argparse
import json
import secrets
import statistics
import sys
from collections.abc import Callable

from ..checks import near_names
from ..cost import HardwareSpec, hardware
from ..cost.command import find_model
from ..cost.registry import resolve_hardware
from ..formats import bits_per_value
from .answers import Answer
from .client import Endpoint
from .points import CPU, GPU, READ, SERVER, Point, Run, Shape, Sizes, other_ending, prompt
from .studies import Study, Target

MEANT = 64  # tokens that a chat's template has in common with every other; more of a cold prompt is a cache's


class EndpointTarget:
    """Measures through `endpoint`. Lengths are the server's own count of tokens.

    shape: the model's, if it is known; with a device it gives predictions.
    session: makes the prompts differ from those of any other session, an earlier one of this study included.
    """

    def __init__(self, endpoint: Endpoint, *, shape: Shape | None = None, session: str = ""):
        self.endpoint, self.session = endpoint, session
        self.shapes = {} if shape is None else {"base": shape}
        self._per_word, self._fixed = 1.0, 0.0  # tokens per word of a prompt, and beside its words
        self._sent = 0

    def describe(self) -> dict:
        """Facts about what is measured, for the study's file: its kind, device and variants."""
        facts = {"kind": "endpoint", "url": self.endpoint.url, "model": self.endpoint.model}
        return facts | {"variants": {name: shape.to_dict() for name, shape in self.shapes.items()}}

    def warm_up(self) -> None:
        """Choose the model and count the tokens of two prompts, to aim at lengths. ValueError on a fault."""
        self.endpoint.choose_model()
        found = []
        for words in (16, 144):
            answer = self.endpoint.ask(self._prompt(words), max_tokens=2)
            if answer.fault:
                raise ValueError(f"endpoint {self.endpoint.url}: {answer.fault}")
            found.append(answer.prompt_tokens)
        if None not in found and found[1] > found[0]:
            self._per_word = (found[1] - found[0]) / 128
            self._fixed = found[0] - 16 * self._per_word

    def measure(self, point: Point) -> Run:
        """One run of `point`; where there is none, the run's `fault` says why."""
        if not point.prompt:
            return Run(fault="a server's cache cannot be filled from outside: points need prompt=True")
        if point.batch > self.endpoint.limit:
            return Run(fault=f"batch {point.batch} is more than the {self.endpoint.limit} requests allowed")
        words = max(1, round((point.context - self._fixed) / self._per_word))
        prompts = [self._prompt(words) for _ in range(point.batch)]
        if point.variant == "warm":
            known = self.endpoint.ask_all(prompts, max_tokens=1, concurrency=point.batch)
            if fault := next((a.fault for a in known if a.fault), None):
                return Run(fault=str(fault))
            prompts = [other_ending(p, f"{self.session}{self._sent}") for p in prompts]
        answers = self.endpoint.ask_all(prompts, max_tokens=point.new_tokens + 1, concurrency=point.batch)
        return summary(point, answers)

    def _prompt(self, words: int) -> str:
        self._sent += 1
        return prompt(words, f"{self.session}/{self._sent}")


def summary(point: Point, answers: list[Answer]) -> Run:
    """One run out of the answers of a batch: medians of times, the rate while all of them were writing."""
    if fault := next((a.fault for a in answers if a.fault), None):
        return Run(fault=str(fault))
    cached = [a.cached_tokens for a in answers if a.cached_tokens is not None]
    prompts = [a.prompt_tokens for a in answers if a.prompt_tokens is not None]
    if point.variant != "warm" and cached and max(cached) > max(MEANT, point.context // 10):
        return Run(fault=f"the server's prefix cache answered for {max(cached)} tokens of a new prompt")
    steps = [a.itl_s for a in answers if a.itl_s is not None]
    notes = []
    if len(prompts) < len(answers):
        notes.append("the server reports no usage: lengths are the ones aimed at, tokens are events")
    if any(a.merged for a in answers):
        notes.append("the server merges tokens: times per token are averages")
    if point.variant == "warm" and not cached:
        notes.append("the server does not say what it had cached")
    return Run(
        ttft_s=statistics.median(a.ttft_s for a in answers),
        itl_s=statistics.median(steps) if steps else None,
        steps_s=[g for a in answers for g in a.gaps_s],
        context=round(statistics.fmean(prompts)) if prompts else None,
        tokens=sum(a.tokens for a in answers),
        tokens_per_second=together(answers),
        cached_tokens=max(cached) if cached else None,
        note="; ".join(notes),
    )


def together(answers: list[Answer]) -> float | None:
    """Tokens per second of all answers in the time when each of them was being written; None without such."""
    if any(len(a.arrivals_s) < 2 for a in answers):
        return None
    begin = max(a.sent_s + a.arrivals_s[0] for a in answers)
    end = min(a.finished_s for a in answers)
    if end <= begin:
        return None
    tokens = 0.0
    for a in answers:
        inside = sum(begin < a.sent_s + t <= end for t in a.arrivals_s)
        tokens += inside * a.tokens / len(a.arrivals_s) if a.merged else inside
    return tokens / (end - begin)


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
