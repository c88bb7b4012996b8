"""Two checkouts of this repository against each other, in turns within one run: what a change costs in speed.

    python -m benchmarks.checkouts OLD NEW [--rounds N] [--threads N] [--out FILE]

Each of three processes has the package of one checkout: the old one, the old one again, and the new one. They
take turns, in another order every round, and never work at the same time. Printed are the paired ratios of
seconds, new over old and old over old: the second says how much of the first is noise. Only names that both
checkouts have are used, those of the public face.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT, STEPS, REQUESTS, NEW = 512, 8, 8, 24


def tasks() -> dict:
    """Name -> a function without arguments whose call is timed."""
    import torch

    from companion.caches import make_cache
    from companion.cost import models
    from companion.engine import Engine, Request
    from companion.kernels import use
    from companion.model import load, quantize_weights

    torch.manual_seed(0)
    model, small = load("smollm2-135m")[0], quantize_weights(load("smollm2-135m")[0])
    ids = torch.randint(3, model.spec.vocab, (1, PROMPT))

    def decode(model, how):
        cache = make_cache("contiguous", model.spec, max_tokens=PROMPT + STEPS)
        first = model(ids, cache, logits="last")[:, -1].argmax(-1, keepdim=True)

        def run():
            token = first
            with use(how):
                for _ in range(STEPS):
                    token = model(token, cache, logits="last")[:, -1].argmax(-1, keepdim=True)
            cache.crop(PROMPT)

        return run

    def serve():
        engine = Engine(model, 200, max_running=REQUESTS, prefix_caching=False)
        for i in range(REQUESTS):
            engine.add(Request(ids[0, 16 * i : 16 * i + 40].tolist(), NEW, stop_ids=()))
        engine.run()

    spec, keys = models["smollm2-135m"], 4096
    cache = make_cache("contiguous", spec, max_tokens=keys)
    rows = torch.randn(1, spec.kv_heads, keys, spec.head_dim)
    row = torch.randn(1, spec.heads, 1, spec.head_dim)
    for layer in range(spec.layers):
        cache.append(layer, rows, rows)

    def attend():
        for layer in range(spec.layers):
            cache.attend(layer, row)

    return {
        "decode, torch": decode(model, "never"),
        "decode, compiled": decode(model, "compiled"),
        "decode, int8 compiled": decode(small, "compiled"),
        f"engine, {REQUESTS} requests": serve,
        "packed attention": attend,
    }


def worker() -> None:
    """Runs what it is sent, a task's name a line, and answers with seconds."""
    import torch

    with torch.inference_mode():
        known = tasks()
        for run in known.values():
            run()
        print(json.dumps(list(known)), flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            known[line.strip()]()
            print(time.perf_counter() - start, flush=True)


def start(checkout: Path, threads: int) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": str(threads)}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    return subprocess.Popen(
        [sys.executable, Path(__file__).resolve(), "--worker"], cwd=checkout, env=env, **pipes
    )


def ask(process: subprocess.Popen, name: str) -> float:
    print(name, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("old", type=Path)
    parse.add_argument("new", type=Path)
    parse.add_argument("--rounds", type=int, default=15)
    parse.add_argument("--threads", type=int, default=2)
    parse.add_argument("--out", type=Path)
    args = parse.parse_args()
    places = {"old": args.old, "old again": args.old, "new": args.new}
    processes = {name: start(place, args.threads) for name, place in places.items()}
    names = [json.loads(p.stdout.readline()) for p in processes.values()][0]
    result = {}
    for name in names:
        seconds, order = {place: [] for place in places}, list(places)
        for i in range(args.rounds):
            for place in order[i % 3 :] + order[: i % 3]:
                seconds[place].append(ask(processes[place], name))
        result[name] = {}
        for place in ("new", "old again"):
            ratios = sorted(a / b for a, b in zip(seconds[place], seconds["old"]))
            middle = {"median": statistics.median(ratios), "quarter": ratios[len(ratios) // 4]}
            result[name][place] = middle | {"three_quarters": ratios[-1 - len(ratios) // 4]}
        result[name]["seconds"] = statistics.median(seconds["old"])
        new, again = (result[name][p] for p in ("new", "old again"))
        said = [f"{r['median']:.3f} ({r['quarter']:.3f} to {r['three_quarters']:.3f})" for r in (new, again)]
        print(f"{name:<24} new / old {said[0]}   old / old {said[1]}", flush=True)
    for process in processes.values():
        process.stdin.close()
    if args.out:
        from companion.machine import describe

        args.out.write_text(json.dumps({"machine": describe(), "tasks": result}, indent=1) + "\n")


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
