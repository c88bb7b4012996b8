"""The engine on a CPU: many requests against one, against transformers in batches, and the scheduler alone.

    python -m benchmarks.engine_cpu [--threads N] [--rounds N] [--out FILE] [--only PART]

PART is throughput, steps or scheduler; the other parts of FILE stay as they are. The real model in float32,
greedy, requests of different prompt lengths that all write the same number of tokens. Paths take turns within
one run; ratios are per round. Promises: at 8 running requests at least 2 times the tokens per second of one
at a time, and at least 1.2 times transformers' batched `generate` (its left padding, the same requests and
tokens); the scheduler's own time per step flat in the number of waiting requests. Beside them: what the
roofline predicts for a decode step of 1 to 8 rows, and what the products of so many rows take.
"""

import json
import statistics
import time

import torch

from companion.cost import HardwareSpec, decode_step
from companion.engine import Engine, Request, Scheduler
from companion.machine import describe
from companion.model import load
from companion.model.products import matrix, product
from companion.paging import BlockManager

from .machine import arguments, read_bandwidth, spread, timed
from .twin import transformers_twin

LENGTHS = (16, 96, 24, 64, 40, 80, 32, 48)  # tokens of the prompts
NEW = 32  # tokens that each request writes
TEXT = "A printing press applies pressure to an inked surface resting upon a print medium. " * 30


def requests(tokenizer) -> list[list[int]]:
    ids = tokenizer.encode(TEXT)
    return [ids[7 * i : 7 * i + n] for i, n in enumerate(LENGTHS)]


def serve(model, prompts, running: int) -> tuple[float, list[list[int]], list[float]]:
    """Seconds, the tokens of each request, and the seconds of each step that only decoded."""
    engine = Engine(model, 200, max_running=running, prefix_caching=False)
    for p in prompts:
        engine.add(Request(p, NEW, stop_ids=()))
    start = time.perf_counter()
    done = engine.run()
    seconds = time.perf_counter() - start
    steps = [s.seconds for s in engine.history if s.decodes == len(s.parts) == running]
    return seconds, [c.tokens for c in done], steps


@torch.inference_mode()
def opponent(twin, prompts) -> tuple[float, list[list[int]]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    start = time.perf_counter()
    out = twin.generate(ids, attention_mask=mask, **options)
    return time.perf_counter() - start, out[:, width:].tolist()


def throughput(rounds: int) -> dict:
    model, tokenizer = load("smollm2-135m")
    twin, prompts = transformers_twin(model), requests(tokenizer)
    total, seconds, steps, tokens = NEW * len(prompts), {}, {}, {}
    paths = {
        "one at a time": lambda: serve(model, prompts, 1),
        "8 running": lambda: serve(model, prompts, 8),
        "transformers, batch of 8": lambda: (*opponent(twin, prompts), []),
    }
    serve(model, prompts[:2], 2), opponent(twin, prompts[:2])  # warm
    for i in range(rounds):
        names = list(paths)
        for name in names[i % 3 :] + names[: i % 3]:
            took, tokens[name], only = paths[name]()
            seconds.setdefault(name, []).append(took)
            steps.setdefault(name, []).extend(only)
    eight = seconds["8 running"]
    equal = sum(a == b for a, b in zip(tokens["8 running"], tokens["transformers, batch of 8"]))
    alone = sum(a == b for a, b in zip(tokens["8 running"], tokens["one at a time"]))
    return {
        "prompts": LENGTHS,
        "new_tokens": NEW,
        "rounds": rounds,
        "tokens_per_second": {n: total / statistics.median(s) for n, s in seconds.items()},
        "decode_step_seconds": {n: statistics.median(s) for n, s in steps.items() if s},
        "8 running / one at a time": spread([a / b for a, b in zip(seconds["one at a time"], eight)]),
        "8 running / transformers": spread(
            [a / b for a, b in zip(seconds["transformers, batch of 8"], eight)]
        ),
        "requests with the tokens of one at a time": f"{alone} of {len(prompts)}",
        "requests with the tokens of transformers": f"{equal} of {len(prompts)}",
    }


@torch.inference_mode()
def steps(rounds: int) -> dict:
    """A decode step of 1 to 8 rows at about 130 tokens each: predicted, measured, and its products alone."""
    model, tokenizer = load("smollm2-135m")
    ids, spec = tokenizer.encode(TEXT), model.spec
    bandwidth = read_bandwidth()["best"]
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    flops = 2 * 1536**3 / min(timed(lambda: a @ b, 5))
    machine = HardwareSpec.measured(bandwidth=bandwidth, flops=flops)
    q, kv = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    shapes = [
        (q + kv, spec.d_model),
        (spec.d_model, q),
        (2 * spec.ffn, spec.d_model),
        (spec.d_model, spec.ffn),
    ]
    weights = [matrix([torch.randn(shape)]) for _ in range(spec.layers) for shape in shapes]
    weights.append(matrix([torch.randn(spec.vocab, spec.d_model)]))
    rows = []
    for n in (1, 2, 4, 8):
        engine = Engine(model, 200, max_running=n, max_tokens_per_step=1024, prefix_caching=False)
        for i in range(n):
            engine.add(Request(ids[i : i + 120], 12 + 2 * rounds, stop_ids=()))
        engine.run()
        took = [s for s in engine.history if s.decodes == len(s.parts) == n]
        inputs = {w.shape[1]: torch.randn(n, w.shape[1]) for w in weights}
        alone = timed(lambda x=inputs: [product(x[w.shape[1]], w) for w in weights], rounds)
        library = timed(lambda x=inputs: [torch.nn.functional.linear(x[w.shape[1]], w) for w in weights], 3)
        dtypes = dict(weights="fp32", kv="fp32", compute_dtype="fp32")
        predicted = decode_step(spec, machine, n, 130, **dtypes)
        rows.append(
            {
                "rows": n,
                "predicted_s": predicted.seconds,
                "bound_by": predicted.bound_by,
                "step_s": statistics.median(s.seconds for s in took),
                "model_s": statistics.median(s.model_s for s in took),
                "scheduler_s": statistics.median(s.scheduler_s for s in took),
                "sampler_s": statistics.median(s.sampler_s for s in took),
                "products_s": statistics.median(alone),
                "products_by_F.linear_s": statistics.median(library),
            }
        )
    return {"bandwidth": bandwidth, "flops": flops, "context": 130, "rows": rows}


def scheduler(rounds: int) -> list[dict]:
    """Microseconds of planning and keeping books in a step of 8 decodes, and of adding and cancelling."""
    out = []
    for waiting in (10, 100, 1000, 10_000):
        s = Scheduler(BlockManager(100_000, 16), max_running=8, max_tokens_per_step=256)
        start = time.perf_counter()
        jobs = [s.add(i, [i % 1000] * 24, 100_000) for i in range(waiting + 8)]
        added = (time.perf_counter() - start) / len(jobs)
        took = []
        for step in range(40 * rounds + 4):
            start = time.perf_counter()
            plan = s.plan()
            for chunk in plan.chunks:
                s.commit(chunk)
                s.push(chunk.job, step)
            if step >= 4 and len(plan.chunks) == 8:
                took.append(time.perf_counter() - start)
        assert len(s.running) == 8 and s.num_waiting == waiting
        start = time.perf_counter()
        for job in jobs[-5:]:
            s.finish(job)
        cancelled = (time.perf_counter() - start) / 5
        out.append(
            {
                "waiting": waiting,
                "step_us": 1e6 * statistics.median(took),
                "add_us": 1e6 * added,
                "cancel_us": 1e6 * cancelled,
            }
        )
    return out


PARTS = {"throughput": throughput, "steps": steps, "scheduler": scheduler}


def main() -> None:
    args = arguments(__doc__, parts=PARTS)
    kept = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for name, run in PARTS.items():
        if args.only in (None, name):
            kept[name] = {"machine": describe(), "result": run(args.rounds)}
            print(json.dumps({name: kept[name]["result"]}, indent=2))
            if args.out:
                args.out.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
