"""Targets whose times are a formula, and a server that writes at known speeds: for sweeps without a clock."""

import json
import random

from scripted import DONE, ROLE, Answered, delta, finish, sse, usage

from companion.cost import HardwareSpec, decode_step, models, prefill
from companion.lab.points import Run, Shape

SPEC = models["smollm2-135m"]
SHAPE = Shape(SPEC, "fp32", "fp32", "fp32")
HERE = HardwareSpec.measured("made up", bandwidth=20e9, flops=100e9)


class MadeUpTarget:
    """Takes `factor` times what a device with these rates would, with some scatter."""

    def __init__(self, *, bandwidth=20e9, flops=100e9, scatter=0.01, seed=0, faults=(), interrupt=None):
        self.device = HardwareSpec.measured("truth", bandwidth=bandwidth, flops=flops)
        self.shapes = {"base": SHAPE}
        self.rng, self.scatter, self.faults, self.interrupt = (
            random.Random(seed),
            scatter,
            set(faults),
            interrupt,
        )
        self.measured, self.warmed = [], 0

    def describe(self):
        return {"kind": "made up"}

    def warm_up(self):
        self.warmed += 1

    def noise(self):
        return max(0.1, 1 + self.rng.gauss(0, self.scatter))

    def measure(self, point):
        if self.interrupt is not None and len(self.measured) == self.interrupt:
            raise KeyboardInterrupt
        self.measured.append(point.id)
        if point.id in self.faults or "all" in self.faults:
            return Run(fault="it broke")
        formats = {"weights": "fp32", "kv": "fp32", "compute_dtype": "fp32"}
        middle = point.context + (point.new_tokens + 1) // 2
        itl = decode_step(SPEC, self.device, point.batch, middle, **formats).seconds * self.noise()
        ttft = (
            prefill(SPEC, self.device, point.context, **formats).seconds * self.noise()
            if point.prompt
            else None
        )
        return Run(ttft, itl, [itl], point.context, point.new_tokens, point.batch / itl)


class WritingServer:
    """A scripted transport's answers from a formula: TTFT = a + b n, ITL = c + d n; a word is a token."""

    def __init__(
        self, *, ttft=(0.25, 1 / 1024), itl=(1 / 16, 2**-18), usage=True, cache=False, models=("m",)
    ):
        self.ttft, self.itl, self.usage, self.models = ttft, itl, usage, models
        self.cache, self.seen = cache, set()

    def answer(self, method, body):
        if method == "GET":
            listed = json.dumps({"data": [{"id": m} for m in self.models]}).encode()
            return Answered([(0.0, listed)], headers={"content-type": "application/json"})
        words = body["messages"][0]["content"].split()
        n, start = len(words) + 10, tuple(words[:12])
        cached = n - 16 if self.cache and start in self.seen else 0
        self.seen.add(start)
        count = body["max_tokens"]
        first = self.ttft[0] + self.ttft[1] * (n - cached)
        pieces = [(0.0, sse(ROLE)), (first, sse(delta("w")))]
        pieces += [(self.itl[0] + self.itl[1] * n, sse(delta(" w")))] * (count - 1)
        told = (usage(count, n, cached),) if self.usage else ()
        return Answered([*pieces, (0.0, sse(finish(), *told, DONE))])
